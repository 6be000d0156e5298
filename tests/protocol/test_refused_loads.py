"""What can be known is looked at first: after a load that is refused the template is bit for bit as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, StoreReader
from ray_dcp.errors import CorruptCheckpointError, StateDictError, UnsafeDataError
from ray_dcp.format.manifest import decode_manifest
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*quantize_per_tensor")

NAN = float("nan")
LARGE = 3 << 18


class Unlisted:
    """A class outside the allow-list."""


class UsersPlanner(DefaultLoadPlanner):
    pass


def saved_state():
    return {"w": torch.ones(LARGE), "small": torch.ones(3), "n": [1, 2], "shards": torch.ones(6), "empty": {}}


def template():
    return {
        "w": torch.full((LARGE,), NAN),
        "small": torch.full((3,), NAN),
        "n": ["old"],
        "shards": LocalShards((6,), {(2,): torch.full((2,), NAN)}),
        "meta": torch.empty(3, device="meta"),
        "empty": {},
    }


def untouched(state) -> bool:
    tensors = [state["w"], state["small"], *state["shards"].chunks.values()]
    return (
        all(bool(tensor.isnan().all()) and tensor._version == 0 for tensor in tensors)
        and (state["n"], state["empty"]) == (["old"], {})
        and state["meta"].is_meta
    )


def refused(templates, place, **options) -> CheckpointException:
    reader = options.pop("reader", None)
    ranks = ThreadRanks(len(templates))
    outcomes = ranks.run(
        lambda rank: ranks.load_rank(rank, templates[rank], place, reader=reader and reader(place), **options)
    )
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes), outcomes
    assert all(map(untouched, templates))
    assert all("filled" not in outcome.args[0] for outcome in outcomes)
    return outcomes[0]


BY = pytest.mark.parametrize("reader", [None, FileSystemReader], ids=["our reader", "torch's reader"])
ON = pytest.mark.parametrize("world_size", [1, 3])


@BY
@ON
def test_a_python_value_that_must_not_be_loaded(tmp_path, reader, world_size):
    state = saved_state() | {"a": Unlisted(), "meta": torch.ones(3), "empty": {"x": 1, "z": Unlisted()}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    templates = [template() | {"a": None} for _ in range(world_size)]
    error = refused(templates, str(tmp_path), reader=reader)
    assert isinstance(error.__cause__, UnsafeDataError)
    assert "a: holds" in str(error)
    assert "empty.z" in str(error)
    trusted = template() | {"a": None}
    dcp.load(trusted, checkpoint_id=tmp_path, no_dist=True, trusted=True)
    assert (type(trusted["a"]), type(trusted["empty"]["z"]), trusted["w"].sum()) == (Unlisted, Unlisted, LARGE)


@BY
def test_one_under_a_users_planner(tmp_path, reader):
    dcp.save(saved_state() | {"a": Unlisted()}, checkpoint_id=tmp_path, no_dist=True)
    state = template() | {"a": None}
    kept = {name: state.pop(name) for name in ("empty", "meta")}  # torch's planner would want a process group
    options = {"storage_reader": reader(tmp_path)} if reader else {}
    with pytest.raises(CheckpointException, match="a: holds"):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True, planner=UsersPlanner(), **options)
    assert untouched(state | kept)


@ON
def test_a_python_value_whose_bytes_are_damaged(tmp_path, world_size):
    dcp.save(saved_state() | {"text": ["a" * 100], "meta": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    entries = decode_manifest((tmp_path / "manifest.parquet").read_bytes(), file="").entries
    (entry,) = [one for one in entries if one.fqn == "text"]
    content = bytearray((tmp_path / entry.file).read_bytes())
    content[entry.payload_offset + entry.payload_nbytes // 2] ^= 1
    (tmp_path / entry.file).write_bytes(content)
    error = refused([template() | {"text": []} for _ in range(world_size)], str(tmp_path))
    assert isinstance(error.__cause__, CorruptCheckpointError)


@BY
@pytest.mark.parametrize(
    ("name", "odd", "said"),
    [
        ("w", lambda: torch.zeros(LARGE).to_sparse(), "a torch.sparse_coo tensor"),
        ("small", lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8), "a quantized tensor"),
    ],
)
def test_a_template_that_cannot_be_filled_in_place(tmp_path, reader, name, odd, said):
    dcp.save(saved_state() | {"meta": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    odd_one = template()
    kept, odd_one[name] = odd_one[name], odd()
    ranks = ThreadRanks(2)
    templates = [template(), odd_one]
    outcomes = ranks.run(
        lambda rank: ranks.load_rank(
            rank, templates[rank], str(tmp_path), cast=True, reader=reader and reader(str(tmp_path))
        )
    )
    assert all(isinstance(outcome.__cause__, StateDictError) for outcome in outcomes)
    assert f"{name}: the template is {said}" in str(outcomes[0])
    assert all(map(untouched, [templates[0], odd_one | {name: kept}]))


def optimizer(*sizes, width=3, lr=0.5):
    groups = [{"params": [torch.nn.Parameter(torch.ones(width)) for _ in range(size)]} for size in sizes]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def stepped(one):
    for group in one.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    one.step()
    return one


@pytest.mark.parametrize("saved_by", [dcp, torch_dcp], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    ("own", "said"),
    [
        ((1,), "optim: the checkpoint has 2 parameter groups, the optimizer 1"),
        ((1, 1), "optim: the checkpoint has 2 parameters in group 1, the optimizer 1"),
        ((1, 2, 1), "optim.param_groups.2.lr: Missing key"),
    ],
)
def test_an_optimizer_with_other_groups(tmp_path, own, said, saved_by):
    saved_by.save(
        saved_state() | {"optim": stepped(optimizer(1, 2)), "meta": torch.ones(3)},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    one = stepped(optimizer(*own))
    before = copy.deepcopy(one.state_dict())
    error = refused([template() | {"optim": one}], str(tmp_path))
    assert said in str(error)
    assert_same_state(one.state_dict(), before)
    right = optimizer(1, 2)
    dcp.load({"optim": right}, checkpoint_id=tmp_path, no_dist=True)
    assert len(right.state) == 3


def assert_same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert all(same_bits(value, other["state"][number][name]) for name, value in state.items())


def test_more_groups_in_the_checkpoint_are_left_out_where_the_rest_is_asked_for(tmp_path):
    dcp.save({"optim": stepped(optimizer(1, 2, lr=0.25))}, checkpoint_id=tmp_path, no_dist=True)
    one = stepped(optimizer(1))
    dcp.load({"optim": one}, checkpoint_id=tmp_path, no_dist=True, strict=False)
    assert one.param_groups[0]["lr"] == 0.25


def test_a_users_load_state_dict_that_raises_is_told_with_what_has_changed(tmp_path):
    class Raising:
        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state_dict):
            raise ValueError("not today")

    dcp.save({"w": torch.ones(2), "x": Raising()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match="not today; its tensors are filled by now"):
        dcp.load({"w": torch.zeros(2), "x": Raising()}, checkpoint_id=tmp_path, no_dist=True)


def test_python_values_are_read_once_and_together(tmp_path):
    state = saved_state() | {"scalars": {str(number): number for number in range(3000)}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    reader = StoreReader(tmp_path)
    num_reads = []
    read = StoreReader.read_data

    def noted(self, plan, planner):
        num_reads.append(len(plan.items))
        return read(self, plan, planner)

    fresh = saved_state() | {"scalars": dict.fromkeys(state["scalars"], 0), "n": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreReader, "read_data", noted)
        require_no_errors([dcp.load(fresh, checkpoint_id=tmp_path, no_dist=True, storage_reader=reader)])
    assert num_reads == [3001, 3]
    assert fresh["scalars"] == state["scalars"]
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert reader.nbytes_read <= stored
