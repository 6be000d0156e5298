"""Templates whose tensors share memory, and modules on meta: each place gets the value that was saved for it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemReader

import ray_dcp as dcp
from ray_dcp import CheckpointException
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAN = float("nan")
BY_BOTH = pytest.mark.parametrize("saved_by", [dcp, torch_dcp], ids=lambda module: module.__name__)
READERS = pytest.mark.parametrize("reader", [None, FileSystemReader], ids=["our reader", "torch's reader"])
SIZES = pytest.mark.parametrize("size", [4, 3 << 18])


def load(state, place, reader=None, **options):
    if reader is not None:
        options["storage_reader"] = reader(place)
    return dcp.load(state, checkpoint_id=place, no_dist=True, **options)


@BY_BOTH
@READERS
@SIZES
class TestOneTensorUnderTwoNames:
    def test_equal_values_are_loaded(self, tmp_path, saved_by, reader, size):
        values = torch.arange(size, dtype=torch.float32)
        values[1] = NAN
        saved_by.save({"a": values, "b": values.clone()}, checkpoint_id=tmp_path, no_dist=True)
        weight = torch.zeros(size)
        report = load({"a": weight, "b": weight}, tmp_path, reader)
        assert same_bits(weight, values)
        assert report.loaded == ("a", "b")
        assert reader is not None or report.nbytes_loaded == 2 * weight.nbytes

    def test_other_values_are_refused_with_all_names(self, tmp_path, saved_by, reader, size):
        values = torch.ones(size)
        other = values.clone()
        other[-1] = 2
        saved_by.save({"a": values, "b": other, "c": values}, checkpoint_id=tmp_path, no_dist=True)
        weight = torch.full((size,), NAN)
        with pytest.raises(CheckpointException) as caught:
            load({"a": weight, "b": weight, "c": weight}, tmp_path, reader)
        (problem,) = caught.value.__cause__.problems
        assert problem.startswith("a, b, c: share memory in the template")
        assert bool(weight.isnan().all())
        load({"a": weight, "b": weight, "c": weight}, tmp_path, reader, skip="b")
        assert torch.equal(weight, values)


@READERS
def test_views_that_overlap_need_equal_values_where_they_do(tmp_path, reader):
    values = torch.arange(8.0)
    dcp.save({"front": values[:5], "back": values[3:], "wrong": values[:5]}, checkpoint_id=tmp_path, no_dist=True)
    buffer = torch.full((8,), NAN)
    load({"front": buffer[:5], "back": buffer[3:]}, tmp_path, reader)
    assert torch.equal(buffer, values)
    buffer = torch.full((8,), NAN)
    with pytest.raises(CheckpointException, match="back, wrong: share memory"):
        load({"wrong": buffer[2:7], "back": buffer[3:]}, tmp_path, reader)
    assert bool(buffer.isnan().all())


def test_each_rank_looks_at_its_own_template(tmp_path):
    dcp.save({"a": torch.ones(2), "b": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    tied = torch.full((2,), NAN)
    templates = [{"a": torch.full((2,), NAN), "b": torch.full((2,), NAN)}, {"a": tied, "b": tied}]
    outcomes = ThreadRanks(2).load(templates, tmp_path)
    assert all("(rank 1)" in outcome.__cause__.problems[0] for outcome in outcomes)
    assert all(bool(value.isnan().all()) for state in templates for value in state.values())
    templates[1] = {"a": tied}
    require_no_errors(ThreadRanks(2).load(templates, tmp_path))


class Tied(torch.nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3, device=device)
        self.head = torch.nn.Linear(3, 5, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(3, device=device)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))


@BY_BOTH
def test_a_tied_weight_of_which_one_name_was_stored_is_loaded(tmp_path, saved_by):
    """As in folders of Hugging Face files."""
    model = Tied()
    stored = {fqn: value for fqn, value in model.state_dict().items() if fqn != "head.weight"}
    saved_by.save({"model": stored}, checkpoint_id=tmp_path, no_dist=True)
    for device in (None, "meta"):
        other = Tied(device)
        report = load({"model": other}, tmp_path)
        assert report.missing == ()
        assert "model.head.weight" in report.loaded
        assert other.head.weight is other.embed.weight
        assert same_bits(other.head.weight.detach(), model.embed.weight.detach())


class TestModulesOnMeta:
    @BY_BOTH
    @READERS
    def test_they_get_memory_and_stay_tied(self, tmp_path, saved_by, reader):
        model = Tied()
        model.norm.requires_grad_(False)
        saved_by.save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
        other = Tied("meta")
        other.norm.requires_grad_(False)
        load({"model": other}, tmp_path, reader)
        for (fqn, saved), (also, loaded) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
            assert fqn == also
            assert same_bits(saved, loaded)
        assert other.head.weight is other.embed.weight
        assert isinstance(other.embed.weight, torch.nn.Parameter)
        assert (other.embed.weight.requires_grad, other.norm.weight.requires_grad) == (True, False)
        other.head(other.norm(other.embed(torch.tensor([1])))).sum().backward()

    def test_parameters_that_have_memory_stay_the_objects_they_are(self, tmp_path):
        model = Tied()
        dcp.save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
        other = Tied("meta")
        other.norm = torch.nn.LayerNorm(3)
        weight = other.norm.weight
        optimizer = torch.optim.SGD([weight], lr=0.1)
        load({"model": other}, tmp_path)
        assert other.norm.weight is weight is optimizer.param_groups[0]["params"][0]
        assert not any(tensor.is_meta for tensor in other.state_dict().values())

    def test_one_that_the_checkpoint_lacks_is_refused_and_all_stay_as_they_were(self, tmp_path):
        dcp.save({"model": torch.nn.Linear(3, 5, bias=False)}, checkpoint_id=tmp_path, no_dist=True)
        other = torch.nn.Linear(3, 5, device="meta")
        for strict in (True, False):
            with pytest.raises(CheckpointException, match=r"model\.bias: Missing key: .* meta tensor"):
                load({"model": other}, tmp_path, strict=strict)
        assert all(tensor.is_meta for tensor in other.state_dict().values())

    def test_a_buffer_that_no_checkpoint_holds_is_named_in_the_log(self, tmp_path, caplog):
        def model(device=None):
            made = torch.nn.Linear(2, 2, device=device)
            made.register_buffer("angles", torch.ones(2, device=device), persistent=False)
            return made

        dcp.save({"model": model()}, checkpoint_id=tmp_path, no_dist=True)
        with caplog.at_level(logging.WARNING):
            load({"model": model("meta")}, tmp_path)
        assert "angles of a Linear: still on meta" in caplog.text

    def test_what_a_load_leaves_out_of_a_module_on_meta_is_told_apart_from_what_no_checkpoint_holds(
        self, tmp_path, caplog
    ):
        def model(device=None):
            made = torch.nn.Sequential(torch.nn.Linear(2, 2, device=device), torch.nn.Linear(2, 2, device=device))
            made.register_buffer("angles", torch.ones(2, device=device), persistent=False)
            return made

        dcp.save({"model": model()}, checkpoint_id=tmp_path, no_dist=True)
        with caplog.at_level(logging.WARNING):
            load({"model": model("meta")}, tmp_path, skip="model.1")
        left_out, never_stored = sorted(record.getMessage() for record in caplog.records)
        assert left_out.startswith("1.weight, 1.bias of a Sequential: still on meta, since this load left them out")
        assert never_stored.startswith("angles of a Sequential: still on meta, since no checkpoint holds")

    def test_names_of_one_meta_tensor_get_one_tensor(self, tmp_path):
        dcp.save({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
        tied = torch.nn.Parameter(torch.empty(3, device="meta"))
        state = {"a": tied, "b": tied, "c": torch.empty(3, device="meta")}
        load(state, tmp_path)
        assert state["a"] is state["b"]
        assert isinstance(state["a"], torch.nn.Parameter)
        assert state["c"] is not state["a"]
        assert all(value.tolist() == [1, 1, 1] for value in state.values())

    def test_other_values_for_one_meta_tensor_are_refused(self, tmp_path):
        dcp.save({"a": torch.ones(3), "b": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
        tied = torch.empty(3, device="meta")
        with pytest.raises(CheckpointException, match="a, b: share memory"):
            load({"a": tied, "b": tied}, tmp_path)

    def test_an_empty_tensor_gets_memory_too(self, tmp_path):
        dcp.save({"a": torch.ones(0, 3), "b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
        state = {"a": torch.empty(0, 3, device="meta"), "b": torch.empty(2, device="meta")}
        load(state, tmp_path)
        assert [(value.device.type, tuple(value.shape)) for value in state.values()] == [("cpu", (0, 3)), ("cpu", (2,))]


class Holder:
    """As in torch's tutorials: a module in an object that is asked for its state."""

    def __init__(self, module) -> None:
        self.module = module

    def state_dict(self):
        return {"net": self.module.state_dict()}

    def load_state_dict(self, state) -> None:
        self.module.load_state_dict(state["net"])


