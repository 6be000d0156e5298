"""The stored names that a load sees, and what it calls them: ``only``, ``skip`` and ``rename``."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from ray_dcp.errors import ConfigError, StateDictError
from ray_dcp.wording import joined

Rename = Mapping[str, str] | Callable[[str], str]
"""{regular expression: replacement}, each applied in order as by ``re.sub``; or a function (stored name) -> name."""


class NameChoice:
    """The names that the caller of a load asked for, checked.

    A pattern of ``only`` and ``skip`` is a name, the first parts of names (``model`` also means ``model.norm.weight``),
    or a shell pattern of a whole name (``*.bias``). They are about names as the template has them, so after ``rename``.
    """

    def __init__(
        self,
        only: str | Collection[str] | None = None,
        skip: str | Collection[str] | None = None,
        rename: Rename | None = None,
    ) -> None:
        """Raises ``ConfigError`` for patterns and renames that are not valid."""
        self.only = _patterns("only", only)
        self.skip = _patterns("skip", skip)
        if only is not None and not self.only:
            raise ConfigError("only", "has no pattern, so nothing would be loaded; leave it out to load everything")
        self._given_rename = rename
        self._rename = _renaming(rename)

    @property
    def is_everything(self) -> bool:
        """Whether all names are taken as they are stored."""
        return not (self.only or self.skip or self._rename)

    @property
    def renames(self) -> bool:
        """Whether the caller gave ``rename``."""
        return self._rename is not None

    def takes(self, fqn: str) -> bool:
        """Whether a name, as the template has it, is to be loaded."""
        return (not self.only or _fits(self.only, fqn)) and not (self.skip and _fits(self.skip, fqn))

    def renamed(self, fqn: str) -> str:
        """What a stored name is called here."""
        return fqn if self._rename is None else self._rename(fqn)

    def unfit_renames(self, stored: Collection[str]) -> list[str]:
        """A line for each rule of ``rename`` that changes none of ``stored``, the names of the checkpoint."""
        rename = self._given_rename
        if isinstance(rename, Mapping):
            unfit = [pattern for pattern in rename if not any(re.search(pattern, name) for name in stored)]
            return [f"rename={pattern!r}: fits no name of the checkpoint" for pattern in unfit]
        if rename is not None and all(self.renamed(name) == name for name in stored):
            return ["rename: changes no name of the checkpoint"]
        return []

    def problems(self, names: Collection[str]) -> list[str]:
        """A line for each pattern that fits none of ``names``, which are those of template and checkpoint."""
        return [
            f"{setting}={pattern!r}: fits no name of the template or the checkpoint"
            for setting, patterns in (("only", self.only), ("skip", self.skip))
            for pattern, compiled in patterns.items()
            if not any(compiled.fullmatch(name) for name in names)
        ]


@dataclass(frozen=True, slots=True)
class SeenNames:
    """A checkpoint as its load sees it."""

    metadata: Metadata
    """The checkpoint's metadata with only the names that are taken, as they are called here."""
    stored: Mapping[str, str] | None
    """The stored name of each of those names; None where all are the same."""

    def stored_plan(self, plan: LoadPlan) -> LoadPlan:
        """``plan``, which is made for these names, with the stored names that a reader knows."""
        stored = self.stored
        if stored is None:
            return plan
        items = []
        for item in plan.items:
            index = item.storage_index
            items.append(replace(item, storage_index=replace(index, fqn=stored.get(index.fqn, index.fqn))))
        return replace(plan, items=items)


