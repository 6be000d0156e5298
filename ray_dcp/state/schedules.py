"""The state of learning-rate schedules, whose lists follow the order of their optimizer's groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray_dcp.wording import joined

_BY_GROUP = frozenset(
    ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_initial_lrs")
)
"""Lists in torch's schedules that have an entry for each group."""


def in_group_order(
    state: Mapping[str, Any], current: Mapping[str, Any], sources: Sequence[int | None], num_saved: int
) -> dict[str, Any]:
    """``state`` for an optimizer whose group i was group ``sources[i]`` of ``num_saved`` when it was saved.

    A group that was not there (None) keeps what ``current`` says.
    """
    if list(sources) == list(range(num_saved)):
        return dict(state)
    changed: dict[str, Any] = {}
    for key, value in state.items():
        mine = current.get(key)
        if key == "_schedulers" and isinstance(mine, list) and len(mine) == len(value):
            changed[key] = [
                in_group_order(part, own, sources, num_saved) for part, own in zip(value, mine, strict=True)
            ]
        elif key in _BY_GROUP and _one_each(value, num_saved) and _one_each(mine, len(sources)):
            assert isinstance(mine, list | tuple)
            changed[key] = [mine[i] if source is None else value[source] for i, source in enumerate(sources)]
        else:
            changed[key] = value
    return changed


def of_another_class(schedule: Any, stored: Collection[str]) -> list[str]:
    """A line where a schedule of another class has saved the keys ``stored``, as far as they tell.

    Keys that begin with an underscore tell little: they come and go with versions of torch.
    """
    own, held = set(filter(_tells, schedule.state_dict())), set(filter(_tells, stored))
    lacking, unknown = sorted(own - held), sorted(held - own)
    if not (lacking and unknown):
        return []
    return [
        f"was saved by another schedule than this {type(schedule).__name__}: it has {joined(unknown)}, and no "
        f'{joined(lacking)}. Make the same one, or leave it out (skip="...scheduler")'
    ]


def _tells(key: str) -> bool:
    return key in ("_schedulers", "_milestones") or (key != "verbose" and not key.startswith("_"))


def _one_each(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


__all__ = ["in_group_order", "of_another_class"]
