"""``import ray_dcp as dcp`` in a program that used ``torch.distributed.checkpoint as dcp``."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp

OURS = {"save", "async_save", "load", "save_state_dict", "load_state_dict", "CheckpointException"}
SUBMODULES = sorted(module.name for module in pkgutil.iter_modules(torch_dcp.__path__))
OWN_ROOMS = ("api", "staging", "storage", "state_dict_saver", "state_dict_loader")
"""Where ray_dcp has a module of the same name, in which torch's names are found too."""


@pytest.mark.parametrize("name", sorted(n for n in vars(torch_dcp) if n[0].isupper() or n in OURS))
def test_every_public_name_of_torchs_package_is_there(name):
    if name in OURS:
        assert getattr(dcp, name) is not getattr(torch_dcp, name)
    else:
        assert getattr(dcp, name) is getattr(torch_dcp, name)


@pytest.mark.parametrize("name", sorted(set(SUBMODULES) - set(OWN_ROOMS)))
def test_torchs_submodules_are_there(name):
    imported = importlib.import_module(f"ray_dcp.{name}")
    assert imported is importlib.import_module(f"torch.distributed.checkpoint.{name}")
    assert getattr(dcp, name) is imported
    assert imported.__spec__.name == f"torch.distributed.checkpoint.{name}"


@pytest.mark.parametrize("name", OWN_ROOMS)
def test_names_of_torchs_modules_whose_name_is_taken(name):
    ours = importlib.import_module(f"ray_dcp.{name}")
    torchs = importlib.import_module(f"torch.distributed.checkpoint.{name}")
    assert getattr(dcp, name) is ours
    for found in [n for n in vars(torchs) if n in torchs.__all__ or (n.startswith("_") and not n.startswith("__"))]:
        taken = found in OURS | {"AsyncSaveResponse"} and name not in ("staging", "storage")
        assert getattr(ours, found) is (getattr(dcp, found) if taken else getattr(torchs, found)), found


def test_a_program_finds_what_it_imported_from_torch():
    program = """
from ray_dcp.state_dict import get_state_dict, StateDictOptions
import ray_dcp.filesystem
import ray_dcp._fsspec_filesystem
import ray_dcp._experimental.checkpointer as nested
from ray_dcp.format_utils import dcp_to_torch_save
from ray_dcp.state_dict_loader import _load_state_dict_from_keys, load
from ray_dcp import DefaultSavePlanner, FileSystemReader
import torch.distributed.checkpoint as torchs
from torch.distributed.checkpoint._experimental import checkpointer
import ray_dcp
assert get_state_dict is torchs.state_dict.get_state_dict
assert ray_dcp.filesystem.FileSystemReader is FileSystemReader is torchs.FileSystemReader
assert nested is checkpointer
assert load is ray_dcp.load and load is not torchs.load
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_module_that_neither_has_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"ray_dcp\.nonsense"):
        importlib.import_module("ray_dcp.nonsense")
    with pytest.raises(ModuleNotFoundError, match=r"ray_dcp\.metadata\.deeper"):
        importlib.import_module("ray_dcp.metadata.deeper")
    with pytest.raises(ModuleNotFoundError, match=r"ray_dcp\.planning\.nonsense"):
        importlib.import_module("ray_dcp.planning.nonsense")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dcp.nonsense


@pytest.mark.parametrize("name", dcp.__all__)
def test_every_exported_name_exists(name):
    assert getattr(dcp, name) is not None


def test_importing_it_imports_neither_torch_nor_ray():
    code = "import sys, ray_dcp; print(sorted({'torch', 'ray', 'pyarrow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_keyword_arguments_are_torchs_and_more():
    import inspect

    for name in ("save", "async_save", "load"):
        torchs = inspect.signature(getattr(torch_dcp, name)).parameters
        assert torchs.keys() <= inspect.signature(getattr(dcp, name)).parameters.keys()
