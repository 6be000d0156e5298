"""``NearbyFiles``: the files of one checkpoint that can be had from nearer places than its store.

Each range comes from the first place of its file that has it. A place that has lost the bytes, or has wrong ones, is
left for that file, for the rest of the load; behind the last place is the store. See ``docs/async_saves.md``.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ray_dcp.errors import CorruptCheckpointError, without_keys
from ray_dcp.format.manifest import EntryTable
from ray_dcp.progress import advance
from ray_dcp.staging.buffer_errors import StagingLostError, StagingMemoryError
from ray_dcp.staging.memory_tier import HeldFile
from ray_dcp.staging.peers.peer import Peer, PeerFile, PeerGoneError, PeerLostError, chunks
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.store.reading import Fill
from ray_dcp.store.store import StoreTraits

logger = logging.getLogger(__name__)

STORAGE = "storage"
"""What ``LoadReport.nbytes_by_place`` calls the store."""
MEMORY_TRAITS = StoreTraits(page_cache=True)
"""How memory of this machine is best read."""
_PEER_TRAITS = StoreTraits(request_nbytes=16 << 20)
"""How memory of another machine is best read: a few chunks at once."""
_PIECE_NBYTES = 1 << 20
_T = TypeVar("_T")


class PlaceLostError(Exception):
    """A place that does not have a file's bytes any more."""


class Place(Protocol):
    """Somewhere that has a file of a checkpoint. Used by several threads."""

    kind: str
    """What ``LoadReport.nbytes_by_place`` calls it."""
    traits: StoreTraits
    """How it is best read."""

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with what follows ``offset`` in the file; counts as progress.

        What it fills is what was sealed there, or what a block's checksum tells. Raises ``PlaceLostError``; the buffers
        may then hold anything.
        """
        ...

    def close(self) -> None:
        """Let go of whatever it takes to read there. Safe to call again."""
        ...


class BufferPlace:
    """A file in a staging buffer of this node."""

    kind = "memory"
    traits = MEMORY_TRAITS

    def __init__(self, file: HeldFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._buffer: SharedBuffer | None = None

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if offset + sum(map(len, buffers)) > self._file.nbytes:
            raise PlaceLostError("the file there is shorter")
        buffer = self._opened()
        at = offset
        for target in buffers:
            for start in range(0, len(target), _PIECE_NBYTES):
                piece = target[start : start + _PIECE_NBYTES]
                buffer.read_ahead(at, len(piece))
                _copy(piece, buffer.memory[at : at + len(piece)])
                at += len(piece)
                advance(len(piece))
        if buffer.version != self._file.version:  # whoever overwrites it has changed that first
            raise PlaceLostError("its buffer is used for another file by now")

    def _opened(self) -> SharedBuffer:
        with self._lock:
            if self._buffer is None:
                try:
                    self._buffer = SharedBuffer.attach(self._file.buffer, writable=False)
                except (StagingLostError, StagingMemoryError) as error:
                    raise PlaceLostError(str(error)) from error
            return self._buffer

    def close(self) -> None:
        with self._lock:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None


class PeerPlace:
    """A file in the memory of another node's agent. ``lost`` are the peers that do not answer, for all their files."""

    kind = "peer"
    traits = _PEER_TRAITS

    def __init__(self, of_peer: PeerFile, lost: set[str]) -> None:
        self._file = of_peer.file
        self._peer: Peer = of_peer.peer
        self._lost = lost

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._peer.node in self._lost:
            raise PlaceLostError(f"node {self._peer.node} has not answered before")
        try:
            arriving = chunks(self._peer, self._file, offset, sum(map(len, buffers)), in_flight=1)
            chunk, at = memoryview(b""), 0
            for target in buffers:
                filled = 0
                while filled < len(target):
                    if at == len(chunk):
                        chunk, at = memoryview(next(arriving)), 0
                        advance(len(chunk))
                    length = min(len(chunk) - at, len(target) - filled)
                    _copy(target[filled : filled + length], chunk[at : at + length])
                    at, filled = at + length, filled + length
        except PeerLostError as error:
            if isinstance(error, PeerGoneError):
                self._lost.add(self._peer.node)
            raise PlaceLostError(f"node {self._peer.node}: {error}") from error

    def close(self) -> None:
        """Do nothing: it has nothing open."""


