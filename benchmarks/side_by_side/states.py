"""The states that both sides save and load: values known for every element, so that each result can be checked."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_LINEAR = 2**22
"""Row and column terms of a value stay below this, so that their sum is exact in float32."""


class Layout(enum.Enum):
    """How a tensor's two dimensions are spread over the ranks."""

    ROWS = 0
    COLUMNS = 1


class State(Protocol):
    """A state of known values, spread over the ranks of a mesh."""

    @property
    def nbytes(self) -> int:
        """Of all ranks together, without what the format adds."""
        ...

    def values(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        """This rank's part, as it is saved."""
        ...

    def template(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        """This rank's part to be loaded into: not a value of it is right."""
        ...

    def differences(self, held: dict[str, Any], layout: Layout, mesh: DeviceMesh) -> list[str]:
        """Names whose values in ``held`` are not the known ones, to the bit."""
        ...


@dataclass(frozen=True, slots=True)
class Tensors:
    """``num_tensors`` float32 DTensors of ``rows`` x ``columns``."""

    num_tensors: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.num_tensors * self.rows * self.columns * 4

    def values(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        return {
            name: self._spread(self._local_values(number, layout, mesh), layout, mesh)
            for number, name in enumerate(self._names())
        }

    def template(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        sizes = self._local_sizes(layout, mesh)
        return {name: self._spread(torch.full(sizes, math.nan), layout, mesh) for name in self._names()}

    def differences(self, held: dict[str, Any], layout: Layout, mesh: DeviceMesh) -> list[str]:
        return [
            name
            for number, name in enumerate(self._names())
            if not torch.equal(held[name].to_local(), self._local_values(number, layout, mesh))
        ]

    def _names(self) -> list[str]:
        return [f"layer.{number}.weight" for number in range(self.num_tensors)]

    def _local_sizes(self, layout: Layout, mesh: DeviceMesh) -> list[int]:
        sizes = [self.rows, self.columns]
        sizes[layout.value] //= mesh.size()
        return sizes

    def _local_values(self, number: int, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
        """Row, column and tensor all show in a value, so that nothing can end up elsewhere unnoticed."""
        sizes = self._local_sizes(layout, mesh)
        offsets = [0, 0]
        offsets[layout.value] = mesh.get_local_rank() * sizes[layout.value]
        row = torch.arange(offsets[0], offsets[0] + sizes[0]) * self.columns % _LINEAR
        column = torch.arange(offsets[1], offsets[1] + sizes[1]) % _LINEAR
        return (row + number).float()[:, None] + column.float()[None, :]

    def _spread(self, local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
        whole = torch.Size([self.rows, self.columns])
        return DTensor.from_local(
            local, mesh, [Shard(layout.value)], run_check=False, shape=whole, stride=(self.columns, 1)
        )


@dataclass(frozen=True, slots=True)
class Replicated:
    """A model that every rank holds whole, as under DDP: blocks of three matrices, a smaller one, and eight vectors."""

    num_blocks: int
    matrix_rows: int

    @property
    def nbytes(self) -> int:
        return 4 * sum(math.prod(sizes) for sizes in self._sizes().values())

    def values(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        return {name: self._value(number, sizes) for number, (name, sizes) in enumerate(self._sizes().items())}

    def template(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        return {name: torch.full(sizes, math.nan) for name, sizes in self._sizes().items()}

    def differences(self, held: dict[str, Any], layout: Layout, mesh: DeviceMesh) -> list[str]:
        return [
            name
            for number, (name, sizes) in enumerate(self._sizes().items())
            if not torch.equal(held[name], self._value(number, sizes))
        ]

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {}
        for block in range(self.num_blocks):
            sizes |= {f"block.{block}.matrix.{number}": (self.matrix_rows, 1024) for number in range(3)}
            sizes[f"block.{block}.small"] = (max(self.matrix_rows // 8, 1), 1024)
            sizes |= {f"block.{block}.vector.{number}": (1024,) for number in range(8)}
        return sizes

    def _value(self, number: int, sizes: tuple[int, ...]) -> torch.Tensor:
        return (torch.arange(math.prod(sizes)) % _LINEAR + number).float().view(sizes)


@dataclass(frozen=True, slots=True)
class Scalars:
    """As optimizers hold them, the same on all ranks: half of them tensors without dimensions, half Python floats."""

    num_scalars: int

    @property
    def nbytes(self) -> int:
        return self.num_scalars // 2 * (4 + 8)

    def values(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        steps = {f"state.{number}.step": torch.tensor(float(number)) for number in range(self.num_scalars // 2)}
        rates = {f"group.{number}.lr": number + 0.5 for number in range(self.num_scalars // 2)}
        return steps | rates

    def template(self, layout: Layout, mesh: DeviceMesh) -> dict[str, Any]:
        steps = {f"state.{number}.step": torch.tensor(math.nan) for number in range(self.num_scalars // 2)}
        rates = {f"group.{number}.lr": math.nan for number in range(self.num_scalars // 2)}
        return steps | rates

    def differences(self, held: dict[str, Any], layout: Layout, mesh: DeviceMesh) -> list[str]:
        return [name for name, value in self.values(layout, mesh).items() if not _same(held[name], value)]


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """This rank's memory of the tensors in ``state``."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _same(held: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(held, torch.Tensor) and torch.equal(held, value)
    return type(held) is type(value) and held == value
