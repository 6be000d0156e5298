"""The store of ``docs/stores.md`` does what every store must, by the tests that the page has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp as dcp

PAGE = Path(dcp.__file__).parents[1] / "docs" / "stores.md"
STORE, TESTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
_defined: dict[str, Any] = {"__name__": __name__}
exec(compile(STORE, str(PAGE), "exec"), _defined)
exec(compile(TESTS, str(PAGE), "exec"), _defined)
SQLiteStore, TestSQLiteStore = _defined["SQLiteStore"], _defined["TestSQLiteStore"]


def test_checkpoints_lie_in_it(tmp_path):
    url = f"sqlite://{tmp_path}/runs.db/run-7"
    manager = dcp.CheckpointManager(url)
    manager.save(3, {"w": torch.arange(6.0)})
    manager.save(4, {"w": torch.arange(6.0) + 1})
    template = {"w": torch.full((6,), float("nan"))}
    assert manager.load(template) == 4
    assert torch.equal(template["w"], torch.arange(6.0) + 1)
    assert [info.step for info in manager.list()] == [3, 4]


def test_the_page_names_what_there_is():
    with pytest.raises(dcp.errors.ConfigError):
        dcp.store.register_scheme("s3", lambda url: None)
