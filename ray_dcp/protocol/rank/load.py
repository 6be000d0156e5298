"""A rank's half of a load::

    ==open==> checkpoint -> template -> local plan + check ==plan==> final plan -> read ==read==> restore ==restore==>

Everything that may be wrong with the template is found before ``==plan==`` is answered, so before a byte is copied.
Tensors are filled in place while reading; Python values are put in place, and ``load_state_dict`` is called, only when
every rank has all its bytes. Where no rank has anything of the kind, nothing can fail any more: ``==restore==`` is left
out. ``steps.LoadSteps`` plan and read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.errors import ConfigError, StateDictError, without_keys
from ray_dcp.gc_pause import collector_paused, collector_resumed
from ray_dcp.planning.per_rank import PerRankTemplate
from ray_dcp.planning.template.comparison import TemplateCheck, asking_nothing
from ray_dcp.planning.template.stored_names import EVERYTHING, NameChoice, SeenNames, matched_names, seen_names
from ray_dcp.planning.template.template_hook import template_of
from ray_dcp.planning.values.collect import CollectedTemplate
from ray_dcp.planning.values.flat import flat_state
from ray_dcp.protocol.call import Call, agree, phase
from ray_dcp.protocol.messages import OPEN, PLAN_LOAD, READ, RESTORE, OpenPart
from ray_dcp.protocol.rank.report import LoadReport
from ray_dcp.protocol.steps import LoadSteps
from ray_dcp.settings import Phase
from ray_dcp.trace_points import Point, reached

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What the user asks of this rank."""

    state_dict: dict[str, Any]
    checkpoint_id: str
    steps: LoadSteps
    """Who plans and reads it."""
    strict: bool | str
    choice: NameChoice = EVERYTHING
    """Which names are loaded, and what stored names are called."""


@dataclass(frozen=True, slots=True)
class _Template:
    """The state dict to fill, with ``Stateful`` objects asked for theirs."""

    collected: CollectedTemplate
    per_rank: PerRankTemplate

    @property
    def values(self) -> dict[str, Any]:
        return self.collected.values


@collector_paused()  # at its end nearly all that was made is gone, and nothing is left to be walked
def load(request: LoadRequest, call: Call) -> LoadReport:
    """Fill this rank's template; returns when every rank has all of its state.

    Raises ``CheckpointException``. A template that does not fit is untouched.
    """
    steps = request.steps
    metadata = _open(request, steps, call)
    template, seen = _template(request, metadata, steps, call)
    with phase(call, Phase.READ), template.per_rank.expanded(seen.metadata.state_dict_metadata), torch.no_grad():
        try:
            _plan(request, template, metadata, seen, steps, call)
            steps.read()
        finally:
            steps.leave()
        may_fail = steps.may_fail_to_put or _runs_code(request, template)
        together = call.exchange(READ, may_fail)
        steps.put()
    _restore(request, template, steps, call, together=together)
    report = LoadReport(request.checkpoint_id, *steps.names, *steps.nbytes, steps.nbytes_by_place)
    _log_places(report, call)
    return report


def _log_places(report: LoadReport, call: Call) -> None:
    """Say where the bytes came from, where not all are from storage."""
    if len(report.nbytes_by_place) > 1:
        of_places = ", ".join(f"{nbytes} B from {place}" for place, nbytes in sorted(report.nbytes_by_place.items()))
        logger.info("%s: rank %d has read %s", without_keys(report.checkpoint_id), call.rank, of_places)


def _open(request: LoadRequest, steps: LoadSteps, call: Call) -> Metadata:
    """The checkpoint's metadata: read once for all ranks, or by a user's reader as it does under torch."""
    with phase(call, Phase.OPEN):
        if request.strict not in (True, False, "exact"):
            raise ConfigError("strict", f'{request.strict!r} is none of True, False and "exact"')
        opened = call.exchange(OPEN, OpenPart(request.checkpoint_id, steps.opened_for_all, steps.from_memory))
        metadata = steps.open(opened)
        reached(Point.AFTER_OPEN)
    return metadata


def _template(request: LoadRequest, metadata: Metadata, steps: LoadSteps, call: Call) -> tuple[_Template, SeenNames]:
    """What is to be filled, and the stored names as it has them.

    Files of other libraries name the same tensors otherwise; checkpoints of ours are taken at their word.
    """
    with phase(call, Phase.PLAN):
        seen = seen_names(metadata, request.choice)
    with phase(call, Phase.COLLECT):
        if not isinstance(request.state_dict, dict):
            raise StateDictError(f"state_dict is a {type(request.state_dict).__name__}; pass the dict to fill")

        def ask(stateful: Stateful, fqn: str) -> Any:
            with collector_resumed():
                return template_of(stateful, fqn, seen.metadata)

        collected = CollectedTemplate(request.state_dict, ask=ask)
        template = _Template(collected, PerRankTemplate(collected.values, call.rank, call.world_size))
    if not steps.of_other_libraries:
        return template, seen
    with phase(call, Phase.PLAN):
        return template, matched_names(seen, metadata, request.choice, flat_state(template.values)[0])


def _plan(
    request: LoadRequest, template: _Template, metadata: Metadata, seen: SeenNames, steps: LoadSteps, call: Call
) -> None:
    """Agree with all ranks on who reads what, all templates checked."""
    with phase(call, Phase.PLAN):
        steps.plan(template.collected, metadata, seen)
        check = steps.check(strict=bool(request.strict))
        if check is not None and not request.state_dict:
            check = asking_nothing(check, metadata.state_dict_metadata)
        problems = _unfit_patterns(request, metadata, template)
        problems += _unfit_renames(request, metadata, check)
        problems += template.per_rank.problems(seen.metadata.state_dict_metadata)
        part = steps.part(check, problems, request.strict)
        answer = agree(call, PLAN_LOAD, part, steps.asked)
        steps.finish_plan(answer)


def _unfit_patterns(request: LoadRequest, metadata: Metadata, template: _Template) -> list[str]:
    """A line for each pattern of ``only`` and ``skip`` that says nothing about this load."""
    choice = request.choice
    if not (choice.only or choice.skip):
        return []
    names = set(map(choice.renamed, metadata.state_dict_metadata)) | flat_state(template.values)[0].keys()
    return choice.problems(names)


def _unfit_renames(request: LoadRequest, metadata: Metadata, check: TemplateCheck | None) -> list[str]:
    """A line for each rule of ``rename`` that fits nothing, where names are lacking for that; else all may be well."""
    if check is None or not (check.problems or check.lacking):
        return []
    unfit = request.choice.unfit_renames(metadata.state_dict_metadata.keys())
    if not request.strict and not check.problems:
        for line in unfit:
            logger.warning("%s", line)
        return []
    return unfit


def _runs_code(request: LoadRequest, template: _Template) -> bool:
    """Whether something of the template's own may go wrong when all is read."""
    return type(request.state_dict) not in (dict, OrderedDict) or template.collected.runs_code


def _restore(request: LoadRequest, template: _Template, steps: LoadSteps, call: Call, *, together: bool) -> None:
    """Put everything in place; ``together``, return when all ranks have."""
    with phase(call, Phase.RESTORE):
        reached(Point.BEFORE_RESTORE)
        with collector_resumed() if template.collected.runs_code else nullcontext():
            template.collected.restore(lambda fqn: request.choice.takes(fqn) or steps.asks_below(fqn), steps.on_meta)
        reached(Point.AFTER_RESTORE)
        if together:
            call.exchange(RESTORE, None)
