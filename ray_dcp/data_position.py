"""``DataPosition``: how far a run has come in its data, whatever number of ranks reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from ray_dcp.cluster.current import current_group
from ray_dcp.errors import ConfigError, StateDictError
from ray_dcp.planning.per_rank import PerRank, Reshard
from ray_dcp.state.sample_order import SampleOrder, Sharing

_FACTS = ("epoch", "samples", "num_samples", "seed", "shuffle")
_CONSUMED = "consumed"


class DataPosition:
    """A position in ``num_samples`` samples that any number of ranks can go on from. A ``Stateful``.

    It is a batch sampler: iterating gives this rank's batches of sample numbers, from the position to the end of the
    epoch. What counts is what ``track`` has handed out, not what a loader has fetched ahead::

        position = dcp.DataPosition(len(dataset), batch_size=8, seed=0)
        loader = DataLoader(dataset, batch_sampler=position, num_workers=4)
        while position.epoch < num_epochs:
            for batch in position.track(loader):
                ...                                   # a save here has this batch counted
                manager.save(step, {"data": position, ...})

    Without a loader, ``for numbers in position.track()``. Or count yourself: ``advance()`` after each batch.

    Each epoch is shuffled by ``seed`` and its number, and every sample of it is seen exactly once, also when a run goes
    on with another number of ranks or another ``batch_size``: ranks consume one common sequence, in which the
    position is one number. At the end of an epoch all ranks make the same number of steps and each has a sample in
    each: what is left for the last step is shared out evenly; fewer samples than ranks are added to the step before,
    whose batches then have one more than ``batch_size``, or, in a run that begins with so few left, to the next epoch.
    With ``drop_last`` all batches are full and the rest of an epoch is left out.

    ``rank`` and ``world_size`` are those of torch.distributed's default process group or of ``current_group()``; ranks
    that get the same data (tensor or pipeline parallel) pass the ones of their data-parallel dimension.

    A save is refused when ranks are not at the same place, or when batches were handed out and none counted. A load
    takes seed and shuffling from the checkpoint. Raises ``StateDictError`` for a checkpoint of another number of
    samples, and ``ConfigError`` for an epoch too small for the ranks.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, number in (("num_samples", num_samples), ("batch_size", batch_size)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(name, f"{number!r} is not a positive whole number")
        if (rank is None) != (world_size is None) or (world_size is not None and not 0 <= cast(int, rank) < world_size):
            raise ConfigError("rank", f"rank {rank} of {world_size}: pass both, or none")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.shuffle = shuffle
        self._given_rank = (rank, world_size) if rank is not None and world_size is not None else None
        self._place = 0
        self._num_uncounted = 0
        self._counts = False
        """Whether anybody has begun to count."""

    @property
    def epoch(self) -> int:
        """The number of epochs that are done."""
        return self._place // self.num_samples

    @property
    def samples(self) -> int:
        """How many samples of the epoch all ranks together have consumed."""
        return self._place % self.num_samples

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from here to the end of the epoch; none is counted."""
        rank, sharing = self._sharing()
        order = SampleOrder(self.num_samples, self.seed, self.shuffle)
        for start, stop in sharing.steps(self._place):
            self._num_uncounted += 1
            yield order.samples(*sharing.share(start, stop, rank))

    def __len__(self) -> int:
        """The number of batches from here to the end of the epoch, the same on every rank."""
        return self._sharing()[1].num_steps(self._place)

    def track(self, loader: Iterable[Any] | None = None) -> Iterator[Any]:
        """The batches of ``loader``, or else of iterating, to the end of the epoch; each counts when it is handed out.

        Raises ``ConfigError`` when ``loader`` gives more batches than the epoch has left.
        """
        self._counts = True
        sharing = self._sharing()[1]
        steps = sharing.steps(self._place)
        for batch in self if loader is None else loader:
            step = next(steps, None)
            if step is None:
                raise ConfigError(
                    "loader", "it gives more batches than the position has: batch_sampler=position is meant"
                )
            self._place = sharing.settled(step[1])
            yield batch

    def advance(self, num_batches: int = 1) -> None:
        """Count batches as consumed. Raises ``ConfigError`` for more of them than the epoch has left."""
        self._counts = True
        sharing = self._sharing()[1]
        steps = sharing.steps(self._place)
        for _ in range(num_batches):
            step = next(steps, None)
            if step is None:
                raise ConfigError("num_batches", f"{num_batches} are more than the epoch has left")
            self._place = sharing.settled(step[1])

    def state_dict(self) -> dict[str, Any]:
        """The position in numbers, and as the shape of an empty tensor: a shape must be the same on all ranks.

        Raises ``StateDictError`` when batches were handed out and none counted.
        """
        if self._num_uncounted and not self._counts:
            raise StateDictError(
                "batches of a DataPosition were handed out, and none was counted: iterate position.track(loader), or "
                "call position.advance() after each batch"
            )
        return {name: getattr(self, name) for name in _FACTS} | {_CONSUMED: torch.empty(self._place, 0)}

    def template_for(self, saved: dict[str, STORAGE_TYPES]) -> dict[str, Any]:
        consumed = saved.get(_CONSUMED)
        size = consumed.size if isinstance(consumed, TensorStorageMetadata) else torch.Size((0, 0))
        return {**dict.fromkeys(_FACTS), _CONSUMED: torch.empty(size)}

    def problems_with(self, values: Mapping[str, Any]) -> list[str]:
        stored = values.get("num_samples", self.num_samples)
        if stored == self.num_samples:
            return []
        return [
            f"the checkpoint is of a run with {stored} samples, this one has {self.num_samples}: which ones have been "
            "seen cannot be told"
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any(state_dict[name] is None for name in _FACTS):
            return  # not in the checkpoint, which a load with strict=False allows
        if problems := self.problems_with(state_dict):
            raise StateDictError(problems[0])
        self._place = state_dict["epoch"] * self.num_samples + state_dict["samples"]
        self.seed, self.shuffle = state_dict["seed"], state_dict["shuffle"]
        self._num_uncounted, self._counts = 0, False

    def _sharing(self) -> tuple[int, Sharing]:
        rank, world_size = self._given_rank or _own_rank()
        sharing = Sharing(self.num_samples, self.batch_size, world_size, self.drop_last)
        sharing.require_possible()
        return rank, sharing


def _own_rank() -> tuple[int, int]:
    """This rank and the number of ranks: of torch.distributed, of the current group, or of a process alone."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    group = current_group()
    return (group.rank, group.world_size) if group is not None else (0, 1)


class LoaderPosition:
    """The position of a loader that keeps one itself, such as torchdata's ``StatefulDataLoader``. A ``Stateful``.

    Iterate it in place of ``loader``. Where the loader's batch sampler is a ``DataPosition``, that is the position: any
    number of ranks can go on from it. Else it is what ``loader.state_dict()`` says, which belongs to one rank, its
    workers and its dataset: a load on another number of ranks is refused, unless ``reshard(states, rank, world_size)``
    says what each rank gets.
    """

    def __init__(self, loader: Any, *, reshard: Reshard | None = None) -> None:
        self.loader = loader
        sampler = getattr(loader, "batch_sampler", None)
        self._position = sampler if isinstance(sampler, DataPosition) else None
        self._reshard = reshard
        if self._position is None and not callable(getattr(loader, "state_dict", None)):
            raise ConfigError(
                "loader",
                f"a {type(loader).__name__} has no state_dict and no DataPosition as its batch_sampler: "
                "pass batch_sampler=dcp.DataPosition(...), or a StatefulDataLoader",
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader) if self._position is None else self._position.track(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        if self._position is not None:
            return self._position.state_dict()
        return {"loader": PerRank(self.loader.state_dict(), self._reshard)}

    def template_for(self, saved: dict[str, STORAGE_TYPES]) -> dict[str, Any]:
        if self._position is not None:
            return self._position.template_for(saved)
        return {"loader": PerRank(None, self._reshard)}

    def problems_with(self, values: Mapping[str, Any]) -> list[str]:
        return [] if self._position is None else self._position.problems_with(values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._position is not None:
            self._position.load_state_dict(state_dict)
        elif state_dict["loader"].value is not None:
            self.loader.load_state_dict(state_dict["loader"].value)


__all__ = ["DataPosition", "LoaderPosition"]
