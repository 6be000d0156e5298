"""Real rank actors that tests share: starting one costs seconds, so they outlive the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from tests.slack import within


@ray.remote(num_cpus=0.1, max_concurrency=2)
class RankActor:
    """A process that is rank r of n of whatever group a test needs."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.groups: dict[tuple[str, int, int], Any] = {}

    def run(self, rank: int, world_size: int, name: str, on_rank: Callable[..., Any], *args: Any) -> Any:
        """``on_rank(rank, world_size, *args)`` within the group; what it raises comes back as the result."""
        import ray_dcp as dcp

        try:
            key = (name, rank, world_size)
            if key not in self.groups:
                self.groups[key] = dcp.RankGroup.join(name, rank=rank, world_size=world_size, timeout_s=within(120))
            with self.groups[key]:
                return on_rank(rank, world_size, *args)
        except Exception as error:
            return error

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, in no group of ours; what it raises comes back as the result."""
        try:
            return function(*args)
        except Exception as error:
            return error

    def leave(self, name: str) -> None:
        """Close the groups of this name."""
        for key in [key for key in self.groups if key[0] == name]:
            self.groups.pop(key).close()

    def close(self) -> None:
        for group in self.groups.values():
            group.close()
        self.groups.clear()


class SharedRanks:
    """Rank actors by number, started when first needed; dead ones are replaced."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._num_buried = 0

    def actors(self, count: int) -> list[Any]:
        while len(self._actors) < count:
            self._actors.append(RankActor.remote())
        return self._actors[:count]

    def run(self, world_size: int, on_rank: Callable[..., Any], *args: Any, name: str | None = None) -> list[Any]:
        """Outcome on each rank, in rank order: what ``on_rank(rank, world_size, *args)`` returned or raised."""
        group = name or self.group_name(world_size)
        calls = [
            actor.run.remote(rank, world_size, group, on_rank, *args)
            for rank, actor in enumerate(self.actors(world_size))
        ]
        return ray.get(calls, timeout=within(180))

    def group_name(self, world_size: int) -> str:
        """Of the group in which ``run`` has so many, where the test names none."""
        return f"shared-{world_size}" + (f"-again-{self._num_buried}" if self._num_buried else "")

    def bury(self, *dead: Any) -> None:
        """Forget actors that a test has killed. All others stay, and gather in other groups from now on."""
        self._actors = [actor for actor in self._actors if actor not in dead]
        self._num_buried += len(dead)

    def ok(self, world_size: int, on_rank: Callable[..., Any], *args: Any, name: str | None = None) -> list[Any]:
        """As ``run``; raises the first error of a rank."""
        outcomes = self.run(world_size, on_rank, *args, name=name)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def forget(self) -> None:
        """Stop all actors, for a test that has spoiled some."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
