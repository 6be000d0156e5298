"""Damage in large payloads, whichever way they are read: in whole, in rows, in boxes, cast, into any memory, async."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.names import BLOCK_NBYTES
from tests.ranks import ThreadRanks, require_no_errors
from tests.reads.damaged import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, COLUMNS = 1000, 777
"""Of float32: almost three blocks, and no row ends where a block does."""
VALUES = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def save_async(state, *, checkpoint_id, no_dist):
    dcp.async_save(state, checkpoint_id=checkpoint_id, no_dist=no_dist).upload_completion.result(60)


SAVES = {"ours": dcp.save, "async": save_async, "torchs": torch_dcp.save}


@pytest.fixture(scope="module", params=SAVES)
def checkpoint(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    SAVES[request.param]({"w": VALUES, "after": torch.ones(3)}, checkpoint_id=place, no_dist=True)
    return Checkpoint(place)


def payload_at(checkpoint) -> int:
    return checkpoint.files[checkpoint.shard].index(VALUES.numpy().tobytes())


def blank(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, float("nan"), dtype=dtype)


def whole(target: torch.Tensor, dtype: torch.dtype = torch.float32):
    return {"w": target}, lambda: torch.equal(target, VALUES.to(dtype))


def boxed(offsets: tuple[int, ...], lengths: tuple[int, ...]):
    target = blank(*lengths)
    rows, columns = (slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    return {"w": LocalShards(VALUES.shape, {offsets: target})}, lambda: torch.equal(target, VALUES[rows, columns])


READS = {
    "whole": lambda: whole(blank(ROWS, COLUMNS)),
    "rows": lambda: boxed((200, 0), (300, COLUMNS)),
    "columns": lambda: boxed((0, 100), (ROWS, 200)),
    "box": lambda: boxed((333, 50), (600, 70)),
    "cast": lambda: whole(blank(ROWS, COLUMNS, dtype=torch.bfloat16), torch.bfloat16),
    "transposed": lambda: whole(blank(COLUMNS, ROWS).t()),
    "part of more": lambda: whole(blank(ROWS + 2, COLUMNS + 3)[1:-1, 2:-1]),
}


def load_failure(place, template) -> CheckpointException | None:
    try:
        dcp.load(template, checkpoint_id=place, no_dist=True, cast=True)
    except CheckpointException as error:
        return error
    return None


@pytest.mark.parametrize("read", READS)
def test_the_values_are_right(checkpoint, read):
    template, is_right = READS[read]()
    assert load_failure(checkpoint.place, template) is None
    assert is_right()


@pytest.mark.parametrize("read", READS)
def test_a_flipped_bit_in_any_block_is_found_and_named_or_lies_where_nothing_is_read(checkpoint, read):
    begin, found = payload_at(checkpoint), 0
    places = [0, 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, 3 * BLOCK_NBYTES // 2, 5 * BLOCK_NBYTES // 2, VALUES.nbytes - 1]
    for place in places:
        template, is_right = READS[read]()
        with checkpoint.flipped(checkpoint.shard, begin + place, 1 << place % 8):
            error = load_failure(checkpoint.place, template)
        if error is None:
            assert is_right()
            continue
        cause, found = error.__cause__, found + 1
        assert isinstance(cause, CorruptCheckpointError)
        assert (cause.fqn, cause.file) == ("w", f"{checkpoint.place}/{checkpoint.shard}")
        assert cause.offset <= begin + place < cause.offset + cause.nbytes
    assert found == len(places) or read in ("rows", "box")
    assert found >= 2


@pytest.mark.parametrize("read", READS)
def test_a_flipped_bit_in_the_next_payload_does_not_matter_to_this_one(checkpoint, read):
    at = checkpoint.files[checkpoint.shard].rindex(torch.ones(3).numpy().tobytes())
    template, is_right = READS[read]()
    with checkpoint.flipped(checkpoint.shard, at, 4):
        assert load_failure(checkpoint.place, template) is None
    assert is_right()


@pytest.mark.parametrize("saved_by", [1, 3])
def test_damage_that_one_rank_sees_fails_the_load_of_all(tmp_path, saved_by):
    """Saved by rows, loaded by columns."""
    spans = [(rank * ROWS // saved_by, (rank + 1) * ROWS // saved_by) for rank in range(saved_by)]
    require_no_errors(
        ThreadRanks(saved_by).save(
            lambda rank: {"w": LocalShards(VALUES.shape, {(spans[rank][0], 0): VALUES[slice(*spans[rank])].clone()})},
            tmp_path,
        )
    )
    checkpoint = Checkpoint(tmp_path)

    def columns():
        return [{"w": LocalShards(VALUES.shape, {(0, start): blank(ROWS, 259)})} for start in (0, 259, 518)]

    templates = columns()
    require_no_errors(ThreadRanks(3).load(templates, tmp_path))
    assert torch.equal(torch.cat([next(iter(t["w"].chunks.values())) for t in templates], dim=1), VALUES)
    entry = max(checkpoint.entries(), key=lambda entry: entry.offsets)
    with checkpoint.flipped(entry.file, entry.payload_offset + entry.payload_nbytes - 1, 1):
        outcomes = ThreadRanks(3).load(columns(), tmp_path)
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes)
    assert all(
        "w: stored bytes fail their checksum" in str(outcome) and entry.file in str(outcome) for outcome in outcomes
    )
