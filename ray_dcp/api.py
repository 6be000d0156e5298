"""``save``, ``async_save`` and ``load``: DCP's three calls."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import api as torch_api
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.catalog.facts import CheckpointInfo
from ray_dcp.cluster.current import current_group, process_group_ranks
from ray_dcp.cluster.group import RankGroup
from ray_dcp.errors import ConfigError
from ray_dcp.gc_pause import collector_paused
from ray_dcp.planning.template.stored_names import NameChoice, Rename
from ray_dcp.protocol.call import Call, phase
from ray_dcp.protocol.engines.locations import named, require_reachable
from ray_dcp.protocol.exception import CheckpointException, RankFailure
from ray_dcp.protocol.memory_steps import KeptSteps, StepToLoad
from ray_dcp.protocol.messages import CHOOSE, FailedLoad, NewestPart
from ray_dcp.protocol.rank.async_save import save_behind
from ray_dcp.protocol.rank.background import AsyncSaveResponse, BackgroundSaves
from ray_dcp.protocol.rank.load import LoadRequest
from ray_dcp.protocol.rank.load import load as load_rank
from ray_dcp.protocol.rank.plugin_arguments import require_planner, require_storage
from ray_dcp.protocol.rank.report import LoadReport
from ray_dcp.protocol.rank.save import SaveRequest
from ray_dcp.protocol.rank.save import save as save_rank
from ray_dcp.protocol.rank.warm_up import warm_up as warm_up_rank
from ray_dcp.protocol.solo import SoloGroup
from ray_dcp.protocol.steps import (
    KnownReader,
    KnownWriter,
    default_load_planner,
    default_save_planner,
    known_reader,
    known_writer,
    load_steps,
    save_steps,
)
from ray_dcp.reads.checkpoint import FromMemory
from ray_dcp.reads.reader import StoreReader
from ray_dcp.settings import (
    DEFAULT_REPLICA_NBYTES,
    InFlight,
    Phase,
    ReplicaCheck,
    replica_check_from,
    share_reads_from,
)
from ray_dcp.staging.peers.peer_offers import replicas_from
from ray_dcp.store.location.place import absolute
from ray_dcp.write.writer import StoreWriter

CheckpointId = str | os.PathLike[str]
P = ParamSpec("P")
R = TypeVar("R")

alone = SoloGroup()
"""The group of this process by itself."""


def second_argument_is(storage: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that has a function take ``storage`` as its second positional argument, too, with a warning.

    torch's first versions had it there.
    """

    def takes_it(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) == 2:
                anyhow: Any = function
                if isinstance(args[1], str | os.PathLike):
                    # A path or URL: passed on, and refused as such once all ranks are in the call.
                    refused: R = anyhow(args[0], **{storage: args[1]}, **kwargs)
                    return refused
                message = f"{function.__name__}: pass the second argument by its name, as {storage}="
                warnings.warn(message, stacklevel=2)
                found: R = anyhow(args[0], **{storage: args[1]}, **kwargs)
                return found
            return function(*args, **kwargs)

        return called

    return takes_it


