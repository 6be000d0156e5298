"""Compares a template with a checkpoint, name by name, and says what to tell whoever asked for too much."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.planning.per_rank import per_rank_base, per_rank_world_sizes
from ray_dcp.planning.template.near_names import nearest, other_prefix
from ray_dcp.planning.template.template_memory import is_meta
from ray_dcp.wording import joined

_MAX_NAMED_PARTS = 5
"""Most names of each side in a message that shows what both have."""


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """How a rank's template compares with a checkpoint. All lists are sorted.

    Missing and unexpected values of a ``PerRank`` go by its name, not by that of one rank's value.
    """

    wanted: tuple[str, ...]
    """Names that are in both."""
    missing: tuple[str, ...]
    """Names that the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """Names that this rank's template lacks."""
    problems: tuple[str, ...]
    """One line for each shape, kind or dtype that differs, and each region that no stored chunk covers."""
    lacking: tuple[str, ...] = ()
    """A line for each name that the checkpoint lacks, for the case that this is refused."""
    advice: str = ""
    """What may have been meant by the missing names; empty where nothing comes near."""
    finds: bool = True
    """Whether the checkpoint has any of the template's names; True also for a template that asks for nothing."""


ASKS_NOTHING = "The state dict that was passed is empty, so nothing is asked for"
"""The begin of the advice for a rank that asks for nothing, as it may while others load."""


def asking_nothing(check: TemplateCheck, names: Iterable[str]) -> TemplateCheck:
    """``check``, made for an empty template, with advice; the checkpoint has values under ``names``."""
    tops = sorted({name.partition(".")[0] for name in names})
    if not tops:
        return check
    shown = ", ".join(f"{top!r}: {{}}" for top in tops[:_MAX_NAMED_PARTS]) + (
        ", ..." if len(tops) > _MAX_NAMED_PARTS else ""
    )
    return replace(check, finds=False, advice=f"{ASKS_NOTHING}: pass a template, such as {{{shown}}}, to be filled")


def without_names(check: TemplateCheck | None) -> TemplateCheck | None:
    """``check`` as the coordinator needs it: without the names that are in both."""
    return None if check is None else replace(check, wanted=())


def compare(
    template: Mapping[str, Any],
    metadata: Metadata,
    problems: Collection[str],
    *,
    tied: Collection[str],
    empty: Collection[str],
    knows_empty: bool,
    strict: bool,
) -> TemplateCheck:
    """Compare ``template``, by names and with what is filled in empty places, with a checkpoint.

    ``problems`` are those found so far, ``tied`` the names of tensors that are filled under another name, and ``empty``
    the places that stay empty; these count as missing only where the checkpoint tells which places were empty
    (``knows_empty``). Names that come near are looked for only where missing ones are refused (``strict``) or where
    nothing at all is found.
    """
    saved = metadata.state_dict_metadata
    wanted = (template.keys() & saved.keys()).union(tied)
    world_sizes = per_rank_world_sizes(saved.keys() - template.keys())
    missing: set[str] = set(empty) if knows_empty else set()
    found = list(problems)
    lacking = template.keys() - wanted
    for fqn in lacking:
        base = per_rank_base(fqn)
        value = template[fqn]
        if base is not None and base in saved:
            found.append(
                f"{base}: the checkpoint holds one value for all ranks, the template a PerRank: pass the value"
            )
        elif fqn in world_sizes:
            found.append(
                f"{fqn}: the checkpoint holds a value of each of {world_sizes[fqn]} ranks, the template one for all: "
                "pass a PerRank"
            )
        else:
            missing.add(base or fqn)
            if isinstance(value, torch.Tensor) and is_meta(value):
                found.append(
                    f"{fqn}: Missing key: not in the checkpoint, and a meta tensor has no value to keep; "
                    "give it memory, or leave it out with skip="
                )
    of_ranks = {base for fqn in template if ".__rank_" in fqn and (base := per_rank_base(fqn)) is not None}
    unexpected = {per_rank_base(fqn) or fqn for fqn in saved.keys() - template.keys()} - of_ranks
    finds = bool(wanted) or not (missing or empty) or not saved
    advice, near = "", dict[str, str]()
    if (missing and strict) or not finds:
        advice, near = _advice(missing | set(empty), unexpected, nothing_found=not finds)
    told = [line.partition(":")[0] for line in found]
    return TemplateCheck(
        wanted=tuple(sorted(wanted)),
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        problems=tuple(sorted(found)),
        lacking=tuple(
            _of_ranks(fqn, world_sizes) or _line(fqn, near, advice) for fqn in sorted(missing.difference(told))
        ),
        advice=advice,
        finds=finds,
    )


def _of_ranks(fqn: str, world_sizes: Mapping[str, int]) -> str:
    """The line for an empty place whose values were saved by another number of ranks, one each; else an empty text."""
    base = next((base for base in sorted(world_sizes) if base.startswith(f"{fqn}.")), None)
    if base is None:
        return ""
    return (
        f"{fqn}: Missing key: {base} has a value of each of {world_sizes[base]} ranks, and none for this number: "
        "pass PerRank(..., reshard=function(values, rank, world_size)) there"
    )


def _line(fqn: str, near: Mapping[str, str], advice: str) -> str:
    line = f"{fqn}: Missing key: not in the checkpoint"
    if fqn in near:
        return f"{line}; did you mean {near[fqn]!r}?"
    return line if advice else f"{line} (strict=False loads the rest)"


def _advice(missing: Collection[str], others: Collection[str], *, nothing_found: bool) -> tuple[str, dict[str, str]]:
    """What to tell of all missing names together, and the nearest name for some of them."""
    prefix = other_prefix(missing, others)
    if prefix is not None:
        found = f"{prefix.num_found} of {len(missing)} missing names are in the checkpoint"
        alike = [fqn for fqn in others if fqn.startswith(prefix.stored)]
        return f"{found} with another beginning: did you mean {prefix}? {_both(missing, alike)}", {}
    near = nearest(missing, others)
    if nothing_found:
        return f"No name of the template is in it. {_both(missing, others)}", near
    return "", near


def _both(missing: Collection[str], others: Collection[str]) -> str:
    here, there = (joined(map(repr, sorted(names)), most=_MAX_NAMED_PARTS) for names in (missing, others))
    return f"The template has {here}; the checkpoint {there or 'nothing else'}"


__all__ = ["TemplateCheck", "compare", "without_names"]
