"""One program, run with torch's package and with ray_dcp in its place: what it gives is the same.

Each is a use that torch documents. What differs is in the README's table, and is shown in the second half.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example, get_test_extension_registry

import ray_dcp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PROGRAMS: dict[str, Callable[[Any, str], Any]] = {}


def program(function: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    PROGRAMS[function.__name__] = function
    return function


def module(library: Any, name: str) -> Any:
    return importlib.import_module(f"{library.__name__}.{name}")


def plain(value: Any) -> Any:
    """In a form that ``==`` compares whole."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))


def state_of(seed: int = 0) -> dict[str, Any]:
    return dict(model(seed).state_dict())


class Blob:
    def __init__(self, value: Any) -> None:
        self.state = {"blob": value}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@program
def a_module_and_a_stateful_object(dcp, place):
    dcp.save({"model": model(1), "blob": Blob(b"bytes"), "n": [1, {"x": "text"}]}, checkpoint_id=place)
    loaded, blob, state = model(2), Blob(b""), {"n": [0, {"x": ""}]}
    dcp.load({"model": loaded, "blob": blob} | state, checkpoint_id=place)
    dcp.load(state, checkpoint_id=place)
    return plain(dict(loaded.state_dict())), blob.state, state


@program
def a_buffer_within_a_stateful_object(dcp, place):
    losses = io.BytesIO()
    torch.save([1.0, 2.0], losses)
    dcp.save({"train": Blob(losses)}, checkpoint_id=place)
    loaded = Blob(io.BytesIO())
    dcp.load({"train": loaded}, checkpoint_id=place)
    loaded.state["blob"].seek(0)
    return torch.load(loaded.state["blob"])


@program
def mappings_of_other_kinds(dcp, place):
    dcp.save(MappingProxyType({"a": torch.ones(2), "b": OrderedDict(c=1)}), checkpoint_id=place)
    template = OrderedDict(a=torch.zeros(2), b={"c": 0})
    dcp.load(template, checkpoint_id=place)
    return type(template), plain(dict(template))


@program
def nothing_at_all(dcp, place):
    dcp.save({}, checkpoint_id=place)
    dcp.load({}, checkpoint_id=place)
    return os.path.exists(f"{place}/.metadata")