def seen_names(metadata: Metadata, choice: NameChoice) -> SeenNames:
    """``metadata`` as ``choice`` has it. Raises ``StateDictError`` where two stored names get one name."""
    if choice.is_everything:
        return SeenNames(metadata, None)
    saved = metadata.state_dict_metadata
    stored: dict[str, str] = {}
    problems: dict[str, list[str]] = {}
    for fqn in saved:
        name = choice.renamed(fqn)
        if not choice.takes(name):
            continue
        if name in stored:
            problems.setdefault(name, [stored[name]]).append(fqn)
        stored[name] = fqn
    if problems:
        raise StateDictError(
            "rename gives several stored names one and the same; nothing was loaded",
            [f"{name}: the name of {joined(map(repr, names))}" for name, names in sorted(problems.items())],
        )
    seen = copy.copy(metadata)
    seen.state_dict_metadata = {name: saved[fqn] for name, fqn in stored.items()}
    if isinstance(metadata.planner_data, Mapping):
        paths: Mapping[Any, Any] = metadata.planner_data
        seen.planner_data = {name: paths[fqn] for name, fqn in stored.items() if fqn in paths}
    return SeenNames(seen, stored)


def _fits(patterns: Mapping[str, re.Pattern[str]], fqn: str) -> bool:
    return any(compiled.fullmatch(fqn) for compiled in patterns.values())


def _patterns(setting: str, patterns: str | Collection[str] | None) -> dict[str, re.Pattern[str]]:
    if not isinstance(patterns, str | Collection | None) or isinstance(patterns, bytes):
        raise ConfigError(setting, f"is a name, or several in a list, not {patterns!r}")
    listed = [patterns] if isinstance(patterns, str) else list(patterns or ())
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(setting, f"{pattern!r} is neither a name nor a pattern of names")
    return {pattern: _compiled(pattern) for pattern in listed}


def _compiled(pattern: str) -> re.Pattern[str]:
    if any(sign in pattern for sign in "*?["):
        return re.compile(fnmatch.translate(pattern))
    return re.compile(rf"{re.escape(pattern.rstrip('.'))}(\..*)?", re.DOTALL)


def _renaming(rename: Rename | None) -> Callable[[str], str] | None:
    if rename is None:
        return None
    if callable(rename):
        return lambda fqn: _as_name(rename, fqn)
    if not isinstance(rename, Mapping):
        raise ConfigError(
            "rename", f"is a {type(rename).__name__}; pass {{regular expression: replacement}} or a function"
        )
    try:
        rules = [(re.compile(pattern), replacement) for pattern, replacement in rename.items()]
        for compiled, replacement in rules:
            compiled.sub(replacement, "")
    except (re.error, TypeError) as error:
        raise ConfigError("rename", f"{error}; pass {{regular expression: replacement}}") from error

    def by_rules(fqn: str) -> str:
        for compiled, replacement in rules:
            fqn = compiled.sub(replacement, fqn)
        return fqn

    return by_rules


def matched_names(seen: SeenNames, metadata: Metadata, choice: NameChoice, flat: Mapping[str, Any]) -> SeenNames:
    """``seen`` with its names below the one key of the template ``flat``, as in ``{"model": model}``, where that fits.

    It does where more names of the template are found without that key: files of Hugging Face have no name for the
    model. Else ``seen`` is returned as it is.
    """
    tops = {fqn.partition(".")[0] for fqn in flat}
    prefix = f"{next(iter(tops))}." if len(tops) == 1 else ""
    saved = metadata.state_dict_metadata
    without = sum(fqn.removeprefix(prefix) in saved for fqn in flat if fqn.startswith(prefix))
    if prefix and not choice.renames and without > sum(fqn in seen.metadata.state_dict_metadata for fqn in flat):
        seen = seen_names(metadata, NameChoice(list(choice.only) or None, list(choice.skip), lambda fqn: prefix + fqn))
    return seen


def _as_name(rename: Callable[[str], str], fqn: str) -> str:
    name = rename(fqn)
    if not isinstance(name, str):
        raise ConfigError("rename", f"gives {name!r} for {fqn!r}, which is not a name")
    return name


EVERYTHING = NameChoice()

__all__ = ["EVERYTHING", "NameChoice", "Rename", "SeenNames", "matched_names", "seen_names"]
