"""Random nested states, as descriptions that every rank makes its own part of, and what must come back of them.

A description is plain data. ``Maker`` makes a rank's state of it, filled, or its template; a template that was loaded
must be as a filled state of its rank. What is ``Lost`` lies where a part of the state would be lost: such a state is
refused.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from ray_dcp import LocalShards, PerRank
from tests.shardings import DTYPES, same_bits

LAYOUTS = ("plain", "parameter", "row of a larger one", "column of a larger one", "transposed", "every second")
KEYS = st.sampled_from(["a", "b", "weight", "c.d", "é", "", 0, 1, 7, -3, True, None, (1, 2)])
NO_TEXT = "\ud800"


@dataclass(frozen=True)
class Tensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    seed: int


@dataclass(frozen=True)
class Tied:
    """One of two tensors that all names with this number share."""

    number: int


@dataclass(frozen=True)
class Shards:
    """Cut at ``cuts`` of each dimension; who holds which of the chunks depends on ``seed`` and the number of ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    seed: int


@dataclass(frozen=True)
class Python:
    value: Any


@dataclass(frozen=True)
class InPython:
    """A tensor in a tuple."""

    tensor: Tensor


@dataclass(frozen=True)
class OfRank:
    number: int


@dataclass(frozen=True)
class Stateful:
    inner: Any


@dataclass(frozen=True)
class Dict:
    entries: tuple[tuple[Any, Any], ...]
    ordered: bool


@dataclass(frozen=True)
class List:
    entries: tuple[Any, ...]


@dataclass(frozen=True)
class Lost:
    """A value with a part that would be lost in it."""

    holder: str
    part: str


class Holder:
    """The ``Stateful`` of a test."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded = False

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loaded = True


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda part: (1, part),
    "deep": lambda part: (([{"x": part}],),),
    "deque": lambda part: deque([part]),
    "namespace": lambda part: SimpleNamespace(x=part),
    "partial": lambda part: functools.partial(print, part),
    "per rank": PerRank,
}
PARTS: dict[str, Callable[[], Any]] = {
    "shards": lambda: LocalShards((2,), {(0,): torch.ones(2)}),
    "per rank": lambda: PerRank(1),
    "stateful": lambda: Holder({}),
    "meta": lambda: torch.empty(2, device="meta"),
}


@st.composite
def shapes(draw: Any) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 5), max_size=3)))


@st.composite
def tensors(draw: Any) -> Tensor:
    return Tensor(
        draw(st.sampled_from(DTYPES)), draw(shapes()), draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 99))
    )


@st.composite
def shards(draw: Any) -> Shards:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = tuple(tuple(sorted(draw(st.sets(st.integers(1, n - 1), max_size=2)))) if n > 1 else () for n in shape)
    return Shards(draw(st.sampled_from(DTYPES)), shape, cuts, draw(st.integers(0, 99)))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
PYTHON = st.recursive(
    SCALARS | st.binary(max_size=5) | st.sets(st.integers(), max_size=2),
    lambda inner: st.tuples(inner, inner) | st.tuples(st.lists(inner, max_size=2)),
    max_leaves=4,
)
LEAVES = (
    tensors()
    | tensors()
    | shards()
    | shards()
    | st.integers(0, 1).map(Tied)
    | PYTHON.map(Python)
    | st.lists(st.integers(), max_size=3).map(Python)
    | tensors().map(InPython)
    | st.integers(0, 9).map(OfRank)
)


def _entries(inner: Any) -> Any:
    return st.dictionaries(KEYS, inner, max_size=3).map(lambda found: tuple(found.items()))


def nested(leaves: Any = LEAVES) -> Any:
    return st.recursive(
        leaves,
        lambda inner: (
            st.builds(Dict, _entries(inner), st.booleans())
            | st.builds(List, st.lists(inner, max_size=3).map(tuple))
            | st.builds(Stateful, st.builds(Dict, _entries(inner), st.just(False)))
        ),
        max_leaves=8,
    )


def states() -> Any:
    """A ``Dict`` with text for keys."""
    keys = st.sampled_from(["model", "opt", "x", "y.z", "loader"])
    return st.dictionaries(keys, nested(), min_size=1, max_size=3).map(lambda found: Dict(tuple(found.items()), False))


def losing_states() -> Any:
    """One that must be refused: among its values lies one that would be lost, or a key that cannot be stored."""
    lost = st.builds(Lost, st.sampled_from(sorted(HOLDERS)), st.sampled_from(sorted(PARTS)))
    refused = lost | st.just(Dict(((NO_TEXT, Python(1)),), False))
    wrapped = st.sampled_from(
        [lambda x: x, lambda x: Dict(((0, x),), False), lambda x: List((Dict((("in", x),), True), Python(1)))]
    )
    return st.builds(
        lambda state, wrap, node: Dict((*state.entries, ("lost", wrap(node))), False), states(), wrapped, refused
    )


# What a rank has of it.


def values_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same in every process, and no NaN."""
    count = torch.Size(shape).numel()
    bits = (torch.arange(count * dtype.itemsize, dtype=torch.int64) * 37 + seed * 11) % 119
    if dtype == torch.bool:
        bits = bits % 2
    return bits.to(torch.uint8).view(dtype).reshape(shape).clone() if count else torch.empty(shape, dtype=dtype)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor equal to ``values`` that lies in memory as ``layout`` says."""
    if layout == "parameter":
        return torch.nn.Parameter(
            values, requires_grad=values.dtype in (torch.float32, torch.bfloat16, torch.complex64)
        )
    shape = values.shape
    if layout == "row of a larger one":
        return torch.zeros((2, *shape), dtype=values.dtype)[0].copy_(values)
    if layout == "column of a larger one":
        return torch.zeros((*shape, 2), dtype=values.dtype)[..., 1].copy_(values)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second" and values.dim():
        return torch.zeros((2 * shape[0], *shape[1:]), dtype=values.dtype)[::2].copy_(values)
    return values


def boxes(node: Shards, rank: int, world_size: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Offsets of this rank's chunks, and where they lie in the whole."""
    spans = [list(itertools.pairwise((0, *cuts, n))) for cuts, n in zip(node.cuts, node.shape, strict=True)]
    owners = random.Random(node.seed)
    for box in itertools.product(*spans):
        if owners.randrange(world_size) == rank:
            yield tuple(start for start, _ in box), tuple(slice(start, stop) for start, stop in box)


