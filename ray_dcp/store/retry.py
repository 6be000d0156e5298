"""``RetryStore``: tries again what failed in a way that may pass, as long as a ``RetryPolicy`` says."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import tenacity

from ray_dcp.errors import StoreError, StoreUnavailableError
from ray_dcp.progress import advance
from ray_dcp.settings import RetryPolicy
from ray_dcp.store.location.urls import require_key, shown_url
from ray_dcp.store.reading import get_into
from ray_dcp.store.store import ObjectWriter, Store, StoredObject, chunk_bytes, exists, traits_of
from ray_dcp.store.translate import is_transient

_logger = logging.getLogger("ray_dcp.storage")
_LOOK_S = 0.1
_MAX_DELETE_S = 15.0
_Answer = TypeVar("_Answer")


class RetryStore:
    """``inner``, whose passing failures are met with another attempt.

    Passing failures are refused and broken connections, time-outs, answers 500 to 599, 408 and 429, and what services
    call slow down or throttled. All others are raised at once. After the policy's last attempt
    ``StoreUnavailableError`` names operation, key, attempts and time. Each wait is logged, counted in
    ``num_retries``, and ends early where the save or load of this thread has been interrupted.

    A ``delete`` is given up after some seconds in any case: what stays is not part of a checkpoint, and is swept later.
    A ``put`` asks its ``last_look`` before every attempt. What is written to ``put_new`` is held until it is more than
    ``spool_nbytes``: up to there the whole object is tried again. Beyond, it is streamed, and a stream cannot be begun
    again in the middle: there only the inner store's own attempts for each part count (``S3Store``).
    """

    def __init__(self, inner: Store, policy: RetryPolicy | None = None, *, spool_nbytes: int = 16 << 20) -> None:
        self._inner = inner
        self._policy = policy or RetryPolicy()
        self._spool_nbytes = spool_nbytes
        self._lock = threading.Lock()
        self.url = inner.url
        # The methods of these two are not passed on.
        self.traits = dataclasses.replace(traits_of(inner), folders=False, renames=False)
        self.num_retries = 0

    @property
    def inner(self) -> Store:
        """The store that is asked, and asked again."""
        return self._inner

    def __repr__(self) -> str:
        return f"RetryStore({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._inner, self._policy, self._spool_nbytes)

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        self._attempt("put", key, lambda: self._inner.put(key, content, last_look=last_look))

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(require_key(key, url=shown_url(self.url)))

    @contextmanager
    def _put_new(self, key: str) -> Iterator[ObjectWriter]:
        if exists(self, key):
            raise StoreError("cannot create: File exists", url=shown_url(self.url), key=key)
        started = time.monotonic()
        try:
            with ExitStack() as stream:
                writer = _SpoolingWriter(lambda: self._open_stream(key, stream), self._spool_nbytes)
                yield writer
        except StoreError as error:
            if not (writer.is_streaming and is_transient(error)):
                raise
            attempts = getattr(self._inner, "part_attempts", 1)
            raise _unavailable(error, attempts, started) from error
        if not writer.is_streaming:
            self.put(key, writer.spooled)

    def _open_stream(self, key: str, stream: ExitStack) -> ObjectWriter:
        return self._attempt("create", key, lambda: stream.enter_context(self._inner.put_new(key)))

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._attempt("read", key, lambda: self._inner.get(key, offset, nbytes))

    def get_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``ReadsInto``."""
        self._attempt("read", key, lambda: get_into(self._inner, key, offset, buffers))

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        return self._attempt("list", prefix, lambda: self._inner.list(prefix))

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        return self._attempt("list", prefix, lambda: self._inner.list_folders(prefix))

    def delete(self, key: str) -> None:
        self._attempt("delete", key, lambda: self._inner.delete(key), max_elapsed_s=_MAX_DELETE_S)

    def _attempt(
        self, doing: str, key: str, operation: Callable[[], _Answer], *, max_elapsed_s: float = math.inf
    ) -> _Answer:
        def count() -> None:
            with self._lock:
                self.num_retries += 1

        return try_again(operation, self._policy, what=f"{doing} {key}", max_elapsed_s=max_elapsed_s, on_retry=count)


def try_again(
    operation: Callable[[], _Answer],
    policy: RetryPolicy,
    *,
    what: str,
    max_elapsed_s: float = math.inf,
    on_retry: Callable[[], None] = lambda: None,
) -> _Answer:
    """Return what ``operation`` returns at last; raises ``StoreUnavailableError`` when ``policy`` is used up.

    A failure that does not pass is raised at once. ``what`` finishes the sentence "attempt 1 of 20 to ..." in the log;
    ``on_retry`` is called before each wait.
    """
    started = time.monotonic()

    def note(state: tenacity.RetryCallState) -> None:
        on_retry()
        _logger.warning(
            "attempt %d of %d to %s failed, the next one in %.2f s: %s",
            state.attempt_number,
            policy.max_attempts,
            what,
            state.upcoming_sleep,
            state.outcome.exception() if state.outcome else None,
        )

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(policy.max_attempts)
        | tenacity.stop_before_delay(min(policy.max_elapsed_s, max_elapsed_s)),
        wait=tenacity.wait_random_exponential(policy.initial_backoff_s, max=policy.max_backoff_s),
        sleep=_wait_counting,
        before_sleep=note,
    )
    try:
        return attempts(operation)
    except tenacity.RetryError as exhausted:
        error = exhausted.last_attempt.exception()
        assert isinstance(error, StoreError)  # is_transient says so of nothing else
        raise _unavailable(error, exhausted.last_attempt.attempt_number, started) from error


def _unavailable(error: StoreError, num_attempts: int, started: float) -> StoreUnavailableError:
    return StoreUnavailableError(
        str(error).removesuffix(f" ({error.url}{'/' + error.key if error.key else ''})"),
        url=error.url,
        key=error.key,
        num_attempts=num_attempts,
        elapsed_s=time.monotonic() - started,
    )


def _rebuild(inner: Store, policy: RetryPolicy, spool_nbytes: int) -> RetryStore:
    return RetryStore(inner, policy, spool_nbytes=spool_nbytes)


def _wait_counting(seconds: float) -> None:
    """Wait such that whoever looks at this thread's progress sees that it is at work, and may interrupt it."""
    end = time.monotonic() + seconds
    while True:
        advance()
        rest = end - time.monotonic()
        if rest <= 0:
            return
        time.sleep(min(rest, _LOOK_S))


class _SpoolingWriter:
    """Holds what is written until it is too much, then hands it and all that follows to a stream."""

    def __init__(self, open_stream: Callable[[], ObjectWriter], spool_nbytes: int) -> None:
        self._open_stream = open_stream
        self._spool_nbytes = spool_nbytes
        self._held = bytearray()
        self._stream: ObjectWriter | None = None

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    @property
    def spooled(self) -> bytes:
        return bytes(self._held)

    def preallocate(self, nbytes: int) -> None:
        """Begin the stream at once where ``nbytes`` more are too much to hold; see ``Preallocates``."""
        if self._stream is None and len(self._held) + nbytes > self._spool_nbytes:
            self._stream = self._open_stream()
            if self._held:
                self._stream.write(self._held)
            self._held = bytearray()

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        view = chunk_bytes(chunk)
        self.preallocate(len(view))
        if self._stream is not None:
            return self._stream.write(view)
        self._held += view
        advance(len(view))
        return len(view)

    def tell(self) -> int:
        return self._stream.tell() if self._stream is not None else len(self._held)