@second_argument_is("storage_writer")
def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    group: RankGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    replica_check: str | None = None,
    replica_check_nbytes: int | None = DEFAULT_REPLICA_NBYTES,
) -> Metadata:
    """Save a state dict that is spread over the ranks of a group; every rank calls this.

    Returns the checkpoint's ``Metadata`` when it is committed and durable. Tensors may be plain (one rank's is
    written), ``DTensor``, ``ShardedTensor`` or ``LocalShards``, on any device; ``Stateful`` objects give their
    ``state_dict()``; anything else is pickled. Saving an id again replaces it in one step.

    ``checkpoint_id`` is a path or URL; with a ``storage_writer`` it may be left out. ``group`` defaults to
    ``current_group()``; ``no_dist`` saves this process alone.

    Where several ranks have a plain value one rank's is written. Their values are compared: Python values and tensors
    of up to ``replica_check_nbytes`` bytes (None: of any size) whole, larger tensors by 64 KiB spread over them. Where
    they differ the lowest rank's is written, for all names that differ, and ``replica_check`` says what else happens:
    "warn" (the default, or what ``RAY_DCP_REPLICA_CHECK`` says) logs a warning for each name and keeps it with the
    checkpoint, "error" refuses the save before a byte is written, "off" does not compare.

    Raises ``CheckpointException`` on every rank when anything fails on any. Then nothing was committed, unless the
    commit itself failed: that leaves the previous or the new checkpoint, whole. Raises ``EarlierSaveError``, when this
    save is done, where an asynchronous save before failed and nobody had looked.
    """
    writer = known_writer(storage_writer if storage_writer is not None else StoreWriter())
    call, saves = _start_call("save", writer.named(checkpoint_id), ranks_of(group, process_group, no_dist))
    with saves.noting_earlier():
        with phase(call, Phase.COLLECT):
            check = replica_check_from(os.environ, replica_check, replica_check_nbytes)
            request = _save_request(call, state_dict, checkpoint_id, writer, planner, use_collectives, check)
        metadata = save_rank(request, call)
    return saves.tell_earlier("save", metadata)


@second_argument_is("storage_writer")
def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    group: RankGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    replica_check: str | None = None,
    replica_check_nbytes: int | None = DEFAULT_REPLICA_NBYTES,
    max_in_flight: int | None = None,
    when_busy: str | None = None,
    overlap: bool = False,
    replicas: int | None = None,
) -> AsyncSaveResponse:
    """Save in the background what the state dict holds now; every rank calls this.

    Returns when what this rank will write is copied: then the state dict may change. In a group an agent of the node
    writes the copy, else a child of this process, so that whoever is killed from then on loses nothing. The first save
    starts it and may be without it, unless ``warm_up`` has come before; ``RAY_DCP_AGENTS=0``, or a planner or writer of
    yours, leaves the writing to a thread here.

    At most ``max_in_flight`` saves (2, or what ``RAY_DCP_MAX_IN_FLIGHT`` says) are staged and not committed, each in
    memory of its own; they are written and committed in their order, and one that fails does not take the next with it.
    Of one more ``when_busy`` ("wait", or what ``RAY_DCP_WHEN_BUSY`` says) decides: "wait" waits until another has
    ended; "skip" saves nothing, on all ranks, and returns a response whose ``skipped`` is true; "error" raises a
    ``CheckpointException`` on all ranks, whose cause is a ``SavesInFlightError``. All ranks must pass the same.

    With ``overlap`` this returns when all ranks have planned, and a thread copies: *no tensor of the state dict may
    change in place before that is done*. Steps of torch's optimizers wait for it (``staged``); whatever else changes
    the state has to, by ``with staged():`` or ``response.staging_completion``. Python values are those at the call. A
    change that torch counts fails the save on all ranks instead of committing torn values; one through numpy, ``.data``
    or a fused kernel of yours is not seen. With a planner, writer or stager of yours nothing overlaps.

    ``replicas`` (0, or what ``RAY_DCP_REPLICAS`` says): with 1 an agent of another node keeps a copy in memory of what
    each rank has written, made behind the commit, so that the loss of a node has nobody load from storage.

    The response is also a future of the checkpoint's ``Metadata``; a save that has begun cannot be cancelled. A save or
    load that is not asynchronous waits for all saves before it, and so does the interpreter at exit. A failure that
    nobody looked at is raised by the next save or load of that rank as ``EarlierSaveError``, when that has done its own
    work, or is told on stderr when the process ends.

    An ``async_stager``, or a ``storage_writer`` of yours that is one, stages the whole state dict instead. Where its
    ``stage`` returns a future this call does not wait: the state dict may change when ``staging_completion`` is done.
    A stager, planner or writer of yours has one save at a time: another save with the same object waits.
    ``async_checkpointer_type`` is accepted and has no effect. Other arguments as in ``save``.
    """
    writer = known_writer(storage_writer if storage_writer is not None else StoreWriter())
    stager = async_stager if async_stager is not None else writer.stager
    ranks = ranks_of(group, process_group, no_dist)
    with preparing("save", ranks):
        limit = InFlight.from_variables(os.environ, max_in_flight=max_in_flight, when_busy=when_busy)
    own = None if type(planner) is DefaultSavePlanner else planner  # of torch's a copy is at work
    saves, uses = ranks.background, [one for one in (own, storage_writer, stager) if one is not None]
    busy = saves.make_room(limit, uses, alone=stager is not None)
    call, turn = ranks.start_call("save", writer.named(checkpoint_id)), saves.next_turn(uses, alone=stager is not None)
    with saves.noting_earlier():
        with phase(call, Phase.COLLECT):
            check = replica_check_from(os.environ, replica_check, replica_check_nbytes)
            request = _save_request(call, state_dict, checkpoint_id, writer, planner, use_collectives, check)
            call.replicas = replicas_from(os.environ, replicas)
        response = save_behind(replace(request, busy=busy), call, saves, turn, stager, overlap=overlap)
    return saves.tell_earlier("asynchronous save", response)


