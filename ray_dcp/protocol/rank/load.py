"""A rank's half of a load::

    ==open==> checkpoint -> template -> local plan + check ==plan==> final plan -> read ==read==> restore ==restore==>

Everything that may be wrong with the template is found before ``==plan==`` is answered, so before a byte is copied.
Tensors are filled in place while reading; Python values are put in place, and ``load_state_dict`` is called, only when
every rank has all its bytes. Where no rank has anything of the kind, nothing can fail any more: ``==restore==`` is left
out.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from ray_dcp.errors import ConfigError, StateDictError, without_keys
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.gc_pause import collector_paused, collector_resumed
from ray_dcp.planning.node_sharing import ShareOffer
from ray_dcp.planning.per_rank import PerRankTemplate, per_rank_fqn
from ray_dcp.planning.template.comparison import TemplateCheck, asking_nothing, without_names
from ray_dcp.planning.template.optimizer_check import optimizer_problems
from ray_dcp.planning.template.stored_names import EVERYTHING, NameChoice, SeenNames, matched_names, seen_names
from ray_dcp.planning.template.template_hook import template_of, value_problems
from ray_dcp.planning.template.template_planner import TemplatePlanner
from ray_dcp.planning.values.collect import CollectedTemplate
from ray_dcp.planning.values.flat import flat_state
from ray_dcp.protocol.coordinator.load_session import (
    NO_GLOBAL_STEP,
    LoadContribution,
    OpenContribution,
    SendPlans,
    plan_load_globally,
)
from ray_dcp.protocol.coordinator.session import OnRankZero
from ray_dcp.protocol.rank.call import Call, phase
from ray_dcp.protocol.rank.plugin_set_up import accepted
from ray_dcp.protocol.rank.python_values import PythonValues, reads_parts
from ray_dcp.protocol.rank.shared_values import differing_values
from ray_dcp.protocol.replica_warnings import warn_of_loading_differing
from ray_dcp.reads.checkpoint import OpenedCheckpoint
from ray_dcp.reads.reader import StoreReader
from ray_dcp.trace_points import Point, reached
from ray_dcp.wording import MAX_LISTED

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What a load did on this rank. Lists of names are sorted."""

    checkpoint_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Names of the template that the checkpoint lacks; they kept their values."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that no rank's template has."""
    nbytes_read: int
    """From storage, by this rank."""
    nbytes_loaded: int
    """Into this rank's template."""

    def __repr__(self) -> str:
        """With the first names of each list and a count: a model has thousands."""
        named = ", ".join(f"{name}={_few(getattr(self, name))}" for name in ("loaded", "missing", "unexpected"))
        place = without_keys(self.checkpoint_id)
        return (
            f"LoadReport(checkpoint_id={place!r}, {named}, "
            f"nbytes_read={self.nbytes_read}, nbytes_loaded={self.nbytes_loaded})"
        )


def _few(names: Sequence[str]) -> str:
    """As Python writes a tuple, the first names only."""
    shown = ", ".join(map(repr, names[:MAX_LISTED]))
    rest = len(names) - MAX_LISTED
    return f"({shown}{f', ... {rest} more' if rest > 0 else ',' if len(names) == 1 else ''})"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What the user asks of this rank."""

    state_dict: dict[str, Any]
    checkpoint_id: str
    reader: StorageReader
    planner: LoadPlanner
    strict: bool | str
    trusted: bool
    share_reads: bool = True
    """Whether ranks of one node may read for each other."""
    choice: NameChoice = EVERYTHING
    """Which names, and what they are called."""


@dataclass(frozen=True, slots=True)
class _Template:
    """The state dict to fill, with ``Stateful`` objects asked for theirs."""

    collected: CollectedTemplate
    per_rank: PerRankTemplate

    @property
    def values(self) -> dict[str, Any]:
        return self.collected.values


@dataclass(frozen=True, slots=True)
class _PlannedLoad:
    plan: LoadPlan
    """What is still to be read."""
    python: PythonValues
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def default_load_planner(
    planner: LoadPlanner | None, *, cast: bool, trusted: bool, checkpoint_id: str, choice: NameChoice = EVERYTHING
) -> LoadPlanner:
    """The planner to use: the user's own, or ray_dcp's in place of torch's plain default."""

    def load_python(content: io.BytesIO, fqn: str) -> Any:
        file = getattr(content, "name", checkpoint_id)
        return decode_python(content, file=file, fqn=fqn, trusted=trusted)

    if planner is None:
        return TemplatePlanner(load_python=load_python, cast=cast, choice=choice)
    if type(planner) is DefaultLoadPlanner:
        return TemplatePlanner(
            load_python=load_python,
            cast=cast,
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            stands_for=planner,
            choice=choice,
        )
    if choice.only or choice.skip:
        setting = "only" if choice.only else "skip"
        raise ConfigError(setting, f"a {type(planner).__name__} chooses by itself what is loaded; pass no planner")
    return planner


