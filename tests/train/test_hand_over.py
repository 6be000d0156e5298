"""A save that is under way when Ray Train stops a worker is finished; runs that go on from it: ``test_reporting``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

import ray_dcp as dcp
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.protocol.rank.background import AsyncSaveResponse, BackgroundSaves
from ray_dcp.train import CheckpointCallback, callback
from tests.slack import within


def group_with(upload: AsyncSaveResponse | None) -> Any:
    background = BackgroundSaves()
    background._started = [] if upload is None else [upload]
    return SimpleNamespace(background=background)


def later(call: Callable[[], Any]) -> None:
    threading.Timer(0.2, call).start()


def test_a_save_under_way_is_waited_for_and_how_it_ended_stays_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, failed = AsyncSaveResponse(), AsyncSaveResponse()
    error = dcp.CheckpointException("save", "/c", [RankFailure(0, "write", "OSError", "broken on purpose", "")])
    groups = [group_with(None), group_with(saved), group_with(failed)]
    monkeypatch.setattr(callback, "joined_groups", lambda: groups)
    later(lambda: saved.set_result(Metadata({})))
    later(lambda: failed.set_exception(error))
    assert callback.finish_saves(timeout_s=30) == 0
    assert saved.done()
    # Nobody has looked: the next save or load is to raise it.
    assert failed.untold_failure() is error


def test_what_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group_with(AsyncSaveResponse()), group_with(AsyncSaveResponse())]
    monkeypatch.setattr(callback, "joined_groups", lambda: groups)
    started = time.monotonic()
    assert callback.finish_saves(timeout_s=0.2) == 2
    assert time.monotonic() - started < within(5)


def test_a_process_without_groups_has_nothing_to_finish() -> None:
    assert CheckpointCallback().before_worker_shutdown() is None
