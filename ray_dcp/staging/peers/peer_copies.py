"""``PeerCopies``: what a node agent keeps in its memory of the files of other nodes.

A source offers a file; the copy is fetched in a thread of its own, and is then a file of the memory tier as any other.
Of each rank of another node there is one buffer, in which the next copy takes the place of the last: that is committed
by then, so nobody asks for it. See ``docs/async_saves.md``.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ray_dcp.staging.buffer_errors import StagingError
from ray_dcp.staging.memory_tier import HeldFile, MemoryTier
from ray_dcp.staging.peers.peer import Peer, PeerLostError, chunks
from ray_dcp.staging.sealing import OpenEnds, is_sealed_with
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.staging.write_rate import WriteRate

logger = logging.getLogger(__name__)

_REMEMBERED_SAVES = 16
_SAVES_WITHOUT_OFFER = 3
"""A buffer is let go of when its source has offered nothing for so many saves: it is lost, or has another peer."""


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """A sealed file of a committed save, in the memory of the node that offers it to another one."""

    save: str
    """The save, by a name that all ranks have for it."""
    node: str
    rank: int
    file: HeldFile
    open_ends: OpenEnds
    crcs: bytes
    """The checksums that it was sealed with, as ``write_sealed`` returns them."""
    per_s: float | None
    """How many bytes a second are fetched at most; None: all that there is."""


class PeerCopies:
    """The copies of one agent. ``find`` gives a source by its node, or raises ``PeerLostError``."""

    def __init__(self, tier: MemoryTier, find: Callable[[str], Peer]) -> None:
        self._tier = tier
        self._find = find
        self._rate = WriteRate()
        self._changed = threading.Condition()
        self._saves: deque[str] = deque(maxlen=_REMEMBERED_SAVES)
        self._committed = ""
        self._offered: dict[tuple[str, int], CopyOffer] = {}
        self._copies: dict[tuple[str, int], _Copy] = {}
        self._thread: threading.Thread | None = None

    def took_part(self, save: str) -> None:
        """Note that ranks of this node are in ``save``, and would have their files kept in memory."""
        with self._changed:
            if save not in self._saves:
                self._saves.append(save)

    def take(self, offer: CopyOffer) -> bool:
        """Whether this node keeps a copy of what is offered; that is fetched when this has returned.

        It does not where it has no rank in that save: what memory it has is not the group's.
        """
        with self._changed:
            if offer.save not in self._saves:
                return False
            self._tier.back(offer.rank)
            source = (offer.node, offer.rank)
            self._offered[source] = offer
            self._copies.setdefault(source, _Copy()).num_unoffered = 0
            self._begin()
        return True

    def committed(self, key: str) -> None:
        """Note that a save is committed, in which ``key`` is a file of this node."""
        attempt = key.rpartition("_")[2]
        with self._changed:
            if attempt == self._committed:
                return
            self._committed = attempt
            for copy in self._copies.values():
                copy.num_unoffered += 1
            if any(copy.is_idle for copy in self._copies.values()):
                self._begin()

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is fetched any more, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def let_go(self) -> None:
        """Let go of all buffers, soon, and fetch nothing more of what was offered. The tier has a hold of its own."""
        with self._changed:
            self._offered.clear()
            for copy in self._copies.values():
                copy.num_unoffered = _SAVES_WITHOUT_OFFER
            self._begin()

    def _begin(self) -> None:
        """Have a thread do what there is to do. With the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agent-copies", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the system has no thread to give; the next save tries again
                self._thread = None
                logger.warning("copies of other nodes' files have to wait: %s", error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._let_go()
                if not self._offered:
                    self._thread = None
                    self._changed.notify_all()
                    return
                source, offer = next(iter(self._offered.items()))
                del self._offered[source]
                copy = self._copies[source]
            try:
                self._fetch(offer, copy)
            except Exception as error:  # noqa: BLE001 - nobody waits for a copy, and the next one may come to something
                self._give_up(offer, copy, error)

    def _let_go(self) -> None:
        idle = [source for source, copy in self._copies.items() if copy.is_idle and source not in self._offered]
        for source in idle:
            self._copies.pop(source).close()
        self._tier.tidy()

    def _fetch(self, offer: CopyOffer, copy: _Copy) -> None:
        file = offer.file
        buffer = copy.buffer_of(file.nbytes, self._tier)
        at = 0
        for chunk in chunks(self._find(offer.node), file, 0, file.nbytes):
            self._require_wanted(offer)
            buffer.memory[at : at + len(chunk)] = chunk
            at += len(chunk)
            self._rate.spend(len(chunk), offer.per_s)
        if not is_sealed_with(buffer.memory, offer.open_ends, array("I", offer.crcs)):
            raise PeerLostError("what has come fails its checksums")
        self._tier.keep_copy(offer.rank, file.place, file.key, file.nbytes, buffer, buffer.version)
        copy.is_told = False

    def _require_wanted(self, offer: CopyOffer) -> None:
        source = (offer.node, offer.rank)
        with self._changed:
            if source in self._offered:
                raise PeerLostError("the file of the next save was offered before all of this one had come")
            if self._copies[source].is_idle:
                raise PeerLostError("newer saves are committed, or this agent ends")

    def _give_up(self, offer: CopyOffer, copy: _Copy, error: Exception) -> None:
        known = isinstance(error, PeerLostError | StagingError | OSError)
        logger.log(
            logging.DEBUG if copy.is_told and known else logging.WARNING,
            "no copy of %s is kept on this node, so the loss of node %s would have it read from storage: %s",
            offer.file.key,
            offer.node,
            error,
            exc_info=None if known else error,
        )
        copy.is_told = True


class _Copy:
    """The memory for the files of one rank of another node."""

    def __init__(self) -> None:
        self.num_unoffered = 0
        """How many saves were committed here since the last offer."""
        self.is_told = False
        """Whether it was told that the last copy came to nothing."""
        self._buffer: SharedBuffer | None = None

    @property
    def is_idle(self) -> bool:
        return self.num_unoffered >= _SAVES_WITHOUT_OFFER

    def buffer_of(self, nbytes: int, tier: MemoryTier) -> SharedBuffer:
        """A buffer of that size or more, whose bytes may be overwritten. Raises ``StagingMemoryError``."""
        if self._buffer is not None:
            self._buffer.renew()
            if self._buffer.nbytes < nbytes:
                self.close()
                tier.tidy()  # which holds the memory, too
        if self._buffer is None:
            self._buffer = SharedBuffer.create(nbytes)
        return self._buffer

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()


__all__ = ["CopyOffer", "PeerCopies"]