def load(request: LoadRequest, call: Call) -> LoadReport:
    """Fill this rank's template; returns when every rank has all of its state.

    Raises ``CheckpointException``. A template that does not fit is untouched.
    """
    with collector_paused():  # at its end nearly all that was made is gone, and nothing is left to be walked
        return _load(request, call)


def _load(request: LoadRequest, call: Call) -> LoadReport:
    metadata = _open(request, call)
    seen = _seen_names(request, metadata, call)
    template = _collect_template(request, seen.metadata, call)
    seen = _matched_names(request, seen, metadata, template, call)
    with phase(call, "read"), template.per_rank.expanded(seen.metadata.state_dict_metadata), torch.no_grad():
        planned = _plan(request, template, metadata, seen, call)
        planned.python.fill(planned.plan)
        runs_code = planned.python.has_any or _runs_code_to_restore(request, template)
        any_restores: bool = call.exchange("read", runs_code)
        planned.python.put()
        if isinstance(request.planner, TemplatePlanner):
            request.planner.put_loaded()
    _restore(request, template, call, together=any_restores)
    return _report(request, planned)


def _open(request: LoadRequest, call: Call) -> Metadata:
    """The checkpoint's metadata: read once for all ranks, or by a user's reader as it does under torch."""
    with phase(call, "open"):
        if request.strict not in (True, False, "exact"):
            raise ConfigError("strict", f'{request.strict!r} is none of True, False and "exact"')
        own_reader = isinstance(request.reader, StoreReader)
        opened: OpenedCheckpoint | None = call.exchange("open", OpenContribution(request.checkpoint_id, own_reader))
        if opened is not None and isinstance(request.reader, StoreReader):
            request.reader.adopt(opened)
        metadata = _read_metadata(request.reader, call.rank)
        reached(Point.AFTER_OPEN)
    return metadata


def _read_metadata(reader: StorageReader, rank: int) -> Metadata:
    """The metadata of all ranks, else what this one has written alone, as torch reads it."""
    try:
        return reader.read_metadata()
    except Exception:
        if isinstance(reader, StoreReader) or "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        with suppress(Exception):
            return reader.read_metadata(rank=rank)
        raise


def _seen_names(request: LoadRequest, metadata: Metadata, call: Call) -> SeenNames:
    with phase(call, "plan"):
        return seen_names(metadata, request.choice)


def _matched_names(
    request: LoadRequest, seen: SeenNames, metadata: Metadata, template: _Template, call: Call
) -> SeenNames:
    """Files of other libraries name the same tensors otherwise; checkpoints of ours are taken at their word."""
    if not isinstance(request.reader, StoreReader) or not request.reader.of_other_libraries:
        return seen
    with phase(call, "plan"):
        return matched_names(seen, metadata, request.choice, flat_state(template.values)[0])


def _collect_template(request: LoadRequest, metadata: Metadata, call: Call) -> _Template:
    with phase(call, "collect"):
        if not isinstance(request.state_dict, dict):
            raise StateDictError(f"state_dict is a {type(request.state_dict).__name__}; pass the dict to fill")

        def ask(stateful: Stateful, fqn: str) -> Any:
            with collector_resumed():
                return template_of(stateful, fqn, metadata)

        collected = CollectedTemplate(request.state_dict, ask=ask)
        return _Template(collected, PerRankTemplate(collected.values, call.rank, call.world_size))


