"""Every kind of state that a run may have, and how it comes back: what docs/state.md says and what tests show.

``python -m tests.interop.state_kinds`` prints the page's table.
"""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import enum
import io
import pathlib
import random
import threading
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ray_dcp as dcp
from tests.shardings import _unlike, same_bits

SAVED_BY = 2
SIZES = {"as many ranks": 2, "fewer": 1, "more": 3}
MODES = ("save", "async_save")
RESTORED, AT_SAVE, AT_LOAD = "restored", "refused at save", "refused at load"

State = Callable[[int, int], dict[str, Any]]
"""(rank, number of ranks) -> the state dict of that rank."""

_one_rank_at_a_time = threading.Lock()
"""Ranks are threads here, and share the process's random generators."""


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    state: State
    """What a rank saves; and, where nothing else is said, what the same rank of another number has after a load."""
    template: State | None = None
    """To fill; by default ``state`` with other values in tensors and None for all else."""
    expected: State | None = None
    outcomes: tuple[str, str, str] = (RESTORED, RESTORED, RESTORED)
    """On as many ranks, fewer and more."""
    says: str = ""
    """A regular expression that the error of a refusal must match."""
    note: str = ""
    """For the page."""
    check: Callable[[dict[str, Any]], None] = field(default=lambda filled: None)
    """Asserts what comparing values does not show."""

    def outcome(self, size: str) -> str:
        return self.outcomes[list(SIZES).index(size)]


def refused(name: str, state: State, says: str, note: str = "") -> Kind:
    return Kind(name, state, outcomes=(AT_SAVE, AT_SAVE, AT_SAVE), says=says, note=note)


def constant(name: str, value: Callable[[], Any], **options: Any) -> Kind:
    """The same on every rank."""
    return Kind(name, lambda rank, world_size: {"x": copy.deepcopy(value())}, **options)


def not_loaded(name: str, value: Callable[[], Any], says: str, note: str = "") -> Kind:
    return constant(name, value, outcomes=(AT_LOAD, AT_LOAD, AT_LOAD), says=says, note=note)


def rows(rank: int, world_size: int) -> dcp.LocalShards:
    """This rank's part of 7 rows."""
    first, last = 7 * rank // world_size, 7 * (rank + 1) // world_size
    whole = torch.arange(21.0).reshape(7, 3)
    return dcp.LocalShards((7, 3), {(first, 0): whole[first:last].clone()})


@dataclass
class Settings:
    """A class of the user's."""

    width: int = 3


class Holder:
    """A class of the user's with something in it."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", ["x", "y"])


class Counter:
    """A ``Stateful``."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def model(seed: int) -> nn.Module:
    with _one_rank_at_a_time:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed: int, num_steps: int, **more: Any) -> dcp.TrainState:
    net = model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(num_steps):
        net(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    extra = {"ema": AveragedModel(net), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0 + seed)} if more else {}
    return dcp.TrainState(net, optimizer, schedule, **extra)


def tied() -> dict[str, Any]:
    weight = torch.arange(6.0)
    return {"embed": weight, "head": weight}


def assert_tied(filled: dict[str, Any]) -> None:
    assert filled["embed"].data_ptr() == filled["head"].data_ptr()


def assert_no_meta(filled: dict[str, Any]) -> None:
    assert filled["x"].device.type == "cpu"


class RandomOfRank:
    """``RNGState`` as a rank in a process of its own has it; here ranks are threads, and share the generators."""

    def __init__(self, rank: int, *, drawn: list[float] | None = None) -> None:
        self.rank, self.drawn = rank, drawn

    def state_dict(self) -> dict[str, Any]:
        with _one_rank_at_a_time:
            before = random.getstate(), np.random.get_state(), torch.get_rng_state()
            random.seed(self.rank)
            torch.manual_seed(self.rank)
            state = dcp.RNGState().state_dict()
            _put_back(before)
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with _one_rank_at_a_time:
            before = random.getstate(), np.random.get_state(), torch.get_rng_state()
            dcp.RNGState().load_state_dict(state)
            self.drawn = [random.random(), torch.rand(1).item()]
            _put_back(before)


