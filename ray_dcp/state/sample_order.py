"""The order in which samples are seen, and which rank sees which: arithmetic alone.

All epochs together are one stream of places: place p is sample p % num_samples of epoch p // num_samples. A step takes
the next places of the stream and shares them out to the ranks in order, so what has been consumed is one number,
whoever consumed it. That is why any number of ranks, with batches of any size, can go on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ray_dcp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the samples of each step are shared out to the ranks."""

    num_samples: int
    """Number of samples in an epoch."""
    batch_size: int
    """Number of samples in a step of one rank."""
    world_size: int
    drop_last: bool
    """Whether the last samples of an epoch are left out where they do not fill a step."""

    def require_possible(self) -> None:
        """Raise ``ConfigError`` where an epoch is too small: it must give every rank a sample, or fill one step."""
        needed = self.step_size if self.drop_last else self.world_size
        if self.num_samples < needed:
            what = "to fill one batch of each" if self.drop_last else "for each to get one"
            raise ConfigError(
                "num_samples", f"{self.num_samples} are too few {what} of {self.world_size} ranks: {needed} are needed"
            )

    @property
    def step_size(self) -> int:
        """Number of samples in a full step of all ranks."""
        return self.batch_size * self.world_size

    def settled(self, place: int) -> int:
        """The place where a stream that is at ``place`` goes on: it skips the end of an epoch if that is dropped."""
        left = self.num_samples - place % self.num_samples
        return place + left if self.drop_last and left < self.step_size else place

    def steps(self, place: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each step from ``place`` to the end of the epoch; ``stop`` is exclusive.

        The last step has what is left. Samples too few to give each rank one are added to the step before: batches have
        at most one sample more than ``batch_size``. If only such a rest is left at ``place``, the steps go on through
        the next epoch. With ``drop_last`` all steps are full, and the rest is left out.
        """
        place = self.settled(place)
        end = self._end_of_epoch(place)
        while place < end:
            stop = place + self.step_size
            if self.drop_last:
                if stop > end:
                    return
            elif end - stop < self.world_size:
                stop = end
            yield place, stop
            place = stop

    def num_steps(self, place: int) -> int:
        """Number of the steps that ``steps`` yields."""
        place = self.settled(place)
        left = self._end_of_epoch(place) - place
        full, rest = divmod(left, self.step_size)
        return full + (0 if self.drop_last or (full and rest < self.world_size) else rest > 0)

    def share(self, start: int, stop: int, rank: int) -> tuple[int, int]:
        """(start, stop) of ``rank``'s places in a step; ``stop`` is exclusive.

        They are neighbours, shared out as evenly as can be: the lowest ranks get one more.
        """
        even, more = divmod(stop - start, self.world_size)
        first = start + rank * even + min(rank, more)
        return first, first + even + (rank < more)

    def _end_of_epoch(self, place: int) -> int:
        left = self.num_samples - place % self.num_samples
        # Not enough for all ranks: what is left is joined to the next epoch.
        return place + left + (self.num_samples if left < self.world_size else 0)


class SampleOrder:
    """The sample at each place of the stream: shuffled anew in each epoch, by ``seed`` and the epoch alone.

    The shuffle is ``torch.randperm``'s. It takes 8 bytes for each sample, for the epoch at hand.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def samples(self, start: int, stop: int) -> list[int]:
        """The samples at the places from ``start`` to ``stop``, exclusive."""
        found: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self._num_samples)
            last = min(self._num_samples, first + stop - start)
            found += self._of_epoch(epoch, first, last)
            start += last - first
        return found

    def _of_epoch(self, epoch: int, first: int, last: int) -> Sequence[int]:
        if not self._shuffle:
            return range(first, last)
        if epoch != self._epoch:
            random = torch.Generator().manual_seed((self._seed * 2**32 + epoch) % 2**63)
            self._permutation = torch.randperm(self._num_samples, generator=random)
            self._epoch = epoch
        listed: list[int] = self._permutation[first:last].tolist()
        return listed


__all__ = ["SampleOrder", "Sharing"]