def _plan(request: LoadRequest, template: _Template, metadata: Metadata, seen: SeenNames, call: Call) -> _PlannedLoad:
    """Agree with all ranks on who reads what, all templates checked."""
    with phase(call, "plan"):
        local_plan = _plan_locally(request, template, metadata, seen, call)
        carried = _carried(request, call) if call.rank == 0 else None
        check = _check(request, metadata)
        problems = _unfit_patterns(request, metadata, template)
        problems += _unfit_renames(request, metadata, check)
        problems += template.per_rank.problems(seen.metadata.state_dict_metadata)
        python = PythonValues(
            request.planner,
            request.reader,
            call.progress,
            trusted=request.trusted,
            checkpoint_id=request.checkpoint_id,
        )
        if not problems and not _is_refused(check, request.strict):
            problems += _read_first(request, template, seen, local_plan, python)
        offer = _shared_reads_offer(request, python.rest_of(local_plan), call)
        sent = None if _has_no_global_step(request) else local_plan
        contribution = LoadContribution(sent, without_names(check), request.strict, tuple(problems), carried, offer)
        answer = call.exchange("plan", contribution)
        if isinstance(answer, SendPlans):
            answer = call.exchange("plans", local_plan)
        if isinstance(answer, OnRankZero):
            answer = call.exchange("global plan", _plan_globally_here(request, answer))
        final, unexpected, share = answer
        plan = request.planner.finish_plan(local_plan if final is None else final)
        if isinstance(request.reader, StoreReader):
            request.reader.share_reads(share, call.rank)
            if call.rank == 0 and request.reader.differing:
                wanted = {item.storage_index.fqn for item in plan.items}
                warn_of_loading_differing(
                    [one for one in request.reader.differing if one.fqn in wanted], request.checkpoint_id
                )
    return _planned(plan, python, check, unexpected)


def _is_refused(check: TemplateCheck | None, strict: bool | str) -> bool:
    """Whether this rank's own template is reason enough to refuse the load."""
    return check is not None and bool(check.problems or (check.lacking and strict))


def _read_first(
    request: LoadRequest, template: _Template, seen: SeenNames, plan: LoadPlan, python: PythonValues
) -> list[str]:
    """Read what decides whether all of ``plan`` can be loaded, before anything is; a line for each thing that is wrong.

    Raises what keeps a Python value from being decoded.
    """
    planner, reader = request.planner, request.reader
    if not (_has_no_global_step(request) and reads_parts(reader)):
        return []
    python.read_first(plan)
    if not isinstance(planner, TemplatePlanner):
        return []
    names = seen.metadata.state_dict_metadata
    statefuls = template.collected.statefuls
    problems = optimizer_problems(statefuls, names, python.decoded, strict=bool(request.strict))
    problems += value_problems(statefuls, python.decoded)
    return problems + differing_values(planner.shared_memory(), plan, planner, reader)


def _check(request: LoadRequest, metadata: Metadata) -> TemplateCheck | None:
    planner = request.planner
    if not isinstance(planner, TemplatePlanner):
        return None
    check = planner.check(strict=bool(request.strict))
    return check if request.state_dict else asking_nothing(check, metadata.state_dict_metadata)


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


def _plan_locally(
    request: LoadRequest, template: _Template, metadata: Metadata, seen: SeenNames, call: Call
) -> LoadPlan:
    planner, reader, is_coordinator = request.planner, request.reader, call.rank == 0
    if isinstance(planner, TemplatePlanner):
        planner.rank, planner.world_size = call.rank, call.world_size
        planner.originals = template.collected.originals
    planner.set_up_planner(template.values, seen.metadata, is_coordinator)
    reader.set_up_storage_reader(metadata, is_coordinator, **accepted(reader.set_up_storage_reader, call.rank))
    if isinstance(planner, TemplatePlanner) and isinstance(reader, StoreReader):
        planner.containers = reader.containers
    return reader.prepare_local_plan(seen.stored_plan(planner.create_local_plan()))


