"""Lays out a shard file in memory that other processes see, for one of them to write.

What depends on the checksums of large payloads is left open: see ``staging.sealing``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.zip_record import RecordFrame
from ray_dcp.progress import advance
from ray_dcp.staging.buffer_errors import TornStagingError
from ray_dcp.staging.sealing import OpenEnds
from ray_dcp.torch_private import version_of
from ray_dcp.write.results import WrittenColumns
from ray_dcp.write.shard_layout import NumberedRecord, ShardLayout, write_records
from ray_dcp.write.tensor_record import TensorRecord


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that lies at the beginning of a staging buffer, but for the open ends of its records."""

    key: str
    """Key of the shard file that it is to be."""
    nbytes: int
    open_ends: OpenEnds
    columns: WrittenColumns
    """What is in the file; ``with_crcs`` adds what sealing finds out."""


class FileToStage:
    """A shard file whose length is known and of which nothing is copied yet."""

    def __init__(
        self, key: str, rank: int, items: Sequence[WriteItem], planner: SavePlanner, *, watches: bool = False
    ) -> None:
        """Resolve all items. They must keep their values until ``copy_to`` returns, which ``watches`` that they do.

        What a planner of the user's makes is copied here: it may give the same memory again and again. Raises
        ``StateDictError`` where a tensor is not what the plan says.
        """
        self._layout = ShardLayout(items, planner)
        self._items = items
        if watches:
            self._layout.tensors = []
        self._records: list[NumberedRecord] = []
        for records in self._layout.batches():
            if not self._layout.resolves_in_place:
                for _, record in records:
                    record.keep_values()
            self._records += records
        self._columns = WrittenColumns(key, rank, len(items))
        self._watched = [(number, tensor, version_of(tensor)) for number, tensor in self._layout.tensors or ()]
        self._layout.tensors = None

    @property
    def devices(self) -> set[torch.device]:
        """Where the tensors are."""
        return {record.tensor.device for _, record in self._records if isinstance(record, TensorRecord)}

    @property
    def nbytes(self) -> int:
        """Length of the file, in bytes: so much of a buffer is needed."""
        return self._layout.nbytes

    def copy_to(self, memory: memoryview) -> StagedFile:
        """Fill the beginning of ``memory``; the state may change when this returns. It is called once.

        Counts as progress, and raises what the call was interrupted with; ``TornStagingError`` where a tensor that is
        watched was changed in place since this was made.
        """
        sink = StagedBytes(memory)
        write_records(self._records, sink, self._columns)
        self._layout.note_repeats(self._columns)
        sink.copy_payloads()
        self._records = []
        watched, self._watched = self._watched, []
        torn = [self._items[number].index.fqn for number, tensor, version in watched if version_of(tensor) != version]
        if torn:
            raise TornStagingError(sorted(set(torn)))
        return StagedFile(self._columns.file, self.nbytes, sink.open_ends(), self._columns)


class StagedBytes:
    """A ``RecordSink`` that is memory. Large payloads come last, so that nothing runs between two of them."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._position = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._payload_offsets, self._frame_of = array("q"), array("I")
        self._number_of_frame: dict[RecordFrame, int] = {}

    def write(self, chunk: bytes | memoryview) -> int:
        end = self._position + len(chunk)
        self._memory[self._position : end] = chunk
        self._position = end
        return len(chunk)

    def write_large(self, frame: RecordFrame, tensor: torch.Tensor) -> tuple[int, ...]:
        self.write(frame.head)
        start, end = self._position, self._position + frame.payload_nbytes
        self._copies.append((self._bytes[start:end].view(tensor.dtype).view(tensor.shape), tensor))
        self._payload_offsets.append(start)
        self._frame_of.append(self._number_of_frame.setdefault(frame, len(self._number_of_frame)))
        self._position += frame.nbytes - len(frame.head)
        return (0,) * -(-frame.payload_nbytes // BLOCK_NBYTES)

    def tell(self) -> int:
        return self._position

    def copy_payloads(self) -> None:
        """Copy the large payloads; all are there when this returns."""
        devices = set()
        for target, tensor in self._copies:
            if tensor.device.type == "cuda":
                # Resolved there: a copy that is under way cannot be resolved here.
                target.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
                devices.add(tensor.device)
            else:
                target.copy_(tensor)
            advance(target.nbytes)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._copies = []

    def open_ends(self) -> OpenEnds:
        return OpenEnds(self._payload_offsets, self._frame_of, tuple(self._number_of_frame))


__all__ = ["FileToStage", "StagedBytes", "StagedFile"]
