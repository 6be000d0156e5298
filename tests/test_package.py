"""``import ray_dcp as dcp`` in a program that used ``torch.distributed.checkpoint as dcp``."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp

OURS = {"save", "async_save", "load", "CheckpointException"}


@pytest.mark.parametrize("name", sorted(n for n in vars(torch_dcp) if n[0].isupper() or n in OURS))
def test_every_public_name_of_torchs_package_is_there(name):
    if name in OURS:
        assert getattr(dcp, name) is not getattr(torch_dcp, name)
    else:
        assert getattr(dcp, name) is getattr(torch_dcp, name)


@pytest.mark.parametrize("name", ["state_dict", "format_utils", "stateful", "planner", "filesystem", "metadata"])
def test_torchs_submodules_are_there(name):
    assert getattr(dcp, name).__name__ == f"torch.distributed.checkpoint.{name}"


def test_names_of_torchs_modules_whose_name_is_taken():
    assert dcp.staging.DefaultStager is torch_dcp.staging.DefaultStager
    assert dcp.storage.WriteResult is torch_dcp.storage.WriteResult


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

    for name in ("save", "load"):
        torchs = inspect.signature(getattr(torch_dcp, name)).parameters
        assert torchs.keys() <= inspect.signature(getattr(dcp, name)).parameters.keys()
    assert set(inspect.signature(torch_dcp.async_save).parameters) - {"async_checkpointer_type"} <= set(
        inspect.signature(dcp.async_save).parameters
    )