def warm_up(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    group: RankGroup | None = None,
    no_dist: bool = False,
    max_in_flight: int | None = None,
) -> int:
    """Make ready for asynchronous saves of this state dict, ahead of the first one; every rank calls this.

    It plans as a save does, which needs all ranks: what one writes depends on what the others have. Then it allocates
    memory for ``max_in_flight`` saves of what this rank would write, and starts the agent of the node. The first
    ``async_save`` then takes no memory and is handed over before it returns. Returns the bytes that this rank would
    stage; nothing is written.

    What the state dict does not have yet is not counted: where the optimizer gets its state in the first step, call
    this after that step, or after a load. With a planner or writer of your own the memory is not known ahead.
    ``checkpoint_id`` may be left out; other arguments as in ``async_save``. Raises what that raises. Where there is not
    enough memory for all saves it logs a warning.
    """
    writer = known_writer(storage_writer if storage_writer is not None else StoreWriter())
    ranks = ranks_of(group, process_group, no_dist)
    with preparing("warm-up", ranks):
        limit = InFlight.from_variables(os.environ, max_in_flight=max_in_flight)
    call, saves = _start_call("warm-up", writer.named(checkpoint_id), ranks)
    with saves.noting_earlier():
        with phase(call, Phase.COLLECT):
            require_storage(writer.writer, "storage_writer")
            require_planner(planner, "save")
            is_place = checkpoint_id is not None or storage_writer is not None
            location = _locate(call, checkpoint_id, writer, "storage_writer") if is_place else ""
            steps = save_steps(default_save_planner(planner), writer.writer, call)
        saves.buffers.allow(limit.max_in_flight)
        request = SaveRequest(state_dict, location, steps, ReplicaCheck("off"))
        nbytes = warm_up_rank(request, call, saves.buffers)
    return saves.tell_earlier("warm-up", nbytes)


