"""What a rank sees when a save or load fails: one error, which can be caught as what its cause is."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest
import torch.distributed.checkpoint as torch_dcp
from ray.exceptions import RayTaskError

from ray_dcp.errors import CheckpointNotFoundError, ConfigError, StalledError, StoreError, UnknownSchemeError
from ray_dcp.protocol.exception import CheckpointException, RankFailure, UntoldSaveError


class OnlyHereError(LookupError):
    def __init__(self, *, needed: int) -> None:
        super().__init__(f"needs {needed}")


def failed(cause: BaseException) -> CheckpointException:
    failure = RankFailure.from_exception(cause, rank=1, phase="open")
    return CheckpointException("load", "/dir/step-1", [failure])


CAUGHT_AS = [
    (CheckpointNotFoundError("/dir", "nothing is there"), (FileNotFoundError, OSError)),
    (UnknownSchemeError("unknown scheme", url="hdfsx://a"), (ValueError, OSError)),
    (ConfigError("keep_last", "is negative"), (ValueError,)),
    (KeyError("w"), (KeyError, LookupError)),
    (OnlyHereError(needed=3), (LookupError,)),
    (RecursionError("too deep"), (RuntimeError,)),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"), (ValueError,)),
    (PermissionError(13, "denied", "/dir"), (PermissionError, OSError)),
]


@pytest.mark.parametrize(
    "carry",
    [
        lambda error: error,
        lambda error: pickle.loads(pickle.dumps(error)),
        lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
        copy.deepcopy,
        lambda error: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error)))),
    ],
    ids=["raised", "pickle", "cloudpickle", "deepcopy", "twice"],
)
@pytest.mark.parametrize(("cause", "kinds"), CAUGHT_AS, ids=lambda one: type(one).__name__)
def test_it_is_also_the_built_in_error_that_the_cause_is(cause, kinds, carry):
    arrived = carry(failed(cause))
    for kind in (*kinds, CheckpointException, torch_dcp.CheckpointException):
        with pytest.raises(kind):
            raise arrived
    assert type(arrived).__name__ == "CheckpointException"
    assert str(arrived) == str(failed(cause))
    assert (arrived.phase, arrived.failed_ranks) == ("open", (1,))


@pytest.mark.parametrize(("cause", "kinds"), CAUGHT_AS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("tell", [lambda error: error, lambda error: UntoldSaveError.told_by(error, "load", None)])
def test_ray_gives_it_to_who_has_called_an_actor_as_all_that_it_is(cause, kinds, tell):
    """Ray makes a class that is both its own error and this one."""
    raised = RayTaskError("save", "traceback", tell(failed(cause)))
    for arrived in (raised, pickle.loads(pickle.dumps(raised))):
        for kind in (*kinds, CheckpointException, torch_dcp.CheckpointException, RayTaskError):
            with pytest.raises(kind) as caught:
                raise arrived.as_instanceof_cause()
            assert (caught.value.phase, caught.value.failed_ranks) == ("open", (1,))


@pytest.mark.parametrize(
    "cause",
    [StopIteration(), StalledError(group="g", rank=0, phase="write", stalled_s=1.0), KeyboardInterrupt()],
    ids=lambda cause: type(cause).__name__,
)
def test_it_is_nothing_that_means_something_to_python_or_to_a_wait(cause):
    """``upload_completion.result(timeout=5)`` raises TimeoutError while the save goes on."""
    assert type(failed(cause)) is CheckpointException


@pytest.mark.parametrize(
    ("kind", "phase", "said"),
    [("load", "plan", ""), ("load", "read", "may be filled"), ("load", "restore", "are filled"), ("save", "write", "")],
)
def test_a_failed_load_says_when_tensors_have_changed(kind, phase, said):
    failure = RankFailure.from_exception(ValueError("no"), rank=0, phase=phase)
    text = str(CheckpointException(kind, "/dir", [failure]).args[0])
    assert ("filled" in text) == bool(said)
    assert said in text


def store_error() -> StoreError:
    try:
        try:
            raise OSError(28, "No space left on device", "/dir/temporary")
        except OSError as error:
            raise StoreError("cannot put", url="/dir", key="x") from error
    except StoreError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "facts"),
    [
        (store_error(), (28, "No space left on device", "/dir/x")),
        (OSError(5, "Input/output error", "/dir/x"), (5, "Input/output error", "/dir/x")),
        (CheckpointNotFoundError("/dir", "nothing is there"), (2, "No such file or directory", "/dir")),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("tell", [lambda error: error, lambda error: UntoldSaveError.told_by(error, "load", None)])
def test_an_os_error_behind_it_gives_it_errno_wherever_it_arrives(cause, facts, tell):
    error = tell(failed(cause))
    by_ray = RayTaskError("save", "traceback", error)
    for arrived in (
        error,
        pickle.loads(pickle.dumps(error)),
        by_ray.as_instanceof_cause(),
        pickle.loads(pickle.dumps(by_ray)).as_instanceof_cause(),
    ):
        assert (arrived.errno, arrived.strerror, arrived.filename) == facts
    assert not hasattr(tell(failed(ValueError("no"))), "errno")


def test_ray_gives_a_stores_error_with_errno_too():
    arrived = pickle.loads(pickle.dumps(RayTaskError("save", "traceback", store_error()))).as_instanceof_cause()
    assert (arrived.errno, arrived.strerror, arrived.filename) == (28, "No space left on device", "/dir/x")
