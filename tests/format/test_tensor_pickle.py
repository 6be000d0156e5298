"""The pickle in a record is torch's own, but for what it remembers and never asks for again."""

from __future__ import annotations

import io
import pickletools
import zipfile

import pytest
import torch

from ray_dcp.format.tensor_pickle import tensor_pickle, torchs_pickle
from ray_dcp.planning.save_plan.state_planner import tensor_problem

DTYPES = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
STORED = sorted((one for one in DTYPES if tensor_problem(torch.empty(1, dtype=one)) is None), key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("sizes", [(), (0,), (3, 4), (2, 0, 3), (2, 1, 70_000), (300,)])
def test_a_pickle_is_the_one_that_torch_makes(dtype, sizes):
    buffer = io.BytesIO()
    torch.save(torch.empty(sizes, dtype=dtype), buffer)
    assert torchs_pickle(dtype, sizes) == zipfile.ZipFile(buffer).read("archive/data.pkl")
    assert tensor_pickle(dtype, sizes) == pickletools.optimize(torchs_pickle(dtype, sizes))


def test_dtypes_that_torch_cannot_save_are_told_apart():
    assert len(STORED) > 20
    assert "torch.save has no record for torch.uint1" in str(tensor_problem(torch.empty(1, dtype=torch.uint1)))
