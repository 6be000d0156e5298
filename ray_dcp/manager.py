"""``CheckpointManager``: the checkpoints of a run, one folder a step under one root."""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner

from ray_dcp.api import (
    AsyncSaveResponse,
    LoadReport,
    absolute,
    async_save,
    load,
    newest,
    preparing,
    ranks_of,
    require_group,
    save,
    tell_earlier,
    warm_up,
)
from ray_dcp.catalog.facts import CheckpointInfo, describe
from ray_dcp.catalog.listing import find_step, list_checkpoints
from ray_dcp.catalog.newest import newest_step
from ray_dcp.catalog.root_check import require_root
from ray_dcp.cluster.current import known_group
from ray_dcp.cluster.group import RankGroup
from ray_dcp.cluster.train_context import experiment_root
from ray_dcp.errors import ConfigError, CorruptCheckpointError, EarlierSaveError, RayDcpError, StoreError
from ray_dcp.format.names import require_step, step_folder
from ray_dcp.pace.interval import MEMORY, STORAGE
from ray_dcp.pace.pacer import Due, Forming, Pacer
from ray_dcp.planning.template.stored_names import Rename
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.protocol.messages import FailedLoad
from ray_dcp.reads.reader import StoreReader
from ray_dcp.settings import DEFAULT_REPLICA_NBYTES, InFlight, PaceSettings, replica_check_from, require_count
from ray_dcp.staging.buffer_errors import StepNotKeptError
from ray_dcp.staging.peers.peer_offers import replicas_from
from ray_dcp.store.location.urls import join_url
from ray_dcp.write.writer import StoreWriter

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and loads steps under ``root``; every rank makes one and calls it alike.

    ``root`` is a path or URL of the folder that holds the steps; None, in a TorchTrainer worker, is the run's
    experiment folder. One that is itself a checkpoint is refused by whatever looks at it. ``group`` defaults to
    ``current_group()`` at each call. ``replica_check`` and ``replica_check_nbytes`` are those of ``save``. ``overhead``
    is the share of the time that saves may take where ``due`` says when to save (0.01, or what ``RAY_DCP_OVERHEAD``
    says), ``mtbf_s`` the mean time between failures of the run (by default ``RAY_DCP_MTBF_S``, else what is seen).
    ``max_in_flight``, ``when_busy`` and ``replicas`` are those of ``ray_dcp.async_save``.
    With ``memory_every=N`` every N-th step is due, too, to be kept in the memory of the ranks' nodes alone (``due``,
    ``async_save``): a run that loses a rank goes on from there (``load``), one whose memory is lost from the newest
    step in storage.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        group: RankGroup | None = None,
        replica_check: str | None = None,
        replica_check_nbytes: int | None = DEFAULT_REPLICA_NBYTES,
        overhead: float | None = None,
        mtbf_s: float | None = None,
        max_in_flight: int | None = None,
        when_busy: str | None = None,
        replicas: int | None = None,
        memory_every: int | None = None,
    ) -> None:
        found = root if root is not None else experiment_root()
        if found is None:
            raise ConfigError(
                "root",
                "is None; pass a path or a URL (is it an unset variable?). Only a TorchTrainer worker has a default",
            )
        self.root = absolute(found, setting="root")
        require_group(group)
        self._group = group
        check = replica_check_from(os.environ, replica_check, replica_check_nbytes)
        self._replica_check: dict[str, Any] = {
            "replica_check": check.mode,
            "replica_check_nbytes": check.max_nbytes,
        }
        limit = InFlight.from_variables(os.environ, max_in_flight=max_in_flight, when_busy=when_busy)
        self._in_flight: dict[str, Any] = {"max_in_flight": limit.max_in_flight, "when_busy": limit.when_busy}
        self._replicas = replicas_from(os.environ, replicas)
        self._in_memory = self._in_flight if when_busy else self._in_flight | {"when_busy": "skip"}
        """Where nothing is said a save in memory never makes training wait."""
        if memory_every is not None:
            require_count("memory_every", memory_every)
        settings = PaceSettings.from_variables(os.environ, overhead=overhead, mtbf_s=mtbf_s)
        self._pacer = Pacer(settings, memory_every=memory_every)
        self._due: Due | None = None
        """The last answer."""
        self._unkept_is_told = False
        self._root_is_known = False
        self._async_saves: list[AsyncSaveResponse] = []
        """Those under way, and those that have failed without anybody having looked."""
        self.last_load: LoadReport | None = None
        """What the latest ``load`` did on this rank; None where it found no step, or failed."""

    def save(
        self, step: int, state_dict: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> CheckpointInfo:
        """Save a step; returns when it is committed and durable.

        ``metrics`` are kept with it: JSON values, numbers of numpy and torch among them; NaN and infinity stay what
        they are, a tuple becomes a list. Anything else, and a key that is not text, is refused by name.

        Raises what ``ray_dcp.save`` raises, and ``ConfigError`` where ``step`` or ``metrics`` are refused.
        """
        writer = self._writer(step, metrics)
        with self._timed(writer):
            with carrying(lambda metadata: describe(writer.checkpoint_id)):
                save(state_dict, storage_writer=writer, group=self._group, **self._replica_check)
            return describe(writer.checkpoint_id)

    def async_save(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        overlap: bool = False,
        tier: str | None = None,
    ) -> AsyncSaveResponse:
        """Save a step in the background; returns when the state dict may change, with ``overlap`` before that.

        ``overlap`` is that of ``ray_dcp.async_save``: read there what must wait. ``metrics`` are those of ``save``.
        Raises what ``ray_dcp.async_save`` raises, and ``ConfigError`` as ``save``. A step that is skipped, with
        ``when_busy="skip"``, stays due.

        ``tier`` is "storage" or "memory", the same on all ranks: by default what ``due`` has just said of this step,
        else "storage". A step in memory is never written; the response is done when all ranks' parts are sealed there.
        Where it cannot be kept (no node agent is up, no group) the response is ``skipped``, and a warning says why,
        once. So is one beyond ``max_in_flight``, unless the manager was given ``when_busy``.
        """
        if self._tier_of(step, tier) == MEMORY:
            return self._save_in_memory(step, state_dict, metrics, overlap=overlap)
        writer = self._writer(step, metrics)
        options = self._replica_check | self._in_flight | {"overlap": overlap, "replicas": self._replicas}
        with self._timed(writer), carrying(self._follow):
            response = async_save(state_dict, storage_writer=writer, group=self._group, **options)
        return self._follow(response)

    def _tier_of(self, step: int, tier: str | None) -> str:
        if tier not in (None, MEMORY, STORAGE):
            with preparing("save", self._group):
                raise ConfigError("tier", f'{tier!r} is none of "{STORAGE}", "{MEMORY}" and None')
        due = self._due if self._due is not None and self._due.step == step else None
        return tier or (due.tier if due is not None else None) or STORAGE

    def _save_in_memory(
        self, step: int, state_dict: Mapping[str, Any], metrics: Mapping[str, Any] | None, *, overlap: bool
    ) -> AsyncSaveResponse:
        """As ``async_save``. The rhythm of saves to storage knows nothing of it."""
        began = self._pacer.now()
        with preparing("save", self._group):
            writer = StoreWriter(self.checkpoint_id(step), step=step, metrics=metrics)
        writer.in_memory = True
        options = self._replica_check | self._in_memory | {"overlap": overlap, "replicas": self._replicas}
        try:
            with carrying(self._keep_track):
                response = async_save(state_dict, storage_writer=writer, group=self._group, **options)
        finally:
            self._pacer.saved(writer.step or 0, began, succeeded=False)
        return self._keep_track(response)

    def _keep_track(self, response: AsyncSaveResponse) -> AsyncSaveResponse:
        """Have ``wait`` and ``close`` know of a save in memory; say once that steps are not kept."""
        response.add_done_callback(self._tell_unkept)
        if not response.skipped:
            self._async_saves = [one for one in self._async_saves if not one.is_over_and_told()] + [response]
        return response

    def _tell_unkept(self, ended: futures.Future[Any]) -> None:
        why = ended.exception()
        if isinstance(why, StepNotKeptError) and not self._unkept_is_told:
            self._unkept_is_told = True
            logger.warning("memory_every: %s. A run that is interrupted goes on from an older step", why)

    def _follow(self, response: AsyncSaveResponse) -> AsyncSaveResponse:
        if response.skipped:
            return response
        self._async_saves = [one for one in self._async_saves if not one.is_over_and_told()] + [response]
        drain = self._pacer.drain_begins()
        response.add_done_callback(lambda _: drain.end())
        return response

    def warm_up(self, state_dict: Mapping[str, Any]) -> int:
        """Make ready for asynchronous saves, as ``ray_dcp.warm_up``; every rank calls this.

        Returns the bytes that this rank would stage. Call it when the optimizer has its state: after a load, or after
        the first step.
        """
        options = {"group": self._group, "max_in_flight": self._in_flight["max_in_flight"]}
        return warm_up(state_dict, checkpoint_id=self.checkpoint_id(0), **options)

    def due(self, step: int) -> Due:
        """Whether to save ``step`` now, as ``if manager.due(step): manager.save(step, ...)``; ``.why`` says by what.

        Ask at each step, on every rank: the times between are how long a step takes. It makes no call and takes
        microseconds. Every rank gets the same answer, since it depends on the step and on what all have agreed on as a
        part of their last save or load alone. ``docs/when_to_save.md`` has the rules. ``.tier`` says where to, which
        ``async_save`` goes by: "storage", or with ``memory_every`` "memory" at those of its steps that are not.
        """
        self._due = self._pacer.due(require_step(step), self._forming())
        return self._due

    def load(
        self,
        state_dict: dict[str, Any],
        step: int | None = None,
        fallback: bool = False,
        *,
        strict: bool | str = True,
        cast: bool = False,
        trusted: bool = False,
        planner: LoadPlanner | None = None,
        only: str | Collection[str] | None = None,
        skip: str | Collection[str] | None = None,
        rename: Rename | None = None,
    ) -> int | None:
        """Load ``step``, or the newest committed one; returns the step loaded, or None when there is none to load.

        Other arguments as in ``ray_dcp.load``, whose report is kept as ``last_load``.

        Which one is newest is looked up once for all ranks. One that is in memory alone counts as long as all of it is
        there (``memory_every``): if some of it turns out to be lost, the newest in storage is loaded instead, with a
        warning. A ``step`` is one in storage. With ``fallback``, on all ranks alike, a step whose stored
        bytes turn out to be damaged is given up with a warning in the log for the newest older one, and so on; when
        none is left the error of the first is raised.
        """
        asked = functools.partial(
            load,
            state_dict,
            group=self._group,
            strict=strict,
            cast=cast,
            trusted=trusted,
            planner=planner,
            only=only,
            skip=skip,
            rename=rename,
        )
        self.last_load, reader = None, None
        if step is None:
            found, in_memory = newest(self.root, group=self._group)
            if in_memory is not None:
                step, place = in_memory[0].step, in_memory[0].place
                reader = StoreReader(place, trusted=trusted, from_memory=in_memory[1])
                self._say_from_memory(step, found)
            elif found is None or found.step is None:
                tell_earlier("load", self._group)
                return None
            else:
                step, place = found.step, found.checkpoint_id
        else:
            place = ""
            found = None
        first: RayDcpError | None = None
        while True:
            try:
                self.last_load = asked(checkpoint_id=place or self._place_of(step), storage_reader=reader)
                return self._went_on_from(step, found)
            except EarlierSaveError as earlier:
                self.last_load, earlier.result = earlier.result, self._went_on_from(step, found)
                raise
            except RayDcpError as error:
                failed = FailedLoad(step, is_damage(error), from_memory=reader is not None)
                older = self._older(failed) if fallback or failed.from_memory else None
                first = first if first is not None and is_damage(error) else error
                if older is None or older.step is None:
                    raise first from first.__cause__
                logger.warning("%s; going on with step %d", error.args[0], older.step)
                found, step, place, reader = older, older.step, older.checkpoint_id, None

    def _say_from_memory(self, step: int, stored: CheckpointInfo | None) -> None:
        if self._rank == 0:
            newest_stored = "there is none in storage" if stored is None else f"the newest in storage is {stored.step}"
            logger.info("step %d is loaded from memory; %s", step, newest_stored)

    def _went_on_from(self, step: int, found: CheckpointInfo | None) -> int:
        """Note that training goes on from ``step``; ``found``, the newest in storage, is the same on all ranks."""
        step = operator.index(step)
        pace, stored_step = (found.pace, found.step) if found is not None else (None, None)
        self._pacer.loaded(step, pace, self._forming(), stored_step=stored_step)
        return step

    def latest(self) -> CheckpointInfo | None:
        """The newest step in storage that is committed and whole; None when there is none."""
        return newest_step(self.root)

    def list(self) -> list[CheckpointInfo]:
        """All steps that are committed in storage, oldest first."""
        found = [info for info in list_checkpoints(self.root) if info.step is not None]
        if not found:
            require_root(self.root)
        return found

    def checkpoint_id(self, step: int) -> str:
        """The path or URL to which ``save`` saves ``step``."""
        return join_url(self.root, step_folder(require_step(step)))

    def wait(self) -> None:
        """Wait for all asynchronous saves.

        Raises the ``CheckpointException`` of the earliest that failed and at which nobody looked; the next ``wait``
        that of the next.
        """
        futures.wait(self._async_saves)
        while self._async_saves:
            self._async_saves.pop(0).tell()

    def close(self) -> None:
        """Finish what is under way, as ``wait`` does. The group stays open: it belongs to whoever joined it."""
        self.wait()

    def _place_of(self, step: int) -> str:
        """The place at which ``list`` shows ``step``; it may have been saved under another spelling of its number."""
        with preparing("load", self._group):
            found = find_step(self.root, step)
            if found is None:
                require_root(self.root)
            return found or self.checkpoint_id(step)

    def _older(self, failed: FailedLoad) -> CheckpointInfo | None:
        """The step to load in place of one that failed, the same on all ranks; None to give up."""
        try:
            return newest(self.root, group=self._group, after=failed)[0]
        except RayDcpError as error:
            # The load's own error is the one to raise: a rank that was lost in it is missing here too.
            logger.warning("no older step can be looked up: %s", error)
            return None

    def _require_root_once(self) -> None:
        """Check the root before a manager's first save, on rank 0 for all ranks."""
        if not self._root_is_known and ranks_of(self._group, None, no_dist=False).rank == 0:
            with suppress(StoreError):  # which the save tells of, on all ranks
                require_root(self.root)
        self._root_is_known = True

    def _writer(self, step: int, metrics: Mapping[str, Any] | None) -> StoreWriter:
        with preparing("save", self._group):
            self._require_root_once()
            return StoreWriter(self.checkpoint_id(step), step=step, metrics=metrics)

    @contextmanager
    def _timed(self, writer: StoreWriter) -> Iterator[None]:
        """A save in the block tells the others what this rank has measured, and takes what they agree on.

        The answer to the plan counts, whatever becomes of the save: every rank that is still there has had it.
        """
        step, began = writer.step or 0, self._pacer.now()
        writer.figures = self._pacer.figures(step, self._forming())
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            interval = writer.interval
            if self._pacer.take(interval, self._forming()) and interval is not None and self._rank == 0:
                logger.info("%s", interval.why)
            self._pacer.saved(step, began, succeeded=succeeded and interval is not None)

    def _forming(self) -> Forming | None:
        """The forming of the group in which this process is, without joining any; None for one process alone."""
        group = self._group if self._group is not None else known_group()
        return None if group is None else (group.name, group.generation)

    @property
    def _rank(self) -> int:
        group = self._group if self._group is not None else known_group()
        return 0 if group is None else group.rank


@contextmanager
def carrying(result_of: Callable[[Any], Any]) -> Iterator[None]:
    """An ``EarlierSaveError`` in the block gets ``result_of(result)`` in place of its ``result``."""
    try:
        yield
    except EarlierSaveError as earlier:
        earlier.result = result_of(earlier.result)
        raise


def is_damage(error: RayDcpError) -> bool:
    """Whether a load failed because stored bytes are not what was written; an older checkpoint may still be whole."""
    failures = error.rank_failures if isinstance(error, CheckpointException) else ()
    # Not every cause survives the way from the rank that failed; its name does.
    return any(
        isinstance(failure.cause, CorruptCheckpointError) or failure.error_type == CorruptCheckpointError.__name__
        for failure in failures
    )
