"""Files that torch writes load here, and files that are written here load, and convert, with torch's own tools."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ray_dcp as dcp
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import DTYPES, KINDS, differences, same_bits, shards, template, templates, whole_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def name_of(kind: str, dtype: torch.dtype) -> str:
    return f"{kind}.{str(dtype).removeprefix('torch.')}"


def every_tensor() -> dict[str, torch.Tensor]:
    """Every shape and dtype, 0-dim and empty ones and int64 above 2**53 among them."""
    return {name_of(kind, dtype): whole_tensor(kind, dtype) for kind in KINDS for dtype in DTYPES}


def state() -> dict[str, object]:
    return every_tensor() | {"names": ["a", ("b", None)], "nested": {"lr": 0.1, "betas": (0.9, 0.99)}, "big": 2**70}


def blank() -> dict[str, object]:
    """Every bit, or the only one, is another."""
    tensors = {
        name: (~tensor.view(torch.uint8)).view(tensor.dtype) if tensor.dim() else template("scalar", tensor.dtype, 0, 1)
        for name, tensor in every_tensor().items()
    }
    tensors = {
        name: tensor.chunks[()] if isinstance(tensor, dcp.LocalShards) else tensor for name, tensor in tensors.items()
    }
    return tensors | {"names": None, "nested": {"lr": None, "betas": None}, "big": None}


def wrong(filled: dict[str, object]) -> list[str]:
    expected = state()
    assert filled.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if not (same_bits(filled[name], value) if isinstance(value, torch.Tensor) else filled[name] == value)
    ]


def fill_with_ours(place, **options) -> dict[str, object]:
    filled = blank()
    dcp.load(filled, checkpoint_id=place, no_dist=True, **options)
    return filled


def fill_with_torchs(reader) -> dict[str, object]:
    filled = blank()
    torch_dcp.load(filled, storage_reader=reader, no_dist=True)
    return filled


def test_the_template_differs_before_a_load():
    alike = {name for name, tensor in every_tensor().items() if tensor.numel() == 0}
    assert set(wrong(blank())) == state().keys() - alike


WRITERS = {
    "one file": lambda place: FileSystemWriter(place),
    "two threads": lambda place: FileSystemWriter(place, thread_count=2),
    "a file a tensor": lambda place: FileSystemWriter(place, single_file_per_rank=False),
    "a file a tensor, three threads": lambda place: FileSystemWriter(place, single_file_per_rank=False, thread_count=3),
    "fsspec": lambda place: FsspecWriter(str(place)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_torch_writes_loads_here(tmp_path, writer):
    torch_dcp.save(state(), storage_writer=WRITERS[writer](tmp_path), no_dist=True)
    assert wrong(fill_with_ours(tmp_path)) == []
    # And on other ranks than it was saved on, each tensor cut in another way.
    filled = [templates(rank, 3) for rank in range(3)]
    require_no_errors(ThreadRanks(3).load(filled, tmp_path))
    assert [differences(filled[rank], rank, 3) for rank in range(3)] == [[], [], []]


def test_what_torch_writes_to_memory_loads_here():
    place = "memory://interop/torchs"
    torch_dcp.save(state(), storage_writer=FsspecWriter(place), no_dist=True)
    assert wrong(fill_with_ours(place)) == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_written_here_loads_with_torch(tmp_path, world_size):
    def of_rank(rank):
        cut = {name_of(kind, dtype): shards(kind, dtype, rank, world_size) for kind in KINDS for dtype in DTYPES}
        return state() | cut

    for place, reader in ((tmp_path, FileSystemReader), ("memory://interop/ours", FsspecReader)):
        require_no_errors(ThreadRanks(world_size).save(of_rank, place))
        assert wrong(fill_with_torchs(reader(place))) == []
        assert wrong(fill_with_ours(place)) == []
        assert wrong(fill_with_ours(place, storage_reader=reader(place))) == []


@pytest.mark.parametrize("writer", [*WRITERS, "ours"])
def test_torchs_writers_and_ours_are_alike_under_our_save(tmp_path, writer):
    made = WRITERS[writer](tmp_path) if writer != "ours" else None
    dcp.save(state(), checkpoint_id=tmp_path, storage_writer=made, no_dist=True)
    assert wrong(fill_with_torchs(FileSystemReader(tmp_path))) == []
    assert wrong(fill_with_ours(tmp_path)) == []


def test_torchs_converter_makes_one_file_of_ours(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "one.pt")
    assert wrong(torch.load(tmp_path / "one.pt", weights_only=True)) == []


def test_what_torchs_converter_makes_of_one_file_loads_here(tmp_path):
    torch.save(state(), tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "c")
    assert wrong(fill_with_ours(tmp_path / "c")) == []


def test_every_record_is_a_file_that_torch_load_reads(tmp_path):
    metadata = dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    for index, info in metadata.storage_data.items():
        content = (tmp_path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        value = torch.load(io.BytesIO(content), weights_only=True)
        expected = state()
        for part in metadata.planner_data[index.fqn]:
            expected = expected[part]
        assert same_bits(value, expected) if isinstance(value, torch.Tensor) else value == expected


class TestOptimizers:
    """``optimizer.state_dict()`` as it is: integer keys, numbers, and tensors of one element."""

    @staticmethod
    def _trained(num_steps: int, seed: int = 0, **options):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 0.5}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), **options)
        for _ in range(num_steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    @staticmethod
    def _same(a, b) -> bool:
        """Alike in values, keys, and the types of both."""
        if type(a) is not type(b):
            return False
        if isinstance(a, torch.Tensor):
            return same_bits(a, b)
        if isinstance(a, dict):
            return list(a) == list(b) and all(TestOptimizers._same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(TestOptimizers._same, a, b))
        return a == b

    @pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True, "weight_decay": 0.3}], ids=str)
    def test_the_state_comes_back_under_its_integer_keys(self, tmp_path, options):
        _, optimizer = self._trained(3, **options)
        saved = optimizer.state_dict()
        dcp.save({"optim": saved}, checkpoint_id=tmp_path, no_dist=True)
        _, other = self._trained(1, seed=1, **options)
        template = {"optim": other.state_dict()}
        assert not self._same(template["optim"], saved)
        dcp.load(template, checkpoint_id=tmp_path, no_dist=True, strict="exact")
        assert self._same(template["optim"], saved)
        assert all(type(key) is int for key in template["optim"]["state"])
        other.load_state_dict(template["optim"])
        assert self._same(other.state_dict(), saved)

    def test_it_goes_on_as_if_nothing_had_happened(self, tmp_path):
        model, optimizer = self._trained(2)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
        other_model, other = self._trained(1, seed=1)
        dcp.load({"model": other_model, "optim": other}, checkpoint_id=tmp_path, no_dist=True)
        for a_model, an_optimizer in ((model, optimizer), (other_model, other)):
            an_optimizer.zero_grad()
            a_model(torch.ones(1, 3)).sum().backward()
            an_optimizer.step()
        assert self._same(dict(model.state_dict()), dict(other_model.state_dict()))
        assert self._same(optimizer.state_dict(), other.state_dict())

    def test_a_fresh_optimizer_gets_all_of_the_state(self, tmp_path):
        _, optimizer = self._trained(2)
        dcp.save({"optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
        _, fresh = self._trained(0, seed=1)
        report = dcp.load({"optim": fresh}, checkpoint_id=tmp_path, no_dist=True)
        assert self._same(fresh.state_dict(), optimizer.state_dict())
        assert (report.missing, report.unexpected) == ((), ())
