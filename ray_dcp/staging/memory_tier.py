"""``MemoryTier``: which sealed files are still in the memory of a node, kept by the process that has written them.

A file's bytes stay in its staging buffer until the rank needs that again. The tier keeps the buffer open, so that they
outlive the rank, and whoever loads the checkpoint opens it by name: see ``docs/async_saves.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ray_dcp.format.names import attempt_order, parse_shard_file
from ray_dcp.staging.shared_buffer import BufferName, KeptBuffer, SharedBuffer


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A sealed file that lies at the beginning of a buffer while that has this version."""

    place: str
    """The checkpoint's path or URL."""
    key: str
    nbytes: int
    buffer: BufferName
    version: int


@dataclass(frozen=True, slots=True)
class KeptSave:
    """What is in memory of one save: files, and where it is committed in memory alone what says so."""

    place: str
    attempt: str
    files: tuple[HeldFile, ...]
    answer: bytes
    """The coordinator's answer, which commits it and is for ranks to read; empty where none has come here."""


class MemoryTier:
    """The files that ranks of this node have staged and that are sealed. Threads may share it.

    A file is kept until one of a newer attempt is committed, and no longer than its bytes are there: until the rank
    changes the version of the buffer to stage another file in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_KeptFile] = []
        self._left: set[int] = set()
        """The ranks that have left their group in order since they last staged anything."""
        self._answers: dict[tuple[str, str], bytes] = {}
        """By place and attempt, what commits a save that is in memory alone, as long as a file of it is here."""

    def keep(self, rank: int, place: str, key: str, nbytes: int, buffer: SharedBuffer, version: int) -> HeldFile:
        """Keep the sealed file at the beginning of ``buffer``, which was staged under ``version``."""
        self.back(rank)
        return self.keep_copy(rank, place, key, nbytes, buffer, version)

    def keep_copy(self, rank: int, place: str, key: str, nbytes: int, buffer: SharedBuffer, version: int) -> HeldFile:
        """As ``keep``, of a rank that may have left by now: it is one of another node."""
        kept = buffer.kept_open()
        with self._lock:
            self._drop(lambda one: one.is_there and (one.file.place, one.file.key) != (place, key))
            file = HeldFile(place, key, nbytes, kept.name, version)
            self._kept.append(_KeptFile(rank, file, kept))
            return file

    def held(self, place: str) -> tuple[HeldFile, ...]:
        """The files of the checkpoint at ``place`` that are there. Whoever asks is a rank, so the group is there."""
        with self._lock:
            self._left.clear()
            self._drop(lambda one: one.is_there)
            return tuple(one.file for one in self._kept if one.file.place == place)

    def read(self, file: HeldFile, offset: int, nbytes: int) -> bytes | None:
        """Bytes of a file that ``held`` has told of; None where it is not there any more."""
        with self._lock:
            found = next((one.buffer for one in self._kept if one.file == file), None)
            buffer = found.again() if found is not None else None
        if buffer is None:
            return None
        try:
            content = buffer.read(offset, min(nbytes, file.nbytes - offset))
            return content if buffer.version == file.version else None  # whoever overwrites it has changed that first
        finally:
            buffer.close()

    def commit(self, place: str, key: str, answer: bytes) -> None:
        """Note that the save with the file ``key`` is committed by ``answer`` alone, and let go of older ones."""
        with self._lock:
            self._answers[place, _attempt_of(key)] = answer
        self.committed(key)

    def kept_under(self, root: str) -> tuple[KeptSave, ...]:
        """What is there of the checkpoints below ``root``, by save. Whoever asks is a rank, so the group is there."""
        of_saves: dict[tuple[str, str], list[HeldFile]] = {}
        with self._lock:
            self._left.clear()
            self._drop(lambda one: one.is_there)
            for file in (one.file for one in self._kept):
                if file.place.startswith(f"{root.rstrip('/')}/"):
                    of_saves.setdefault((file.place, _attempt_of(file.key)), []).append(file)
            return tuple(
                KeptSave(*save, tuple(files), self._answers.get(save, b"")) for save, files in of_saves.items()
            )

    def committed(self, key: str) -> None:
        """Let go of the files of attempts that are older than that of ``key``, which is committed."""
        committed = _order_of(key)
        with self._lock:
            self._drop(lambda one: one.is_there and _order_of(one.file.key) >= committed)

    def left(self, rank: int) -> None:
        """Note that ``rank`` has left its group in order: nobody is to go on from what it has staged."""
        with self._lock:
            self._left.add(rank)

    def all_left(self) -> None:
        """Note that all ranks have left: their group has ended."""
        with self._lock:
            self._left.update(one.rank for one in self._kept)

    def back(self, rank: int) -> None:
        """Note that ``rank`` is in its group: it stages something."""
        with self._lock:
            self._left.discard(rank)

    @property
    def is_for_later(self) -> bool:
        """Whether there is a file of a rank that has not left in order: its group may form anew and ask for it."""
        with self._lock:
            self._drop(lambda one: one.is_there)
            return any(one.rank not in self._left for one in self._kept)

    def tidy(self) -> None:
        """Let go of the files whose bytes are not there any more."""
        with self._lock:
            self._drop(lambda one: one.is_there)

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._drop(lambda one: False)

    def _drop(self, stays: Callable[[_KeptFile], bool]) -> None:
        """Let go of the files for which ``stays`` is false. With the lock held."""
        kept, self._kept = self._kept, []
        for one in kept:
            if stays(one):
                self._kept.append(one)
            else:
                one.buffer.close()
        there = {(one.file.place, _attempt_of(one.file.key)) for one in self._kept}
        self._answers = {save: answer for save, answer in self._answers.items() if save in there}


@dataclass(frozen=True, slots=True)
class _KeptFile:
    rank: int
    file: HeldFile
    buffer: KeptBuffer

    @property
    def is_there(self) -> bool:
        return self.buffer.version == self.file.version


def _attempt_of(key: str) -> str:
    parts = parse_shard_file(key)
    return parts.attempt if parts is not None else ""


def _order_of(key: str) -> tuple[int, str]:
    """Sorts shard files by when their attempts began."""
    return attempt_order(_attempt_of(key))


__all__ = ["HeldFile", "KeptSave", "MemoryTier"]
