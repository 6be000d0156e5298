"""Checks, before a load fills anything, whether it can put values where its template has them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ray_dcp.planning.values.flat import Path

_PLAIN_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list))


def assign_problem(container: Any, key: Any) -> str | None:
    """The reason why nothing can be assigned to ``container[key]``; None where something can.

    A container of another class than Python's own is tried: it is assigned what it has there already, if anything.
    """
    kind = type(container)
    if kind in _PLAIN_CONTAINERS:
        return None
    change = f"; use a {'list' if isinstance(container, list) else 'dict'}, or leave it out with skip="
    if not hasattr(kind, "__setitem__"):
        return f"lies in a {kind.__name__}, which cannot be changed{change}"
    try:
        if isinstance(container, list) or key in container:
            container[key] = container[key]
    except Exception as error:  # noqa: BLE001 - a class of the user's may raise anything
        return f"lies in a {kind.__name__}, which refuses an assignment ({error!r}){change}"
    return None


def growth_problem(container: Any) -> str | None:
    """The reason why nothing can be added to an empty mapping or list; None where something can."""
    kind = type(container)
    if kind in _PLAIN_CONTAINERS:
        return None
    if not hasattr(kind, "extend" if isinstance(container, list) else "update"):
        return f"is a {kind.__name__}, which cannot be filled; use a dict, or leave it out with skip="
    try:
        container.extend(()) if isinstance(container, list) else container.update({})
    except Exception as error:  # noqa: BLE001 - as above
        return f"is a {kind.__name__}, which cannot be filled ({error!r}); use a dict, or leave it out with skip="
    return None


class Assignments:
    """The containers that one load puts values into.

    ``originals`` maps the id of a copy to the user's own container.
    """

    def __init__(self, template: Any, originals: Mapping[int, Any]) -> None:
        self._template = template
        self._originals = originals
        self._containers: dict[Path, Any] = {(): template}
        self._seen: dict[int, str | None] = {}

    def problems(self, paths: Mapping[str, Path], names: Iterable[str]) -> list[str]:
        """A line for each of the values ``names`` that cannot be put at its path."""
        found = []
        for fqn in names:
            path = paths.get(fqn)
            problem = self.problem(self._container(path[:-1]), path[-1]) if path else None
            if problem is not None:
                found.append(f"{fqn}: {problem}")
        return found

    def problem(self, container: Any, key: Any) -> str | None:
        """Like ``assign_problem``, for a container of the template and the one that it is a copy of; asks each once."""
        for one in (container, self._originals.get(id(container))):
            if one is None or type(one) in _PLAIN_CONTAINERS:
                continue
            if id(one) not in self._seen:
                self._seen[id(one)] = assign_problem(one, own_key(one, key))
            if self._seen[id(one)] is not None:
                return self._seen[id(one)]
        return None

    def _container(self, path: Path) -> Any:
        found = self._containers.get(path)
        if found is None:
            above = self._container(path[:-1])
            found = self._containers[path] = above[own_key(above, path[-1])]
        return found


def own_key(container: Any, part: str | int) -> Any:
    """The key of ``container`` that ``part`` of a path names: a path has the keys of mappings as text."""
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)