def _put_back(before: tuple[Any, Any, Any]) -> None:
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def drawn_by(rank: int) -> list[float]:
    return [random.Random(rank).random(), torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()]


def position(rank: int, world_size: int, num_steps: int = 0) -> dcp.DataPosition:
    found = dcp.DataPosition(100, 5, rank=rank, world_size=world_size)
    found.advance(num_steps)
    return found


def meta(rank: int, world_size: int) -> dict[str, Any]:
    return {"x": torch.empty(3, device="meta")}


KINDS = [
    # Tensors.
    constant("a tensor", lambda: torch.arange(6.0).reshape(2, 3)),
    *(
        constant(f"a tensor of {str(dtype).removeprefix('torch.')}", lambda dtype=dtype: torch.arange(3).to(dtype))
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool, torch.int64)
    ),
    constant("a number in a tensor", lambda: torch.tensor(7)),
    constant("an empty tensor", lambda: torch.empty(0, 3)),
    constant("a parameter", lambda: nn.Parameter(torch.arange(3.0))),
    constant("a tensor that is not contiguous", lambda: torch.arange(6.0).reshape(2, 3).t()),
    constant("a conjugated tensor", lambda: torch.arange(3).to(torch.complex64).conj()),
    constant("a view of a large tensor", lambda: torch.arange(100_000.0)[10:13]),
    Kind("tied tensors", lambda rank, n: tied(), template=lambda rank, n: _blank_tied(), check=assert_tied),
    Kind(
        "a tensor that differs between ranks",
        lambda rank, n: {"x": torch.full((3,), rank + 1.0)},
        expected=lambda rank, n: {"x": torch.ones(3)},
        note='rank 0\'s, with a warning; `replica_check="error"` refuses it',
    ),
    Kind("a tensor, into one on meta", lambda rank, n: {"x": torch.arange(3.0)}, template=meta, check=assert_no_meta),
    Kind(
        "tensors that differ, into one memory",
        lambda rank, n: {"a": torch.zeros(3), "b": torch.ones(3)},
        template=lambda rank, n: dict.fromkeys("ab", torch.full((3,), torch.nan)),
        outcomes=(AT_LOAD, AT_LOAD, AT_LOAD),
        says=r"a.*b|b.*a",
        note="equal ones are loaded",
    ),
    Kind("`LocalShards`", lambda rank, n: {"x": rows(rank, n)}),
    Kind("`LocalShards` in dicts and lists", lambda rank, n: {"x": {"y": [rows(rank, n), {"z": rows(rank, n)}]}}),
    Kind(
        "`LocalShards`, into a whole tensor",
        lambda rank, n: {"x": rows(rank, n)},
        template=lambda rank, n: {"x": torch.full((7, 3), torch.nan)},
        expected=lambda rank, n: {"x": torch.arange(21.0).reshape(7, 3)},
    ),
    refused("a sparse tensor", lambda rank, n: {"x": torch.eye(3).to_sparse()}, r"x: .*layout"),
    refused(
        "a quantized tensor",
        lambda rank, n: {"x": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
        r"x: .*quantized",
    ),
    refused(
        "a nested tensor", lambda rank, n: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "x: "
    ),
    refused("a tensor on meta", lambda rank, n: {"x": torch.empty(3, device="meta")}, r"x: .*meta"),
    refused("an uninitialized parameter", lambda rank, n: {"x": nn.LazyLinear(3).weight}, r"x: "),
    refused(
        "a tensor of another shape on each rank", lambda rank, n: {"x": torch.ones(3 + rank)}, r"x: .*\(3,\).*\(4,\)"
    ),
    refused(
        "a tensor of another dtype on each rank",
        lambda rank, n: {"x": torch.ones(3, dtype=[torch.float32, torch.float64][rank])},
        r"x: .*float32.*float64",
    ),
    # Containers.
    constant("dicts and lists", lambda: {"a": [torch.ones(2), {"b": 1}], "c": "text"}),
    constant("an empty dict and an empty list", lambda: {"a": {}, "b": [], "c": {"d": {}}}),
    Kind(
        "an empty dict, into something else",
        lambda rank, n: {"x": {"y": {}, "z": 1}},
        template=lambda rank, n: {"x": {"y": {"a": 1}, "z": None}},
        outcomes=(AT_LOAD, AT_LOAD, AT_LOAD),
        says=r"x\.y\.a: Missing key",
    ),
    constant("a list of numbers", lambda: [1, 2, 3]),
    constant("a dict with numbers as keys", lambda: {0: torch.ones(2), 1: {"y": 5}}),
    constant(
        "a dict with `None`, booleans, floats, bytes or tuples of them as keys",
        lambda: {None: torch.ones(2), True: 1, 0.5: 2, b"k": {(1, "y"): 3}},
    ),
    constant("an `OrderedDict`", lambda: collections.OrderedDict(a=torch.ones(2), b=1)),
    constant("a tuple", lambda: (1, "text", torch.arange(2.0))),
    constant("tensors in a tuple in a list", lambda: [(torch.ones(2), 1), (torch.zeros(2), 2)]),
    refused("two keys of one name", lambda rank, n: {"x": {0: 1, "0": 2}}, r"x\.0"),
    refused(
        "a date, a path, a set, a dtype or a member of an `Enum` as key",
        lambda rank, n: {"x": {datetime.date(2020, 1, 1): 1}},
        r"x: datetime.date\(2020, 1, 1\), a date, as key",
    ),
    refused("`a.b` beside `a: {b}`", lambda rank, n: {"a.b": 1, "a": {"b": 2}}, r"a\.b"),
    refused("`LocalShards` in a tuple", lambda rank, n: {"x": (rows(rank, n),)}, r"x.*tuple"),
    refused("`LocalShards` in an object", lambda rank, n: {"x": Holder({"y": rows(rank, n)})}, r"x.*Holder"),
    refused("`LocalShards` in a `deque`", lambda rank, n: {"x": collections.deque([rows(rank, n)])}, r"x.*deque"),
    refused("`PerRank` in a tuple", lambda rank, n: {"x": (dcp.PerRank(rank),)}, r"PerRank"),
    refused("`PerRank` in an object", lambda rank, n: {"x": Holder(dcp.PerRank(rank))}, r"x.*Holder"),
    refused("a `Stateful` in a tuple", lambda rank, n: {"x": (Counter(1),)}, r"x.*tuple"),
    refused("a `Stateful` in an object", lambda rank, n: {"x": Holder(Counter(1))}, r"x.*Holder"),
    Kind(
        "dicts and lists, into an empty dict",
        lambda rank, n: {"x": {"a": [torch.ones(2), {"b": 1}], "c": "text"}},
        template=lambda rank, n: {"x": {}},
    ),
    # Python values.
    *(
        constant(name, lambda value=value: value)
        for name, value in (
            ("a number", 7),
            ("a number beyond 2**2000", 3**2000),
            ("a float", 0.5),
            ("a complex number", 1 + 2j),
            ("a text", "text"),
            ("bytes", b"bytes"),
            ("no bytes", b""),
            ("a boolean", True),
            ("`None`", None),
            ("a set", {1, 2}),
            ("a `frozenset`", frozenset((1, 2))),
            ("a `deque`", collections.deque([1, 2], maxlen=5)),
            ("a `defaultdict`", collections.defaultdict(int, a=1)),
            ("a `Counter`", collections.Counter("text")),
            ("a date and a time", datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc)),
            ("a `timedelta`", datetime.timedelta(seconds=3)),
            ("a `Path`", pathlib.PurePosixPath("/a/b")),
            ("a `Decimal`", decimal.Decimal("0.1")),
            ("a `Fraction`", Fraction(1, 3)),
            ("a `UUID`", uuid.UUID(int=5)),
            ("a `range`", range(1, 9, 2)),
            ("a `slice`", slice(1, 2)),
            ("a `torch.Size`", torch.Size((2, 3))),
            ("a `torch.dtype`", torch.float16),
            ("a `torch.device`", torch.device("cpu")),
            ("a numpy array", np.arange(6.0).reshape(2, 3)),
            ("an empty numpy array", np.empty((0, 3))),
            ("a numpy array of text", np.array(["a", "bc"])),
            ("a structured numpy array", np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])),
            ("a numpy number", np.float32(0.5)),
            ("`SimpleNamespace`", types.SimpleNamespace(a=1)),
        )
    ),
    constant("`BytesIO`", lambda: io.BytesIO(b"abc"), expected=lambda rank, n: {"x": b"abc"}),
    constant("a `torch.Generator`", lambda: torch.Generator().manual_seed(3), expected=lambda rank, n: {"x": 3}),
    *(
        not_loaded(name, lambda value=value: value, r"x: .*UnsafeDataError|x", note)
        for name, value, note in (
            ("an object of a class of yours", Settings(), "a warning at save names both ways to load it"),
            ("an `Enum` of yours", Color.RED, "as above"),
            ("a `namedtuple` of yours", Point(1, 2), "as above"),
        )
    ),
    refused("a function", lambda rank, n: {"x": lambda: 0}, r"x: .*cannot be pickled"),
    refused("a function in `PerRank`", lambda rank, n: {"x": dcp.PerRank(lambda: 0)}, r"x.*cannot be pickled"),
    refused("a lock", lambda rank, n: {"x": threading.Lock()}, r"x: .*cannot be pickled"),
    refused("a key that is not valid text", lambda rank, n: {"x": {"\ud800": 1}}, r"x"),
    Kind(
        "a number that differs between ranks",
        lambda rank, n: {"x": rank},
        expected=lambda rank, n: {"x": 0},
        note="as for a tensor",
    ),
    # What belongs to a rank.
    Kind(
        "`PerRank`",
        lambda rank, n: {"x": dcp.PerRank({"of": rank})},
        template=lambda rank, n: {"x": dcp.PerRank(None)},
        outcomes=(RESTORED, AT_LOAD, AT_LOAD),
        says=r"x: saved by 2 ranks, loading on",
        note="pass `reshard=` for other numbers of ranks",
    ),
    Kind(
        "`PerRank` with `reshard`",
        lambda rank, n: {"x": [dcp.PerRank(rank)]},
        template=lambda rank, n: {"x": [dcp.PerRank(None, reshard=lambda values, rank, n: [rank, n, *values])]},
        expected=lambda rank, n: {"x": [dcp.PerRank(rank if n == SAVED_BY else [rank, n, 0, 1])]},
    ),
    Kind(
        "`RNGState`",
        lambda rank, n: {"x": RandomOfRank(rank)},
        template=lambda rank, n: {"x": RandomOfRank(rank + 9)},
        expected=lambda rank, n: {"x": RandomOfRank(rank, drawn=drawn_by(rank) if n == SAVED_BY else None)},
        note="each rank its own; on another number of ranks seeds of their own, always the same",
    ),
    Kind(
        "`DataPosition`",
        lambda rank, n: {"x": position(rank, n, num_steps=3)},
        template=lambda rank, n: {"x": position(rank, n)},
        expected=lambda rank, n: {"x": {"epoch": 0, "samples": 30}},
        note="every sample of an epoch once, whatever the numbers of ranks",
    ),
    # What has a state of its own.
    Kind(
        "a `Stateful`",
        lambda rank, n: {"x": Counter(5)},
        template=lambda rank, n: {"x": Counter()},
        expected=lambda rank, n: {"x": {"count": 5}},
    ),
    Kind(
        "a `Stateful` in dicts and lists",
        lambda rank, n: {"x": {"y": [Counter(5)]}},
        template=lambda rank, n: {"x": {"y": [Counter()]}},
        expected=lambda rank, n: {"x": {"y": [{"count": 5}]}},
    ),
    Kind(
        "a module",
        lambda rank, n: {"x": model(1)},
        template=lambda rank, n: {"x": model(2)},
        expected=lambda rank, n: {"x": dict(model(1).state_dict())},
    ),
    Kind(
        "a module, into one on meta",
        lambda rank, n: {"x": model(1)},
        template=lambda rank, n: {"x": model(1).to("meta")},
        expected=lambda rank, n: {"x": dict(model(1).state_dict())},
    ),
    Kind(
        "`TrainState`: model, optimizer, schedule",
        lambda rank, n: {"x": trained(1, 3)},
        template=lambda rank, n: {"x": trained(2, 1)},
        expected=lambda rank, n: {"x": trained(1, 3).state_dict()},
    ),
    Kind(
        "`TrainState`, into an optimizer that has not stepped",
        lambda rank, n: {"x": trained(1, 3)},
        template=lambda rank, n: {"x": trained(2, 0)},
        expected=lambda rank, n: {"x": trained(1, 3).state_dict()},
    ),
    Kind(
        "`TrainState` before the first step",
        lambda rank, n: {"x": trained(1, 0)},
        template=lambda rank, n: {"x": trained(2, 2)},
        expected=lambda rank, n: {"x": trained(1, 0).state_dict()},
    ),
    Kind(
        "`TrainState` with EMA and `GradScaler`",
        lambda rank, n: {"x": trained(1, 2, more=True)},
        template=lambda rank, n: {"x": trained(2, 0, more=True)},
        expected=lambda rank, n: {"x": trained(1, 2, more=True).state_dict()},
    ),
]


