"""``NodeReads``: all that a reader knows of shared reads. Without one, a rank reads everything by itself.

Each load calls in this order: ``offer`` on each rank, with its plan; ``agree`` with what the coordinator answers; and
``fill`` before anything else is read. It returns the entries that are filled; the others are read as without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer, Want
from ray_dcp.reads.checkpoint import OpenedCheckpoint
from ray_dcp.reads.engine import Lane
from ray_dcp.reads.plan.shape import ReadShape
from ray_dcp.reads.record_reads import RecordReads
from ray_dcp.reads.sharing.node_reads import Passing, SharedReads, goes_straight, offer_of, share_rules, want_of
from ray_dcp.reads.sharing.segment import NodeMemory
from ray_dcp.reads.tasks import Loaded, RecordTasks, count_as_changed
from ray_dcp.reads.wanted import WantedRecord, WantedRecords, large_of
from ray_dcp.store.store import StoreTraits


class NodeReads:
    """One rank's way to the reads that its node shares. ``nbytes_read`` counts the bytes that it has read for all."""

    def __init__(self, sharing: NodeMemory) -> None:
        self._sharing = sharing
        self._agreed: tuple[NodeShare, int] | None = None
        """The share that the next ``fill`` takes part in, and this rank."""
        self.nbytes_read = 0

    def offer(
        self,
        records: WantedRecords,
        plan: LoadPlan,
        reads: RecordReads,
        planner: LoadPlanner,
        opened: OpenedCheckpoint,
        traits: StoreTraits,
        world_size: int,
    ) -> ShareOffer | None:
        """What others of ``world_size`` ranks could read for this one; None where it can share with nobody."""
        rules = share_rules(traits)
        if world_size < rules.min_repeats:
            return None
        straight_ones_too = world_size * rules.straight_weight >= rules.min_repeats
        wants: list[Want | None] = []
        with suppress(CorruptCheckpointError):  # faults of the plan are told when it is read
            for record in large_of(records.by_file(plan)):
                if reads.is_near(record) or (not straight_ones_too and goes_straight(record)):
                    continue
                read = reads.passing(record, [planner.resolve_tensor(item).detach() for item in record.items])
                wants.append(want_of(record.number, read) if read is not None else None)
        found = [want for want in wants if want is not None]
        return offer_of(found, self._sharing, rules, opened) if found else None

    def agree(self, share: NodeShare | None, rank: int) -> None:
        """Take part in ``share`` in the next ``fill``, which must be for the plan that was offered."""
        self._agreed = (share, rank) if share is not None else None

    def fill(
        self,
        wanted: Mapping[str, Sequence[WantedRecord]],
        records: WantedRecords,
        reads: RecordReads,
        tasks: RecordTasks,
        shape: ReadShape,
    ) -> set[int]:
        """Read what was agreed on with other ranks of this node; return the numbers of the entries that are filled."""
        agreed, self._agreed = self._agreed, None
        entries = records.entries
        if agreed is None or entries is None:
            return set()
        share, rank = agreed
        shared = {number: entries[number] for number in {run.number for run in share.runs}}
        targets: dict[int, Passing] = {}
        loaded: dict[int, Loaded] = {}
        for record in large_of(wanted):
            number = record.number
            if number in shared:
                filled = tasks.targets(record)
                read = reads.passing(record, filled)
                if read is not None:
                    count_as_changed(filled)
                    targets[number] = Passing(read, filled)
                    loaded[number] = tasks.loaded(record, filled)
        read_of = {number: reads.of_entry(entry, ()) for number, entry in shared.items()}

        def read_blocks(number: int, start: int, into: memoryview, lane: Lane) -> None:
            reads.read_blocks(read_of[number], start, into, lane)

        part = SharedReads(share, rank, self._sharing, read_blocks, shape)
        try:
            numbers = part.fill(targets)
        finally:
            self.nbytes_read += part.nbytes_read
        for count in (count for number in numbers for count in loaded[number]):
            count()
        return set(numbers)