class Assigning(Holder):
    def load_state_dict(self, state) -> None:
        self.module.load_state_dict(state["net"], assign=True)


class Own(torch.nn.Linear):
    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict(state_dict, strict)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
class TestAStatefulThatCopiesIntoMeta:
    @pytest.mark.parametrize(
        "kind",
        [lambda: Holder(torch.nn.Linear(2, 2)), lambda: Own(2, 2), lambda: Holder(Holder(torch.nn.Linear(2, 2)))],
    )
    def test_it_is_told_that_what_was_loaded_is_not_there(self, tmp_path, kind):
        dcp.save({"a": kind()}, checkpoint_id=tmp_path, no_dist=True)
        with torch.device("meta"):
            template = {"a": kind()}
        with pytest.raises(CheckpointException, match=r"left on the meta device what was loaded: a\.(net\.)*bias"):
            load(template, tmp_path)

    def test_one_that_assigns_has_its_values(self, tmp_path):
        saved = torch.nn.Linear(2, 2)
        dcp.save({"a": Holder(saved)}, checkpoint_id=tmp_path, no_dist=True)
        with torch.device("meta"):
            module = torch.nn.Linear(2, 2)
        load({"a": Assigning(module)}, tmp_path, only="a.net.weight")
        assert torch.equal(module.weight, saved.weight)
        assert module.bias.is_meta