def _shared_reads_offer(request: LoadRequest, plan: LoadPlan, call: Call) -> ShareOffer | None:
    """Only where nobody changes the plan or looks at what is read."""
    planner, reader = request.planner, request.reader
    # A subclass may read in its own way, and would then leave the others waiting.
    plain = isinstance(reader, StoreReader) and type(reader).read_data is StoreReader.read_data
    if not request.share_reads or call.world_size == 1 or type(planner) is not TemplatePlanner or not plain:
        return None
    return cast(StoreReader, reader).offer_shared_reads(plan, planner, call.world_size)


def _plan_globally_here(request: LoadRequest, order: OnRankZero) -> Sequence[LoadPlan] | None:
    return None if order.parts is None else plan_load_globally(request.planner, request.reader, order.parts)


def _carried(request: LoadRequest, call: Call) -> Any:
    """Planner and reader for the coordinator, after their local step, as torch's coordinator rank uses them."""
    if _has_no_global_step(request):
        return NO_GLOBAL_STEP
    planner, reader = request.planner, request.reader
    if _plans_alone(planner):
        planner = DefaultLoadPlanner()
    if _reads_alone(reader):
        reader = StoreReader()
    return call.carry(planner, reader)


def _has_no_global_step(request: LoadRequest) -> bool:
    """Most planners and readers have none: torch's default, which leaves every plan as it is."""
    return _plans_alone(request.planner) and _reads_alone(request.reader)


def _plans_alone(planner: LoadPlanner) -> bool:
    return type(planner).create_global_plan is DefaultLoadPlanner.create_global_plan


def _reads_alone(reader: StorageReader) -> bool:
    return type(reader).prepare_global_plan in (StoreReader.prepare_global_plan, FileSystemReader.prepare_global_plan)


def _planned(
    plan: LoadPlan, python: PythonValues, check: TemplateCheck | None, unexpected: tuple[str, ...]
) -> _PlannedLoad:
    rest = python.rest_of(plan)
    if check is None:
        return _PlannedLoad(rest, python, _reported(item.dest_index.fqn for item in plan.items), (), unexpected)
    return _PlannedLoad(rest, python, _reported(check.wanted), check.missing, unexpected)


def _reported(fqns: Iterable[str]) -> tuple[str, ...]:
    """Names as the user knows them: that of a ``PerRank``, not those of the ranks' values in it."""
    return tuple(sorted(set(map(per_rank_fqn, fqns))))


def _runs_code_to_restore(request: LoadRequest, template: _Template) -> bool:
    """Whether something may go wrong here when all is read, apart from Python values that were kept back."""
    # A user's reader hands those over while it reads: then nobody knows whether a ``PerRank`` is to be resharded.
    plain = type(request.state_dict) in (dict, OrderedDict) and isinstance(request.reader, StoreReader)
    return not plain or template.collected.runs_code


def _restore(request: LoadRequest, template: _Template, call: Call, *, together: bool) -> None:
    """Put everything in place; ``together``, return when all ranks have."""
    with phase(call, "restore"):
        reached(Point.BEFORE_RESTORE)
        on_meta = request.planner.on_meta if isinstance(request.planner, TemplatePlanner) else frozenset[str]()
        with collector_resumed() if template.collected.runs_code else nullcontext():
            template.collected.restore(functools.partial(_is_restored, request), on_meta)
        reached(Point.AFTER_RESTORE)
        if together:
            call.exchange("restore", None)


def _is_restored(request: LoadRequest, fqn: str) -> bool:
    """Whether anything of the ``Stateful`` with this name was asked for."""
    if request.choice.takes(fqn) or not isinstance(request.planner, TemplatePlanner):
        return True
    return any(name.startswith(f"{fqn}.") for name in request.planner.state_dict)


def _report(request: LoadRequest, planned: _PlannedLoad) -> LoadReport:
    reader = request.reader
    return LoadReport(
        checkpoint_id=request.checkpoint_id,
        loaded=planned.loaded,
        missing=planned.missing,
        unexpected=planned.unexpected,
        nbytes_read=reader.nbytes_read if isinstance(reader, StoreReader) else 0,
        nbytes_loaded=reader.nbytes_loaded if isinstance(reader, StoreReader) else 0,
    )