@second_argument_is("storage_reader")
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    group: RankGroup | None = None,
    no_dist: bool = False,
    strict: bool | str = True,
    cast: bool = False,
    trusted: bool = False,
    only: str | Collection[str] | None = None,
    skip: str | Collection[str] | None = None,
    rename: Rename | None = None,
) -> LoadReport:
    """Fill a state dict from a checkpoint that any number of ranks saved; every rank of the group calls this.

    Tensors are filled in place, on their device; those on meta are replaced by tensors with memory, other values by
    the stored ones; ``Stateful`` objects get ``load_state_dict``. What is still empty in the template (``{}``, ``[]``,
    ``None``) and is not in the checkpoint gets whatever the checkpoint has below it: whole tensors, on CPU, on each
    rank that asks. Before anything is changed, names, shapes, dtypes and coverage are checked on all ranks.

    ``strict``: True refuses names that the checkpoint lacks, False loads the rest (as does torch's default planner
    with ``allow_partial_load``), "exact" also refuses names that no template has. ``cast`` converts dtypes.
    ``trusted`` unpickles Python objects of any class, which runs code from the checkpoint: only for checkpoints you
    wrote.

    ``only`` and ``skip`` choose by name as the template has it: a name, the first parts of names ("model" is also
    "model.norm.weight"), or a shell pattern of a whole name ("*.bias"); one, or several. What is left out keeps its
    value and counts neither as missing nor as unexpected. ``rename`` gives stored names others before they are compared
    with the template's: {regular expression: replacement}, as in ``{r"^module\\.": ""}``, or a function of a name.

    What several ranks of one node want of a large tensor they read once, together, through /dev/shm, if there is room;
    ``RAY_DCP_SHARE_READS=0`` turns that off.

    Raises ``CheckpointException`` on every rank when anything fails on any, listing all that does not fit. Raises
    ``EarlierSaveError``, when this load is done, where an asynchronous save before failed and nobody had looked.
    """
    reader = known_reader(storage_reader if storage_reader is not None else StoreReader(trusted=trusted))
    call, saves = _start_call("load", reader.named(checkpoint_id), ranks_of(group, process_group, no_dist))
    with saves.noting_earlier(), collector_paused():
        with phase(call, Phase.COLLECT):
            require_storage(storage_reader, "storage_reader")
            require_planner(planner, "load")
            location = _locate(call, checkpoint_id, reader, "storage_reader")
            choice = NameChoice(only, skip, rename)
            if strict is True and type(planner) is DefaultLoadPlanner and planner.allow_partial_load:
                strict = False
            planner = default_load_planner(planner, cast=cast, trusted=trusted, checkpoint_id=location, choice=choice)
            share_reads = share_reads_from(os.environ)
            steps = load_steps(
                planner, reader.reader, call, trusted=trusted, checkpoint_id=location, share_reads=share_reads
            )
            request = LoadRequest(state_dict, location, steps, strict, choice)
        report = load_rank(request, call)
        del request, steps, reader, planner  # and with them what was made of the checkpoint, before the collector wakes
    return saves.tell_earlier("load", report)


def newest(
    root: CheckpointId, *, group: RankGroup | None = None, after: FailedLoad | None = None
) -> tuple[CheckpointInfo | None, tuple[StepToLoad, FromMemory] | None]:
    """The newest checkpoint under ``root`` that is committed and whole; every rank calls this and all get the same.

    That is one in storage, and one in memory alone where that is newer: the step, and what this rank has of it. None
    where there is no such checkpoint. With ``after``, a load that failed on all ranks, it is the newest one in storage
    that is older than that step, and None where no rank saw damaged bytes. This never raises ``EarlierSaveError``: it
    is a part of a load, which does.
    """
    call, _ = _start_call("newest", named(root), ranks_of(group, None, no_dist=False))
    with phase(call, Phase.CHOOSE):
        require_reachable(call.checkpoint_id, in_one_process=call.in_one_process)
        kept = KeptSteps(() if after is not None else call.kept_nearby(call.checkpoint_id))
        found = call.exchange(CHOOSE, NewestPart(call.checkpoint_id, after, kept.steps))
    step = found.in_memory
    brought = kept.opened(step) if step is not None and step.brought_by == call.rank else None
    return found.stored, None if step is None else (step, FromMemory(brought))


def tell_earlier(kind: str, group: RankGroup | None) -> None:
    """Raise ``EarlierSaveError``, as a call of ``kind``, where an asynchronous save before failed and nobody looked."""
    ranks_of(group, None, no_dist=False).background.tell_earlier(kind, None)