@READERS
def test_a_conjugate_view_is_not_the_tensor_that_it_is_a_view_of(tmp_path, reader):
    values = torch.complex(torch.arange(4.0), torch.arange(1.0, 5.0))
    dcp.save({"a": values, "b": values.clone(), "c": values.conj().resolve_conj()}, checkpoint_id=tmp_path)
    weight = torch.full((4,), NAN, dtype=torch.complex64)
    with pytest.raises(CheckpointException, match="a, b: share memory in the template"):
        load({"a": weight, "b": weight.conj()}, tmp_path, reader)
    assert bool(weight.isnan().all())
    load({"a": weight, "c": weight.conj()}, tmp_path, reader)
    assert torch.equal(weight, values)


@READERS
def test_chunks_of_one_value_that_share_memory_need_equal_values(tmp_path, reader):
    dcp.save({"w": torch.arange(8.0).reshape(4, 2), "v": torch.ones(4, 2)}, checkpoint_id=tmp_path)
    chunk = torch.full((2, 2), NAN)
    shards = dcp.LocalShards((4, 2), {(0, 0): chunk, (2, 0): chunk})
    with pytest.raises(CheckpointException, match="w: its chunks share memory in the template"):
        load({"w": shards}, tmp_path, reader)
    assert bool(chunk.isnan().all())
    load({"v": shards}, tmp_path, reader)
    assert torch.equal(chunk, torch.ones(2, 2))