@program
def the_optimizer_as_get_state_dict_gives_it(dcp, place):
    tools = module(dcp, "state_dict")

    def trained(seed):
        net = model(seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        return net, optimizer

    first, second = trained(1), trained(2)
    states = [dict(zip(("model", "optim"), tools.get_state_dict(*pair), strict=True)) for pair in (first, second)]
    dcp.save(states[0], checkpoint_id=place)
    dcp.load(states[1], checkpoint_id=place)
    tools.set_state_dict(*second, model_state_dict=states[1]["model"], optim_state_dict=states[1]["optim"])
    return plain(second[1].state_dict()), plain(dict(second[0].state_dict()))


@program
def torchs_writer_with_threads_and_an_extension(dcp, place):
    writer = dcp.FileSystemWriter(place, thread_count=2, _extensions=[Rot13Example()])
    dcp.save_state_dict(state_of(1), storage_writer=writer, no_dist=True)
    template = state_of(2)
    reader = dcp.FileSystemReader(place, _extension_registry=get_test_extension_registry())
    dcp.load_state_dict(template, storage_reader=reader, no_dist=True)
    return plain(template)


@program
def which_hooks_of_a_writer_and_a_reader_are_called(dcp, place):
    seen = []

    def noting(kind, names):
        def wrap(name):
            def hook(self, *args, **kwargs):
                seen.append((name, tuple(kwargs) if name.startswith("set_up") else ()))
                return getattr(super(noted, self), name)(*args, **kwargs)

            return hook

        noted = type("Noted", (kind,), {name: wrap(name) for name in names})
        return noted

    planned = ["prepare_local_plan", "prepare_global_plan"]
    writer = noting(dcp.FileSystemWriter, ["reset", "set_up_storage_writer", *planned, "write_data", "finish"])(place)
    dcp.save(state_of(), storage_writer=writer)
    reader = noting(dcp.FileSystemReader, ["read_metadata", "set_up_storage_reader", *planned, "read_data"])(place)
    dcp.load(state_of(), storage_reader=reader)
    return seen


@program
def a_planner_that_renames_and_one_that_halves(dcp, place):
    class Renames(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            renamed = {f"foo_{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, storage_meta, is_coordinator)

        def transform_object(self, write_item, object):
            return object / 2 if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)

    class NamesBack(dcp.DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            self.given = state_dict
            renamed = {f"foo_{key}": value for key, value in state_dict.items()}
            super().set_up_planner(renamed, metadata, is_coordinator)

        def load_bytes(self, read_item, value):
            self.given[read_item.dest_index.fqn.removeprefix("foo_")] = torch.load(value, weights_only=False)

    dcp.save({"a": torch.ones(3), "b": 5}, checkpoint_id=place, planner=Renames())
    template = {"a": torch.zeros(3), "b": 0}
    dcp.load(template, checkpoint_id=place, planner=NamesBack())
    return plain(template)


@program
def hugging_face_files(dcp, place):
    writer = dcp.HuggingFaceStorageWriter(path=place, save_distributed=True, enable_consolidation=True)
    dcp.save(state_of(1), storage_writer=writer)
    template = state_of(2)
    dcp.load(template, storage_reader=dcp.HuggingFaceStorageReader(path=place))
    loader = module(dcp, "state_dict_loader")
    everything = loader._load_state_dict_from_keys(storage_reader=dcp.HuggingFaceStorageReader(path=place))
    return sorted(os.listdir(place)), plain(template), plain(everything)


@program
def there_and_back_to_a_file_of_torch_save(dcp, place):
    tools = module(dcp, "format_utils")
    dcp.save({"model": model(1), "n": {"step": 5}}, checkpoint_id=place)
    tools.dcp_to_torch_save(place, f"{place}/file.pt")
    tools.torch_save_to_dcp(f"{place}/file.pt", f"{place}-back")
    template = {"model": state_of(2), "n": {"step": 0}}
    dcp.load(template, checkpoint_id=f"{place}-back")
    only = module(dcp, "state_dict_loader")._load_state_dict_from_keys("model", checkpoint_id=place)
    return plain(torch.load(f"{place}/file.pt")), plain(template), plain(only)


@program
def async_save_and_its_future(dcp, place):
    kinds, staging = module(dcp, "state_dict_saver"), module(dcp, "staging")
    state = {"a": torch.ones(3), "n": 4}
    future = dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=kinds.AsyncCheckpointerType.THREAD)
    state["a"].zero_()
    names = sorted(future.result(timeout=60).state_dict_metadata)
    stager = staging.DefaultStager(staging.StagingOptions(False, False, True, False))
    response = dcp.async_save({"b": torch.ones(3)}, checkpoint_id=f"{place}-2", async_stager=stager)
    response.staging_completion.result(timeout=60)
    response.upload_completion.result(timeout=60)
    stager.close()
    template = {"a": torch.full((3,), float("nan")), "n": 0}
    dcp.load(template, checkpoint_id=place)
    is_torchs = isinstance(response, torch_dcp.state_dict_saver.AsyncSaveResponse)
    return names, future.done(), future.exception(), is_torchs, plain(template)


@program
def the_failure_of_a_hook(dcp, place):
    class Faulty(dcp.FileSystemWriter):
        def prepare_local_plan(self, plan):
            raise ValueError("no room")

    try:
        dcp.save({"n": 1}, storage_writer=Faulty(place))
    except torch_dcp.CheckpointException as error:
        return {rank: [type(part).__name__ for part in parts] for rank, parts in error.failures.items()}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same(name, tmp_path):
    ours = PROGRAMS[name](ray_dcp, str(tmp_path / "ray_dcp"))
    assert ours is not None
    assert ours == PROGRAMS[name](torch_dcp, str(tmp_path / "torch"))


def loaded(dcp, place, saved, template, **options):
    dcp.save({"value": saved}, checkpoint_id=place)
    state = {"value": template}
    dcp.load(state, checkpoint_id=place, **options)
    return plain(state["value"])


@pytest.mark.parametrize(
    ("saved", "template", "by_torch", "options"),
    [
        (torch.ones(2), torch.zeros(2, dtype=torch.half), ("torch.float16", [1, 1]), {"cast": True}),
        (3.5, torch.zeros(2), 3.5, None),
    ],
    ids=["dtype", "a Python value for a tensor"],
)
def test_what_torch_loads_and_ray_dcp_refuses(tmp_path, saved, template, by_torch, options):
    assert loaded(torch_dcp, tmp_path / "torch", saved, template) == by_torch
    with pytest.raises(ray_dcp.CheckpointException, match="value: "):
        loaded(ray_dcp, tmp_path / "ray_dcp", saved, template)
    if options is not None:
        assert loaded(ray_dcp, tmp_path / "ray_dcp", saved, template, **options) == by_torch