def _blank_tied() -> dict[str, Any]:
    weight = torch.full((6,), torch.nan)
    return {"embed": weight, "head": weight}


def blank(value: Any) -> Any:
    """A template for ``value``: nothing in it is what it should become."""
    if isinstance(value, dcp.LocalShards):
        return dcp.LocalShards(value.size(), {at: _unlike(chunk) for at, chunk in value.chunks.items()})
    if isinstance(value, nn.Parameter):
        return nn.Parameter(_unlike(value.detach()))
    if isinstance(value, torch.Tensor):
        return _unlike(value.resolve_conj().contiguous()) if value.numel() else value.clone()
    if isinstance(value, dict):
        filled = copy.copy(value)
        for key, entry in value.items():
            filled[key] = blank(entry)
        return filled
    return [blank(entry) for entry in value] if isinstance(value, list) and value else None


def spoil(value: Any) -> None:
    """Overwrite what can be overwritten, as a training goes on while its checkpoint is written."""
    if isinstance(value, dcp.LocalShards):
        for chunk in value.chunks.values():
            chunk.zero_().sub_(1)
    elif isinstance(value, nn.Module):
        spoil(dict(value.state_dict()))
    elif isinstance(value, dcp.TrainState):
        spoil(value.state_dict())
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.detach().copy_(torch.zeros(value.shape))
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value[...] = -1
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            spoil(entry)
        if isinstance(value, list | dict):
            value.clear()
    elif isinstance(value, Counter):
        value.count = -1


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two states differ in any bit or type; a ``Stateful`` is compared by what ``expected`` says of it."""
    if isinstance(expected, dcp.PerRank):
        return differences(found.value, expected.value, where)
    if isinstance(expected, RandomOfRank):
        others = [None, *map(drawn_by, range(SAVED_BY))]
        same = found.drawn == expected.drawn if expected.drawn else found.drawn not in others
        return [] if same else [where]
    if isinstance(found, dcp.DataPosition):
        return [] if {"epoch": found.epoch, "samples": found.samples} == expected else [where]
    if isinstance(found, dcp.TrainState | nn.Module | Counter):
        return differences(dict(found.state_dict()), expected, where)
    if isinstance(found, io.BytesIO):
        return [] if found.getvalue() == expected else [where]
    if isinstance(found, torch.Generator):
        return [] if found.initial_seed() == expected else [where]
    if isinstance(expected, dcp.LocalShards):
        return differences(dict(found.chunks), dict(expected.chunks), where)
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return [where]
        if found.is_meta or expected.is_meta:
            return [] if found.is_meta and expected.is_meta else [where]
        return [] if same_bits(found.detach().resolve_conj(), expected.detach().resolve_conj()) else [where]
    if type(found) is not type(expected):
        return [f"{where}: a {type(found).__name__} for a {type(expected).__name__}"]
    if isinstance(expected, np.ndarray | np.generic):
        return [] if found.dtype == expected.dtype and np.array_equal(found, expected) else [where]
    if isinstance(expected, dict):
        return [f"{where}.{key}" for key in found.keys() ^ expected.keys()] + [
            one
            for key in expected.keys() & found.keys()
            for one in differences(found[key], expected[key], f"{where}.{key}")
        ]
    if isinstance(expected, list | tuple) and len(found) == len(expected):
        return [
            one
            for number, (a, b) in enumerate(zip(found, expected, strict=True))
            for one in differences(a, b, f"{where}.{number}")
        ]
    return [] if found == expected else [f"{where}: {found!r} for {expected!r}"]


def held(value: Any) -> Any:
    """Plain values that tell all of ``value``, for comparing two templates."""
    if isinstance(value, RandomOfRank):
        return value.drawn
    if isinstance(value, dcp.DataPosition):
        return [value.epoch, value.samples]
    if isinstance(value, dcp.TrainState | nn.Module | Counter):
        return held(value.state_dict())
    if isinstance(value, dict):
        return {key: held(entry) for key, entry in value.items()}
    return [held(entry) for entry in value] if isinstance(value, list) else value


# Each of these is saved and loaded by processes with a device mesh, one process alone has plain tensors.
ON_A_MESH = [
    Kind(
        "a `DTensor`, sharded or replicated",
        lambda rank, n: {"x": on_mesh(n, shard=True), "y": on_mesh(n, shard=False)},
    ),
    refused("a `DTensor` in a tuple", lambda rank, n: {"x": (on_mesh(n, shard=True),)}, r"x.*tuple"),
    Kind(
        "`TrainState` of FSDP2, into an optimizer that has not stepped",
        lambda rank, n: {"x": sharded(n, 1, 3)},
        template=lambda rank, n: {"x": sharded(n, 2, 0)},
    ),
]


def on_mesh(world_size: int, *, shard: bool) -> torch.Tensor:
    whole = torch.arange(21.0).reshape(7, 3)
    if world_size == 1:
        return whole
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(whole, init_device_mesh("cpu", (world_size,)), [Shard(0) if shard else Replicate()])


def sharded(world_size: int, seed: int, num_steps: int) -> dcp.TrainState:
    """The values are those of one process, whatever the number of ranks: each has the same gradients."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if world_size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(num_steps):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return dcp.TrainState(net, optimizer)


def whole(value: Any) -> Any:
    """``value`` with every ``DTensor`` as all of its values, and a ``TrainState`` as its state."""
    if isinstance(value, dcp.TrainState):
        return whole(value.state_dict())
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def table(kinds: list[Kind]) -> str:
    """As the page has it; asynchronous saves are as the others."""
    lines = ["| what | as many ranks | fewer | more | |", "| --- | --- | --- | --- | --- |"]
    for kind in kinds:
        cells = [kind.outcome(size) for size in SIZES]
        lines.append(f"| {kind.name} | {' | '.join(cells)} | {kind.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(KINDS + ON_A_MESH))
