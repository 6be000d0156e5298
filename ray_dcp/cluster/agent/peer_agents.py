"""``PeerAgents``: the agents of one group on other nodes, found by their names, and what is asked of them.

Whatever is asked has a limit: a node that is lost does not answer, and Ray knows of that late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors

from ray_dcp.cluster.link import NAMESPACE
from ray_dcp.staging.memory_tier import HeldFile
from ray_dcp.staging.peers.peer import PeerFile, PeerGoneError, PeerLostError, peers_of
from ray_dcp.staging.peers.peer_copies import CopyOffer
from ray_dcp.wording import first_line_of

READS = "reads"
"""The group of an agent's threads that send what is in memory."""
_ZONE = "ray.io/availability-zone"
_ALL_HELD_TIMEOUT_S = 1.0
"""How long a load waits for all other nodes together to say what they have in memory."""
_CHUNK_TIMEOUT_S = 5.0
_TAKE_COPY_TIMEOUT_S = 5.0


class PeerAgent:
    """The agent of another node: a ``Peer`` for whoever reads, and a ``CopyKeeper``."""

    def __init__(self, node: str, handle: Any) -> None:
        self.node = node
        self.handle = handle

    def begin(self, file: HeldFile, offset: int, nbytes: int) -> Callable[[], bytes]:
        try:
            asked = self.handle.read.remote(file, offset, nbytes)
        except RayError as error:
            raise PeerGoneError(first_line_of(error)) from error

        def received() -> bytes:
            content: bytes | None = _answer(asked, _CHUNK_TIMEOUT_S)
            if content is None:
                raise PeerLostError("it does not have the file in memory any more")
            return content

        return received

    def take_copy(self, offer: CopyOffer) -> bool:
        return bool(_answer(self.handle.take_copy.remote(offer), _TAKE_COPY_TIMEOUT_S))

    def left(self, rank: int) -> None:
        with suppress(RayError):
            self.handle.source_left.remote(rank)


class PeerAgents:
    """The ``OtherNodes`` of a process of ``group``: what is on its own node is left out."""

    def __init__(self, group: str) -> None:
        self.node: str = ray.get_runtime_context().get_node_id()
        self._group = group

    def keepers(self) -> Iterator[PeerAgent]:
        return self._found(peers_of(self.node, self._zones()))

    def find(self, node: str) -> PeerAgent:
        found = next(self._found([node]), None)
        if found is None:
            raise PeerGoneError("its agent is gone")
        return found

    def held(self, place: str, keys: Collection[str]) -> Sequence[PeerFile]:
        """The files of the checkpoint at ``place`` that other nodes have in memory, if they say so at once.

        It does not wait for more answers once there are all of ``keys``: a lost node does not answer.
        """
        until = time.monotonic() + _ALL_HELD_TIMEOUT_S
        asked = {}
        for peer in self._found(peers_of(self.node, self._zones())):
            asked[peer.handle.held.remote(place)] = peer
            if time.monotonic() > until:  # there are very many of them, or Ray is busy
                break
        held: list[PeerFile] = []
        missing, waiting = set(keys), list(asked)
        while missing and waiting and (left_s := until - time.monotonic()) > 0:
            ready, waiting = ray.wait(waiting, timeout=left_s)
            for reference in ready:
                with suppress(RayError):  # it has ended meanwhile
                    files = ray.get(reference, timeout=_ALL_HELD_TIMEOUT_S)
                    held += [PeerFile(file, asked[reference]) for file in files]
                    missing -= {file.key for file in files}
        return held

    def _zones(self) -> dict[str, str]:
        """The zone of each node that has an agent of the group, and of this one; empty where nobody has said."""
        names = {one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE}
        return {
            node["NodeID"]: node.get("Labels", {}).get(_ZONE, "")
            for node in ray.nodes()
            if node["NodeID"] == self.node or (node["Alive"] and agent_name(self._group, node["NodeID"]) in names)
        }

    def _found(self, nodes: Sequence[str]) -> Iterator[PeerAgent]:
        for node in nodes:
            with suppress(ValueError):  # it has ended meanwhile
                yield PeerAgent(node, ray.get_actor(agent_name(self._group, node), namespace=NAMESPACE))


def agent_name(group: str, node_id: str) -> str:
    return f"agent/{group}/{node_id}"


def _answer(reference: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise PeerGoneError(f"it has not answered for {timeout_s:g} s") from error
    except Exception as error:  # whatever is wrong there, there is the next place
        raise PeerGoneError(first_line_of(error)) from error


__all__ = ["READS", "PeerAgent", "PeerAgents", "agent_name"]
