"""The template that a ``Stateful`` gives: its own state, or one made to measure for the checkpoint.

The state of an optimizer that has never stepped is empty, so nothing would be asked for; that of a run of another size
has other names. A ``Stateful`` that can say more once it knows what is stored has one more method, ``template_for``;
one that would refuse some of it says so in ``problems_with``, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

T = TypeVar("T")
Saved = Mapping[str, STORAGE_TYPES]
"""What is stored below the name of a ``Stateful``, by the rest of the name."""


@runtime_checkable
class FitsCheckpoint(Protocol):
    """A ``Stateful`` whose template depends on what the checkpoint holds."""

    def template_for(self, saved: Saved) -> dict[str, Any]:
        """The state dict to fill; called once a load on each rank, before any plan, in place of ``state_dict()``.

        ``saved`` has every stored name that begins with this object's own name and a dot, without that begin. What is
        returned is filled and handed to ``load_state_dict``; names in it that ``saved`` lacks count as missing. The
        method must change nothing: the load may still be refused.
        """
        ...


@runtime_checkable
class ChecksValues(Protocol):
    """A ``Stateful`` that can tell, before anything is filled, what its ``load_state_dict`` would refuse."""

    def problems_with(self, values: Mapping[str, Any]) -> list[str]:
        """A line for each thing that is wrong with what is stored; called once a load on each rank, before any tensor.

        ``values`` are the Python values that were read for this object, decoded, by the rest of their names. The method
        must change nothing.
        """
        ...


def value_problems(statefuls: Iterable[tuple[str, Any]], decoded: Mapping[str, Any]) -> list[str]:
    """A line for each problem that one of ``statefuls`` has with its values in ``decoded``, which has whole names."""
    return [
        f"{fqn}: {problem}"
        for fqn, stateful in statefuls
        if isinstance(stateful, ChecksValues)
        for problem in stateful.problems_with(saved_below(decoded, fqn))
    ]


def template_of(stateful: Any, fqn: str, metadata: Metadata) -> Any:
    """The template that the ``Stateful`` under the name ``fqn`` gives for this checkpoint."""
    return template_of_saved(stateful, fqn, metadata.state_dict_metadata)


def template_of_saved(stateful: Any, fqn: str, saved: Saved) -> Any:
    """Like ``template_of``, for a ``Stateful`` within another one that was given the names ``saved``."""
    if isinstance(stateful, FitsCheckpoint):
        return stateful.template_for(saved_below(saved, fqn))
    return stateful.state_dict()


def saved_below(saved: Mapping[str, T], fqn: str) -> dict[str, T]:
    """The entries of ``saved`` whose names begin with ``fqn`` and a dot, by the rest of the name."""
    prefix = f"{fqn}."
    return {name[len(prefix) :]: value for name, value in saved.items() if name.startswith(prefix)}


__all__ = [
    "ChecksValues",
    "FitsCheckpoint",
    "Saved",
    "saved_below",
    "template_of",
    "template_of_saved",
    "value_problems",
]
