"""Metrics come back as they were given, or are refused by name."""

import enum
import math

import numpy as np
import pytest
import torch

from ray_dcp import CheckpointManager
from ray_dcp.errors import ConfigError
from ray_dcp.format.metrics import json_values


class Split(str, enum.Enum):
    EVAL = "eval"


class Rank(enum.IntEnum):
    FIRST = 1


KEPT = {
    "python": ({"loss": 0.5, "step": 3, "ok": True, "note": "grün", "none": None, "big": 2**70},) * 2,
    "numpy": (
        {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.float64(0.1), "e": np.array([7])},
        {"a": 0.5, "b": 3, "c": True, "d": 0.1, "e": 7},
    ),
    "torch": (
        {
            "a": torch.tensor(0.5),
            "b": torch.tensor(3),
            "c": torch.tensor(True),
            "d": torch.ones(1, dtype=torch.bfloat16),
        },
        {"a": 0.5, "b": 3, "c": True, "d": 1.0},
    ),
    "nested": ({"eval": {"acc": [np.float32(1), {"top5": (1, 2)}]}}, {"eval": {"acc": [1.0, {"top5": [1, 2]}]}}),
    "enums": ({Split.EVAL: Split.EVAL, "rank": Rank.FIRST}, {"eval": "eval", "rank": 1}),
    "infinite": ({"a": math.inf, "b": -math.inf},) * 2,
    "empty": ({},) * 2,
}
CIRCLE = {}
CIRCLE["self"] = CIRCLE
REFUSED = [
    ({1: 2}, r"metrics: the key 1 is a int.*'1'"),
    ({"eval": {("a", "b"): 2}}, r"metrics\['eval'\]: the key \('a', 'b'\) is a tuple"),
    ({None: 2}, "metrics: the key None"),
    ({"loss": object()}, r"metrics\['loss'\]: is a object"),
    ({"a": [0.5, {"b": {1, 2}}]}, r"metrics\['a'\]\[1\]\['b'\]: is a set"),
    ({"w": torch.ones(2)}, r"metrics\['w'\]: is a Tensor"),
    ({"w": np.ones(2)}, r"metrics\['w'\]: is a ndarray"),
    ({"w": torch.ones(1, device="meta")}, r"metrics\['w'\]"),
    ({"z": 1j}, r"metrics\['z'\]: is a complex"),
    ({"b": b"x"}, r"metrics\['b'\]: is a bytes"),
    (CIRCLE, "holds itself"),
    ([("loss", 1)], "metrics: is a list"),
]


@pytest.mark.parametrize(("given", "kept"), KEPT.values(), ids=KEPT)
def test_what_json_has_words_for_comes_back(tmp_path, given, kept):
    info = CheckpointManager(tmp_path).save(1, {"w": torch.ones(1)}, metrics=given)
    assert info.metrics == CheckpointManager(tmp_path).latest().metrics == kept
    found = [type(value) for value in json_values(given).values()]
    assert found == [type(value) for value in kept.values()]


def test_a_number_that_is_none_comes_back_as_such(tmp_path):
    CheckpointManager(tmp_path).save(1, {"w": torch.ones(1)}, metrics={"loss": np.float32("nan")})
    assert math.isnan(CheckpointManager(tmp_path).latest().metrics["loss"])


@pytest.mark.parametrize(("metrics", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_anything_else_is_refused_by_name_before_a_byte_is_written(tmp_path, metrics, told):
    with pytest.raises(ConfigError, match=told):
        CheckpointManager(tmp_path / "new").save(1, {"w": torch.ones(1)}, metrics=metrics)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [np.int64(5), np.uint8(5), torch.tensor(5), Rank.FIRST, 5], ids=repr)
def test_a_step_is_any_whole_number(tmp_path, step):
    manager = CheckpointManager(tmp_path)
    info = manager.save(step, {"w": torch.ones(1)})
    assert type(info.step) is int
    assert info.step == int(step)
    assert [type(one.step) for one in manager.list()] == [int]
    found = {"w": torch.zeros(1)}
    loaded = manager.load(found, step=step)
    assert (type(loaded), loaded) == (int, int(step))
    assert found["w"].item() == 1
    assert manager.async_save(step, {"w": torch.ones(1)}).upload_completion.result() is not None
    assert manager.checkpoint_id(step).endswith(f"step-{int(step):08d}")


@pytest.mark.parametrize(
    "step", [True, np.bool_(1), torch.tensor(True), -1, 5.0, np.float32(5), "5", None, torch.ones(2)]
)
def test_anything_else_is_no_step(tmp_path, step):
    with pytest.raises(ConfigError, match=r"^step: .*whole number"):
        CheckpointManager(tmp_path).save(step, {"w": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_another_program_spelt_otherwise_is_loaded_by_its_number(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(7, {"w": torch.ones(1)})
    (tmp_path / "step-00000007").rename(tmp_path / "step-7")
    found = {"w": torch.zeros(1)}
    assert manager.latest().step == manager.load(found) == manager.load(found, step=7) == 7
    assert found["w"].item() == 1