class Maker:
    """Makes one rank's state of a description. ``fill`` is False for a template."""

    def __init__(self, rank: int, world_size: int, *, fill: bool) -> None:
        self.rank, self.world_size, self.fill = rank, world_size, fill
        self._shared = [self._values(torch.float32, (3, 4), 50 + number) for number in range(2)]
        self.statefuls: list[Holder] = []

    def make(self, node: Any) -> Any:
        return getattr(self, f"_{type(node).__name__.lower()}")(node)

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        values = values_of(dtype, shape, seed)
        return values if self.fill else torch.zeros_like(values)

    def _tensor(self, node: Tensor) -> torch.Tensor:
        return laid_out(self._values(node.dtype, node.shape, node.seed), node.layout)

    def _tied(self, node: Tied) -> torch.Tensor:
        return self._shared[node.number].detach()

    def _shards(self, node: Shards) -> LocalShards:
        whole = self._values(node.dtype, node.shape, node.seed)
        chunks = {offsets: whole[box].clone() for offsets, box in boxes(node, self.rank, self.world_size)}
        return LocalShards(node.shape, chunks, dtype=node.dtype)

    def _python(self, node: Python) -> Any:
        return copy.deepcopy(node.value) if self.fill else -1

    def _inpython(self, node: InPython) -> Any:
        return (self._tensor(node.tensor), "beside") if self.fill else -1

    def _ofrank(self, node: OfRank) -> PerRank:
        return PerRank((node.number, self.rank) if self.fill else None, reshard=lambda *given: given)

    def _stateful(self, node: Stateful) -> Holder:
        holder = Holder(self.make(node.inner))
        self.statefuls.append(holder)
        return holder

    def _dict(self, node: Dict) -> dict[Any, Any]:
        return (OrderedDict if node.ordered else dict)((key, self.make(entry)) for key, entry in node.entries)

    def _list(self, node: List) -> list[Any]:
        return [self.make(entry) for entry in node.entries]

    def _lost(self, node: Lost) -> Any:
        return HOLDERS[node.holder](PARTS[node.part]())


def names(node: Any, prefix: str = "") -> Iterator[str]:
    """Of the values of a state, as DCP has them."""
    if isinstance(node, Stateful):
        yield from names(node.inner, prefix)
    elif isinstance(node, Dict):
        for key, entry in node.entries:
            yield from names(entry, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, List) and _is_walked(node):
        for number, entry in enumerate(node.entries):
            yield from names(entry, f"{prefix}.{number}")
    else:
        yield prefix


def _is_walked(node: Any) -> bool:
    if isinstance(node, List):
        return any(map(_is_walked, node.entries))
    return not isinstance(node, Python | InPython)


def same(found: Any, wanted: Any, saved_by: int) -> bool:
    """Whether a filled template is as one that was made filled; ``saved_by`` so many ranks."""
    if isinstance(wanted, PerRank):
        return per_rank_is_right(found, wanted, saved_by)
    if isinstance(wanted, Holder):  # in the state of another one it is plain
        return same(found.state if isinstance(found, Holder) else found, wanted.state, saved_by)
    if isinstance(wanted, LocalShards):
        return found.chunks.keys() == wanted.chunks.keys() and all(
            same_bits(found.chunks[offsets], chunk) for offsets, chunk in wanted.chunks.items()
        )
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and same_bits(found.detach(), wanted.detach())
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        keys = [(type(key), key) for key in wanted]
        return keys == [(type(key), key) for key in found] and all(same(found[k], wanted[k], saved_by) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(same(a, b, saved_by) for a, b in zip(found, wanted, strict=True))
    return bool(found == wanted)


def per_rank_is_right(found: PerRank, wanted: PerRank, saved_by: int) -> bool:
    number, rank = wanted.value
    values = [(number, saving) for saving in range(saved_by)]
    assert isinstance(found.value, tuple)
    if len(found.value) == 2:
        return found.value == (number, rank)
    return found.value[0] == values and found.value[1] == rank
