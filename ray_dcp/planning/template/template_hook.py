"""What a ``Stateful`` gives as template: its own state, or one made to measure for the checkpoint.

The state of an optimizer that has never stepped is empty, so nothing would be asked for; that of another size of run
has other names. A ``Stateful`` that can say more once it knows what is stored has one method more, ``template_for``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

Saved = Mapping[str, STORAGE_TYPES]
"""Stored names below a ``Stateful``'s own, and what is stored under each."""


@runtime_checkable
class FitsCheckpoint(Protocol):
    """A ``Stateful`` whose template depends on what the checkpoint holds."""

    def template_for(self, saved: Saved) -> dict[str, Any]:
        """The state dict to fill; called once a load on each rank, before any plan, in place of ``state_dict()``.

        ``saved`` has every stored name that begins with this object's own and a dot, without those. What is returned is
        filled and handed to ``load_state_dict``; names in it that ``saved`` lacks count as missing. It must change
        nothing: the load may still be refused.
        """
        ...


def template_of(stateful: Any, fqn: str, metadata: Metadata) -> Any:
    """The template that the ``Stateful`` under the name ``fqn`` gives for this checkpoint."""
    return template_of_saved(stateful, fqn, metadata.state_dict_metadata)


def template_of_saved(stateful: Any, fqn: str, saved: Saved) -> Any:
    """The same of names that a ``Stateful`` around it was asked with."""
    if isinstance(stateful, FitsCheckpoint):
        return stateful.template_for(saved_below(saved, fqn))
    return stateful.state_dict()


def saved_below(saved: Saved, fqn: str) -> dict[str, STORAGE_TYPES]:
    """What is stored under names that begin with ``fqn`` and a dot, by the rest of the name."""
    prefix = f"{fqn}."
    return {name[len(prefix) :]: value for name, value in saved.items() if name.startswith(prefix)}


__all__ = ["FitsCheckpoint", "Saved", "saved_below", "template_of", "template_of_saved"]
