"""Verifying a checkpoint: every block of every file is read again and checked.

Decided first (``plan_verify``), then done (``verify_checkpoint``). Nothing is changed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

from ray_dcp.format.checksums import combined_crc
from ray_dcp.maintenance.verify.findings import Fault, FilePlan, Item, Unchecked, VerifyReport
from ray_dcp.maintenance.verify.inventory import VerifyPlan, plan_verify
from ray_dcp.maintenance.verify.pieces import (
    READ_NBYTES,
    CheckedPiece,
    FilePiece,
    PartOfSpan,
    ThreadBuffers,
    check_piece,
    inspect_large,
    is_large,
    read_ahead,
    small_pieces,
    span_pieces,
)
from ray_dcp.maintenance.verify.record_check import InspectedRecord, Span

__all__ = ["Fault", "Unchecked", "VerifyPlan", "VerifyReport", "plan_verify", "verify_checkpoint"]

SMALL_SAMPLED_NBYTES = 256 << 10
"""A record up to this size is read whole even for a sample: that costs about what a look at its structure does."""


def verify_checkpoint(plan: VerifyPlan, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> VerifyReport:
    """Read and check what ``plan`` says; all that is wrong is in the report.

    ``on_bytes`` is called with the size of each piece that has been checked. Raises ``StoreError`` where the store
    fails; a file that is missing or ends too early is a fault. Memory is bounded, whatever the size of the files.
    """
    began = time.monotonic()
    tally = Tally()
    small_nbytes = READ_NBYTES if plan.sample is None else SMALL_SAMPLED_NBYTES
    buffers = ThreadBuffers()

    def check_all(pieces: Iterable[FilePiece]) -> None:
        with closing(read_ahead(lambda one: check_piece(plan.store, one, buffers.get(one.nbytes)), pieces)) as ended:
            for checked in ended:
                tally.add(checked)
                on_bytes(checked.piece.nbytes)

    check_all(piece for file in plan.files for piece in small_pieces(file, small_nbytes))
    large = list(inspect_all(plan, plan.files, small_nbytes))
    tally.add_inspected(large)
    check_all(_large_pieces(plan, large))
    return VerifyReport(
        checkpoint_id=plan.checkpoint_id,
        has_manifest=plan.manifest is not None,
        num_files=len(plan.files),
        num_items=plan.num_items,
        num_blocks=tally.num_blocks,
        num_blocks_checked=tally.num_blocks_checked,
        nbytes=plan.nbytes,
        nbytes_checked=tally.nbytes_checked,
        sample=plan.sample,
        seed=None if plan.sample is None else plan.seed,
        seconds=time.monotonic() - began,
        faults=sorted([*plan.faults, *tally.faults], key=lambda fault: (fault.file, fault.start, fault.fqn)),
        unchecked=tally.unchecked,
        notes=plan.notes,
    )


class Tally:
    """Adds up what pieces turned out to be."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.unchecked: list[Unchecked] = []
        self.num_blocks = 0
        self.num_blocks_checked = 0
        self.nbytes_checked = 0
        self._partial: dict[tuple[str, int], list[tuple[PartOfSpan, int]]] = {}

    def add_inspected(self, records: Sequence[InspectedRecord]) -> None:
        for record in records:
            self.faults += record.faults
            self.unchecked += record.unchecked
            self.num_blocks += record.num_spans

    def add(self, checked: CheckedPiece) -> None:
        self.faults += checked.faults
        self.unchecked += checked.unchecked
        self.num_blocks += sum(record.num_spans for record in checked.inspected)
        for part in checked.checked:
            self._count(part.span)
        for part, crc in checked.crcs:
            self._join(part, crc)

    def _join(self, part: PartOfSpan, crc: int) -> None:
        """Keep the checksum of a part until those of the others are there."""
        span = part.span
        parts = self._partial.setdefault((span.item.file, span.start), [])
        parts.append((part, crc))
        if sum(one.nbytes for one, _ in parts) == span.nbytes:
            whole = 0
            for one, of_part in sorted(parts, key=lambda joined: joined[0].start):
                whole = combined_crc(whole, of_part, one.nbytes)
            if whole != span.crc:
                self.faults.append(span.fault())
            del self._partial[span.item.file, span.start]
            self._count(span)

    def _count(self, span: Span) -> None:
        self.num_blocks_checked += 1
        self.nbytes_checked += span.nbytes


def inspect_all(plan: VerifyPlan, files: Sequence[FilePlan], small_nbytes: int) -> Iterator[InspectedRecord]:
    """Inspect the structure of all records that are not read as a whole."""
    large = (item for file in files for item in file.items if is_large(item, small_nbytes))

    def inspect(item: Item) -> InspectedRecord:
        return inspect_large(plan.store, item)

    return read_ahead(inspect, large)


def _large_pieces(plan: VerifyPlan, large: Sequence[InspectedRecord]) -> Iterator[FilePiece]:
    chosen = _sample(plan, large)
    for number, record in enumerate(large):
        spans = record.spans()
        if chosen is not None:
            mine = chosen.get(number, frozenset())
            spans = (span for place, span in enumerate(spans) if place in mine)
        yield from span_pieces(record.item, spans)


def _sample(plan: VerifyPlan, large: Sequence[InspectedRecord]) -> Mapping[int, frozenset[int]] | None:
    """Which spans of which record to check; None for all."""
    if plan.sample is None:
        return None
    counts = [record.num_spans for record in large]
    total = sum(counts)
    places = sorted(random.Random(plan.seed).sample(range(total), min(total, math.ceil(plan.sample * total))))
    chosen: dict[int, list[int]] = {}
    record, begin = 0, 0
    for place in places:
        while place >= begin + counts[record]:
            begin += counts[record]
            record += 1
        chosen.setdefault(record, []).append(place - begin)
    return {number: frozenset(spans) for number, spans in chosen.items()}
