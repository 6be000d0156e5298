"""Saves that go on behind the caller's back: one at a time, in order, none of their failures lost."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.errors import EarlierSaveError
from ray_dcp.protocol.call import Call
from ray_dcp.protocol.failures import CheckpointException, RankFailure
from ray_dcp.protocol.save import PlannedSave, write_save


class UploadFuture(Future[Metadata]):
    """A future that knows whether anybody has looked at how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.observed = False

    def result(self, timeout: float | None = None) -> Metadata:
        try:
            return super().result(timeout)
        finally:
            self.observed = self.observed or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.observed = True
        return error

    def unobserved_failure(self) -> BaseException | None:
        """How it failed, if it did and nobody has looked; looking here does not count."""
        return super().exception() if self.done() and not self.observed else None


@dataclass(frozen=True, slots=True)
class AsyncSaveResponse:
    """What ``async_save`` returns; the names are DCP's."""

    staging_completion: Future[None]
    """Done when the state dict may change again."""
    upload_completion: Future[Metadata]
    """Done when the checkpoint is committed and durable, or the save has failed."""


class BackgroundSaves:
    """The asynchronous saves of one rank."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._latest: UploadFuture | None = None

    def settle(self) -> None:
        """Wait for the save that is under way. Raises ``EarlierSaveError`` if it failed and nobody has looked."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        wait([latest])
        failure = latest.unobserved_failure()
        if failure is not None:
            raise EarlierSaveError(failure) from failure

    def wait_for_latest(self, timeout_s: float) -> bool:
        """Return whether no save is under way, after at most ``timeout_s``; how it ended stays untold."""
        latest = self._latest
        return latest is None or bool(wait([latest], timeout=timeout_s).done)

    def start(self, planned: PlannedSave, call: Call) -> AsyncSaveResponse:
        """Write a staged save in the background; ``settle`` comes first, so it is the only one."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray_dcp-save")
        staged: Future[None] = Future()
        staged.set_result(None)
        upload = self._latest = UploadFuture()
        self._executor.submit(_write_into, upload, planned, call)
        return AsyncSaveResponse(staged, upload)


def _write_into(upload: UploadFuture, planned: PlannedSave, call: Call) -> None:
    try:
        metadata = write_save(planned, call)
    except CheckpointException as error:
        upload.set_exception(error)
    except BaseException as error:  # noqa: BLE001 - the thread ends here: the future is where it is told
        upload.set_exception(_as_checkpoint_exception(error, call))
    else:
        upload.set_result(metadata)


def _as_checkpoint_exception(error: BaseException, call: Call) -> CheckpointException:
    failure = RankFailure.from_exception(error, rank=call.rank, phase="write")
    return CheckpointException(call.kind, call.checkpoint_id, [failure])