def ranks_of(
    group: RankGroup | SoloGroup | None, process_group: ProcessGroup | None, no_dist: bool
) -> RankGroup | SoloGroup:
    """The group of a call; this process alone is one, too. Raises ``ConfigError`` for what is not a group."""
    require_group(group)
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise ConfigError(
            "process_group",
            f"{process_group!r} is not a ProcessGroup (torch.distributed.new_group() gives one, on its members); "
            "for a RankGroup it is group=",
        )
    if no_dist:
        return alone
    if group is not None:
        return group
    return (process_group_ranks(process_group) if process_group is not None else current_group()) or alone


def require_group(group: Any) -> None:
    """Return if ``group`` is None or a ``RankGroup``. Raises ``ConfigError``."""
    if group is not None and not (callable(getattr(group, "start_call", None)) and not isinstance(group, type)):
        way = "; pass it as process_group=" if isinstance(group, ProcessGroup) else ""
        raise ConfigError("group", f"{group!r} is not a RankGroup, as RankGroup.join() and current_group() give{way}")


def _save_request(
    call: Call,
    state_dict: Mapping[str, Any],
    checkpoint_id: CheckpointId | None,
    writer: KnownWriter,
    planner: SavePlanner | None,
    use_collectives: bool,
    replica_check: ReplicaCheck,
) -> SaveRequest:
    """What is to be saved, and where. Raises an error that says what is wrong with an argument or the place."""
    _require_collectives(use_collectives)
    require_storage(writer.writer, "storage_writer")
    require_planner(planner, "save")
    location = _locate(call, checkpoint_id, writer, "storage_writer")
    steps = save_steps(default_save_planner(planner), writer.writer, call)
    return SaveRequest(state_dict, location, steps, replica_check)


def _locate(call: Call, checkpoint_id: CheckpointId | None, storage: KnownWriter | KnownReader, role: str) -> str:
    """The checkpoint's place, the same in every process that takes part; ``storage`` is told it."""
    location = storage.locate(checkpoint_id, role)
    storage.require_reachable(location, in_one_process=call.in_one_process)
    return location


def _start_call(kind: str, checkpoint_id: str, ranks: RankGroup | SoloGroup) -> tuple[Call, BackgroundSaves]:
    """This rank's end of a new call, and its asynchronous saves before that, none of which is under way any more.

    The wait for them comes before the call, so that no limit of the call counts, and nothing touches a writer that is
    at work. From here on all ranks are in the call: what is wrong on one is told to all, who would wait otherwise.
    """
    ranks.background.settle()
    return ranks.start_call(kind, checkpoint_id), ranks.background


@contextmanager
def preparing(kind: str, group: RankGroup | SoloGroup | None) -> Iterator[None]:
    """An error in the block, on this rank and before its call, ends the call of the other ranks, too."""
    try:
        yield
    except Exception as error:
        call = ranks_of(group, None, no_dist=False).start_call(kind)
        call.report(RankFailure.from_exception(error, rank=call.rank, phase=Phase.COLLECT))
        raise


def reset_first(
    kind: str, storage: StorageWriter | StorageReader, process_group: ProcessGroup | None, no_dist: bool
) -> None:
    """Call the storage's ``reset()``, as torch's old calls do: it knows its place itself. It is a part of the call."""
    with preparing(kind, ranks_of(None, process_group, no_dist)):
        require_storage(storage, "storage_writer" if kind == "save" else "storage_reader")
        storage.reset()


def _require_collectives(use_collectives: bool) -> None:
    if not use_collectives:
        raise ConfigError(
            "use_collectives",
            "ray_dcp has no collectives to leave out: ranks coordinate through an actor. "
            "For one checkpoint a rank, pass no_dist=True and a checkpoint_id of its own to each",
        )


if not TYPE_CHECKING:  # torch's module of this name has more, and a module that gives any name hides misspelt ones

    def __getattr__(name: str) -> Any:
        return getattr(torch_api, name)


__all__ = [
    "AsyncSaveResponse",
    "CheckpointException",
    "LoadReport",
    "absolute",
    "async_save",
    "load",
    "newest",
    "preparing",
    "require_group",
    "reset_first",
    "save",
    "tell_earlier",
    "warm_up",
]
