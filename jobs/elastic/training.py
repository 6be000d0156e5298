"""What every worker of the TorchTrainer runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray.train
import torch
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import get_device

import ray_dcp as dcp
from elastic.board import Board, SaveReturned, StepDone, WorkerStarted
from elastic.learner import Course, Learner
from ray_dcp.train import report


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the workers are told."""

    course: Course
    board: Board
    checkpoint_every: int
    save_in_background: bool
    min_step_s: float
    """A step takes at least this long, so that a fast machine does not finish before nodes come and go."""


def train_and_checkpoint(config: dict[str, Any]) -> None:
    """Resume from the newest committed checkpoint, train to the end of the course, checkpoint every few steps."""
    torch.set_num_threads(1)
    lesson: Lesson = config["lesson"]
    course, board = lesson.course, lesson.board
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    learner = Learner(course, get_device(), rank=rank, world_size=world_size)
    # Without a root it works in the run's experiment folder; the ranks find each other by themselves.
    checkpoints = dcp.CheckpointManager()
    checkpoints.load({"learner": learner.state})
    group = broadcast_from_rank_zero(os.urandom(4).hex())
    node_id = ray.get_runtime_context().get_node_id()
    board.pin(WorkerStarted(group, rank, world_size, node_id, os.getpid(), learner.step, time.time()))
    save = _save_in_background if lesson.save_in_background else _save
    report_saved: Callable[[], None] = _nothing_to_report
    while learner.step < course.num_steps:
        started = time.monotonic()
        loss = learner.train_one_step()
        time.sleep(max(0.0, started + lesson.min_step_s - time.monotonic()))
        if rank == 0:
            board.pin(StepDone(group, world_size, learner.step, loss, time.time()))
        if learner.step % lesson.checkpoint_every == 0 or learner.step == course.num_steps:
            report_saved()
            asked = time.monotonic()
            report_saved = save(checkpoints, learner, {"step": learner.step, "loss": loss, "world_size": world_size})
            if rank == 0:
                board.pin(SaveReturned(group, learner.step, time.monotonic() - asked, time.time()))
    report_saved()
    checkpoints.close()


def _save(checkpoints: dcp.CheckpointManager, learner: Learner, metrics: dict[str, Any]) -> Callable[[], None]:
    info = checkpoints.save(learner.step, {"learner": learner.state}, metrics=metrics)
    report(metrics, checkpoint=info)
    return _nothing_to_report


def _save_in_background(
    checkpoints: dcp.CheckpointManager, learner: Learner, metrics: dict[str, Any]
) -> Callable[[], None]:
    step = learner.step
    response = checkpoints.async_save(step, {"learner": learner.state}, metrics=metrics)

    def report_saved() -> None:
        # All ranks report at the same place in their loop: Ray waits there for all of them.
        response.upload_completion.result()
        report(metrics, checkpoint=checkpoints.checkpoint_id(step))

    return report_saved


def _nothing_to_report() -> None:
    """The save before was reported when it was made."""
