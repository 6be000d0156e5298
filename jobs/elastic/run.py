"""One elastic run on a Ray cluster that is connected to: start it, let the story happen, compare the losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer

from elastic.board import Board
from elastic.learner import Course, uninterrupted_losses
from elastic.local_nodes import LocalNodes
from elastic.picture import Picture
from elastic.record import Comparison, RunRecord
from elastic.story import Act, Kill, Story
from elastic.training import Lesson, train_and_checkpoint
from ray_dcp.store.location.urls import join_url
from ray_dcp.train import CheckpointCallback, checkpoint_id_of

_LOOK_EVERY_S = 0.05
_LOOK_FOR_NODES_EVERY_S = 2.0
_MAX_FAILURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the user asked for."""

    course: Course
    name: str
    storage: str
    min_workers: int
    max_workers: int
    checkpoint_every: int
    save_in_background: bool
    min_step_s: float
    use_gpu: bool
    kill: Kill
    kill_step: int
    whole_node: bool
    tolerance: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How it ended."""

    record: RunRecord
    reference: list[float]
    comparison: Comparison
    checkpoint_id: str
    """Of the run's last checkpoint, as Ray Train gives it back."""
    act: Act
    """How far the story came: to ``Act.LAST`` when all has happened, the death, the resume, the growing back."""

    @property
    def ended_well(self) -> bool:
        return self.comparison.matches and self.act is Act.LAST


def run_elastically(settings: RunSettings, *, nodes: LocalNodes | None, picture: Picture) -> RunOutcome:
    """Train as ``settings`` say; ``nodes`` are there to be killed and added when the cluster is our own.

    Call it from the main thread: Ray adds nodes only there.
    """
    board, record = Board.open(), RunRecord()
    # On a GPU cluster all GPUs belong to the run until it ends.
    reference = None if settings.use_gpu else _start_reference(settings)
    story = Story(
        record,
        kill=settings.kill,
        kill_step=settings.kill_step,
        whole_node=settings.whole_node,
        root=join_url(settings.storage, settings.name),
        nodes=nodes,
        say=picture.say,
    )
    fit = _Background(_trainer(settings, board).fit)
    deadline = time.monotonic() + settings.timeout_s
    while not fit.ended.wait(_LOOK_EVERY_S):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done after {settings.timeout_s:g} s; it was {story.act.value}")
        record.add(board.read_new())
        story.go_on()
        picture.show(record, story.act.value)
    record.add(board.read_new())
    story.go_on()
    picture.show(record, story.act.value)
    result = fit.result()
    losses = ray.get(reference or _start_reference(settings), timeout=settings.timeout_s)
    return RunOutcome(
        record=record,
        reference=losses,
        comparison=record.compare(losses, settings.tolerance, exact_repeats=not settings.use_gpu),
        checkpoint_id=checkpoint_id_of(result.checkpoint),
        act=story.act,
    )


def _start_reference(settings: RunSettings) -> Any:
    device = "cuda" if settings.use_gpu else "cpu"
    # A retry makes up for the node being killed that it happens to run on.
    task = ray.remote(num_cpus=0, num_gpus=int(settings.use_gpu), max_retries=3)(uninterrupted_losses)
    return task.remote(settings.course, device)


def _trainer(settings: RunSettings, board: Board) -> TorchTrainer:
    lesson = Lesson(
        course=settings.course,
        board=board,
        checkpoint_every=settings.checkpoint_every,
        save_in_background=settings.save_in_background,
        min_step_s=settings.min_step_s,
    )
    bounds = (settings.min_workers, settings.max_workers)
    return TorchTrainer(
        train_and_checkpoint,
        train_loop_config={"lesson": lesson},
        scaling_config=ray.train.ScalingConfig(
            num_workers=bounds if settings.min_workers < settings.max_workers else settings.max_workers,
            use_gpu=settings.use_gpu,
            elastic_resize_monitor_interval_s=_LOOK_FOR_NODES_EVERY_S,
        ),
        run_config=ray.train.RunConfig(
            name=settings.name,
            storage_path=settings.storage,
            failure_config=ray.train.FailureConfig(max_failures=_MAX_FAILURES),
            callbacks=[CheckpointCallback()],
        ),
    )


class _Background:
    """One call in a thread of its own; it does not keep the program from ending."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self._call = call
        self._returned: Any = None
        self._raised: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        try:
            self._returned = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._raised = error
        finally:
            self.ended.set()

    def result(self) -> Any:
        if self._raised is not None:
            raise self._raised
        return self._returned
