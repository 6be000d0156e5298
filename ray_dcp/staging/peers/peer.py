"""``Peer``: the agent of another node, as whoever reads files in its memory sees it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ray_dcp.staging.memory_tier import HeldFile

CHUNK_NBYTES = 4 << 20
"""Bytes that travel at once: 1 MiB each takes twice as long as 4, of which a few together do not fill any memory."""
CHUNKS_IN_FLIGHT = 3


class PeerLostError(Exception):
    """A peer that has not sent the bytes: it is gone or slow, or has them no more."""


class PeerGoneError(PeerLostError):
    """A peer that does not answer: none of its files can be had."""


class Peer(Protocol):
    """The agent of another node. Threads may share it."""

    node: str

    def begin(self, file: HeldFile, offset: int, nbytes: int) -> Callable[[], bytes]:
        """Ask for a range of a file in its memory, at once; what is returned waits for the bytes, not for ever.

        Both raise ``PeerLostError``.
        """
        ...


@dataclass(frozen=True, slots=True)
class PeerFile:
    """A file that a peer has said to hold."""

    file: HeldFile
    peer: Peer


def chunks(peer: Peer, file: HeldFile, offset: int, nbytes: int, in_flight: int = CHUNKS_IN_FLIGHT) -> Iterator[bytes]:
    """Yield ``nbytes`` bytes of the file from ``offset`` on, in order. Raises ``PeerLostError``."""
    end = offset + nbytes
    if end > file.nbytes:
        raise PeerLostError("the file there is shorter")
    waiting: deque[tuple[int, Callable[[], bytes]]] = deque()
    at = offset
    while at < end or waiting:
        while at < end and len(waiting) < in_flight:
            length = min(CHUNK_NBYTES, end - at)
            waiting.append((length, peer.begin(file, at, length)))
            at += length
        length, received = waiting.popleft()
        chunk = received()
        if len(chunk) != length:
            raise PeerLostError(f"it sent {len(chunk)} of {length} bytes")
        yield chunk


def peers_of(node: str, zones: Mapping[str, str]) -> list[str]:
    """The other nodes, the one first that is to keep what ``node`` has; ``zones`` has the zone of every node.

    All nodes go round one ring, in which neighbours are in different zones where there are enough; those in the zone of
    ``node`` come after all others.
    """
    of_zones = defaultdict(list)
    for one in sorted(zones):
        of_zones[zones[one]].append(one)
    places = {one: (number, zone) for zone, nodes in of_zones.items() for number, one in enumerate(nodes)}
    ring = sorted(places, key=places.__getitem__)
    at = ring.index(node)
    after = ring[at + 1 :] + ring[:at]
    return sorted(after, key=lambda one: zones[one] == zones[node])


__all__ = ["CHUNK_NBYTES", "Peer", "PeerFile", "PeerGoneError", "PeerLostError", "chunks", "peers_of"]