class NearbyFiles:
    """The places of a checkpoint's files, by key, nearest first. Threads may share it.

    ``look_farther`` gives those of files that ``places`` does not have; it is called once, when one is wanted.
    """

    def __init__(
        self,
        places: Mapping[str, Iterable[Place]],
        look_farther: Callable[[], Mapping[str, Iterable[Place]]] | None = None,
    ) -> None:
        self._places = {key: tuple(of_key) for key, of_key in places.items()}
        self._all = [place for of_key in self._places.values() for place in of_key]
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._look_farther = look_farther
        self.nbytes: Counter[str] = Counter()
        """Bytes that were read, by the kind of place; of the store, too."""

    def has(self, key: str) -> bool:
        """Whether some place nearer than the store has the file."""
        return self._nearest(key) is not None

    def traits(self, key: str) -> StoreTraits | None:
        """How the file is best read where it is nearest; None where that is the store."""
        place = self._nearest(key)
        return None if place is None else place.traits

    def fill(self, key: str, offset: int, buffers: Sequence[memoryview], otherwise: Fill) -> None:
        """Fill ``buffers`` from the nearest place that has the bytes, ``otherwise`` from the store."""
        nbytes = sum(map(len, buffers))
        while (place := self._nearest(key)) is not None:
            try:
                place.fill(offset, buffers)
            except PlaceLostError as error:
                self._leave(key, place, error)
            else:
                self._count(place.kind, nbytes)
                return
        otherwise(offset, buffers)
        self._count(STORAGE, nbytes)

    def again_from_next(self, key: str, read: Callable[[], _T]) -> _T:
        """What ``read`` returns, which reads and checks bytes of one file.

        Where they fail their checksum it is called again, and gets them from the next place. What the store has wrong
        is raised.
        """
        while True:
            place = self._nearest(key)
            try:
                return read()
            except CorruptCheckpointError as error:
                if place is None:
                    raise
                self._leave(key, place, error)

    def close(self) -> None:
        """Let go of all places; what is read from now on comes from the store."""
        with self._looking, self._lock:
            self._places, self._look_farther = {}, None
        for place in self._all:
            place.close()

    def _nearest(self, key: str) -> Place | None:
        if key not in self._places and self._look_farther is not None:
            self._find_farther()
        return next(iter(self._places.get(key, ())), None)

    def _find_farther(self) -> None:
        with self._looking:
            if self._look_farther is None:
                return  # another thread has
            found = {key: tuple(of_key) for key, of_key in self._look_farther().items()}
            with self._lock:
                self._places = found | self._places
                self._all += [place for of_key in found.values() for place in of_key]
            self._look_farther = None

    def _leave(self, key: str, place: Place, why: Exception) -> None:
        """Read no more of this file at ``place``, unless another thread has found that out before."""
        with self._lock:
            places = self._places.get(key, ())
            if place not in places:
                return
            self._places[key] = tuple(other for other in places if other is not place)
        logger.warning("%s is not read from %s, but from the next place that has it: %s", key, place.kind, why)

    def _count(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.nbytes[kind] += nbytes


class Neighbours(Protocol):
    """Who says what is in memory, here and on other nodes. Both answer at once, or say that there is nothing."""

    def held_nearby(self, place: str) -> Sequence[HeldFile]:
        """The files of the checkpoint at ``place`` that are in memory of this node."""
        ...

    def held_by_peers(self, place: str, keys: Collection[str]) -> Sequence[PeerFile]:
        """Those that are in memory of other nodes. No more answers are waited for once there are all of ``keys``."""
        ...


def nearby_files(place: str, neighbours: Neighbours, entries: EntryTable) -> NearbyFiles | None:
    """The files of the checkpoint at ``place``, with these entries, that are in memory; None where none is.

    Their keys have the attempt's name, and none of them ends before an entry does. Where this node has some of them,
    others are asked only when a file is wanted that it does not have: with many nodes that is a question to each.
    """
    ends: defaultdict[str, int] = defaultdict(int)
    for key, offset, nbytes in zip(
        entries.files, entries.column("payload_offset"), entries.column("payload_nbytes"), strict=True
    ):
        ends[key] = max(ends[key], offset + nbytes)

    def is_one(file: HeldFile) -> bool:
        return file.key in ends and ends[file.key] <= file.nbytes

    found: dict[str, list[Place]] = {
        file.key: [BufferPlace(file)] for file in neighbours.held_nearby(place) if is_one(file)
    }
    elsewhere = ends.keys() - found.keys()

    def at_peers() -> Mapping[str, Sequence[Place]]:
        lost: set[str] = set()
        held: defaultdict[str, list[Place]] = defaultdict(list)
        for of_peer in neighbours.held_by_peers(place, elsewhere):
            if of_peer.file.key in elsewhere and is_one(of_peer.file):
                held[of_peer.file.key].append(PeerPlace(of_peer, lost))
        if (found or held) and len(held) < len(elsewhere):
            logger.warning("%d of the %d files of %s are in no node's memory any more, and are read from storage",
                           len(elsewhere) - len(held), len(ends), without_keys(place))  # fmt: skip
        return held

    if found:
        return NearbyFiles(found, at_peers if elsewhere else None)
    held = at_peers() if elsewhere else {}
    return NearbyFiles(held) if held else None


def _copy(target: memoryview, source: memoryview) -> None:
    if len(target) < _PIECE_NBYTES // 16:
        target[:] = source
    else:  # numpy lets other threads go on meanwhile
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


__all__ = [
    "MEMORY_TRAITS",
    "STORAGE",
    "BufferPlace",
    "NearbyFiles",
    "Neighbours",
    "PeerPlace",
    "Place",
    "PlaceLostError",
    "nearby_files",
]
