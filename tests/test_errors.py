"""Every error of the package crosses a process boundary unchanged."""

import copy
import importlib
import pickle
import pkgutil

import cloudpickle
import pytest

import ray_dcp
from ray_dcp import errors
from ray_dcp.errors import RayDcpError
from ray_dcp.protocol.exception import CheckpointException, RankFailure, UntoldSaveError
from ray_dcp.staging import buffer_errors

DEAD = RankFailure(3, "write", "RankLostError", "its process died", "")
EXAMPLES = [
    errors.RayDcpError("anything"),
    errors.ConfigError("keep_last", "is negative"),
    errors.NoCheckpointIdError("checkpoint_id", "is empty"),
    errors.StoreError("no space left", url="s3://b/p", key="x"),
    errors.ObjectNotFoundError("nothing there", url="/dir", key=".metadata"),
    errors.BucketNotFoundError("there is no bucket 'b'", url="s3://b/run"),
    errors.ObjectTooShortError("4 are missing", url="/dir", key="x"),
    errors.StorePermissionError("denied", url="/dir"),
    errors.StoreUnavailableError("cannot put: slow down", url="s3://b/p", key="x", num_attempts=5, elapsed_s=12.0),
    errors.NotAFolderError("a file", url="/dir/file"),
    errors.UnknownSchemeError("unknown scheme", url="hdfsx://a"),
    errors.CheckpointNotFoundError("/dir", "nothing is there"),
    errors.CorruptCheckpointError("checksum", file="__0_0_ab.distcp", fqn="w", offset=64, nbytes=100),
    errors.UnsafeDataError("os.system", file=".metadata", fqn="w"),
    errors.FormatVersionError(found=2, supported=1, file="manifest.parquet"),
    errors.StateDictError("does not fit", ["w: shape", "b: missing"]),
    errors.SupersededError(checkpoint_id="/dir/step-1", attempt="0" * 24, newer="1" * 24),
    errors.SupersededError(checkpoint_id="/dir/step-1", attempt="0" * 24, newer="1" * 24, world_size=1),
    errors.EarlierSaveError(ValueError("disk full")),
    UntoldSaveError("save", "/dir/step-1", [DEAD], "load", None),
    errors.ForkedProcessError("its save goes on there", pid=17),
    buffer_errors.StagingError("anything"),
    buffer_errors.StagingMemoryError(nbytes=1 << 30, available_nbytes=1 << 20, reason="it would not fit"),
    buffer_errors.StagingLostError(path="/proc/17/fd/5", reason="it is another file now"),
    buffer_errors.StagingBusyError(num_buffers=2, waited_s=3.0),
    buffer_errors.SavesInFlightError(max_in_flight=2, busy_ranks=[0, 3]),
    buffer_errors.TornStagingError(["model.w", "optimizer.step"]),
    buffer_errors.SaveSkippedError(max_in_flight=1, busy_ranks=[1]),
    buffer_errors.StepNotKeptError(reason="rank 1 has no agent on its node (RAY_DCP_AGENTS=0)"),
    errors.GroupError("something", group="run-7"),
    errors.JoinTimeoutError(group="run-7", world_size=4, missing_ranks=[1, 3], timeout_s=60),
    errors.RankConflictError("joined twice", group="run-7", rank=2),
    errors.StaleGenerationError(group="run-7", generation=1, current=2),
    errors.RankLostError(group="run-7", lost={2: "killed", 0: "its node died"}),
    errors.OutOfStepError(group="run-7", rank=2, call="save of /step-2", others=[0, 1], others_call="save of /step-1"),
    errors.RankAbsentError(group="run-7", rank=2, kind="save", waited_s=1800.0),
    errors.StalledError(group="run-7", rank=2, phase="write", stalled_s=600.0, nbytes=1 << 30),
    errors.CoordinatorLostError("killed", group="run-7"),
    errors.NotEnoughResourcesError(group="run-7", min_ranks=4, fit=2, resources_per_rank={"CPU": 1.0}),
    errors.UnfinishedSavesError(group="run-7", unfinished={1: "the save of /c"}, timeout_s=5.0),
    CheckpointException(
        "save", "/dir/step-1", [RankFailure(1, "write", "StoreError", "no space left", "Traceback ..."), DEAD]
    ),
]
by_name = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def all_error_classes() -> set[type[RayDcpError]]:
    """Of every module in the package, imported or not until now."""
    for module in pkgutil.walk_packages(ray_dcp.__path__, "ray_dcp."):
        importlib.import_module(module.name)
    found, rest = set(), [RayDcpError]
    while rest:
        found.add(one := rest.pop())
        rest += one.__subclasses__()
    ours = {one for one in found if one.__module__.startswith("ray_dcp.")}
    # A CheckpointException that can be caught as its cause is made when there is one; see protocol/test_failures.py.
    return {one for one in ours if getattr(importlib.import_module(one.__module__), one.__name__) is one}


def test_every_error_class_has_an_example():
    """A new class is added to EXAMPLES, and so to all tests here."""
    assert {type(error) for error in EXAMPLES} == all_error_classes()


@by_name
@pytest.mark.parametrize(
    "carry",
    [
        lambda error: pickle.loads(pickle.dumps(error)),
        lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
        copy.copy,
        copy.deepcopy,
        lambda error: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error)))),
    ],
    ids=["pickle", "cloudpickle", "copy", "deepcopy", "twice"],
)
def test_an_error_arrives_as_itself(error, carry):
    arrived = carry(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert repr(arrived) == repr(error)
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)


@by_name
def test_a_note_arrives_too(error):
    noted = copy.copy(error)
    noted.add_note("while saving step 3")
    assert pickle.loads(pickle.dumps(noted)).__notes__ == ["while saving step 3"]


@by_name
def test_facts_are_attributes_and_in_the_message(error):
    for value in vars(error).values():
        if isinstance(value, str) and value:
            assert value in str(error)


@by_name
def test_an_exit_code_is_one_of_those_in_the_help(error):
    from ray_dcp.cli.main import EXIT_CODES

    assert f"\n  {error.exit_code}  " in EXIT_CODES


def test_builtin_bases_are_what_a_caller_would_catch():
    with pytest.raises(FileNotFoundError):
        raise errors.CheckpointNotFoundError("/dir", "nothing is there")
    with pytest.raises(PermissionError):
        raise errors.StorePermissionError("denied", url="/dir")
    with pytest.raises(TimeoutError):
        raise errors.JoinTimeoutError(group="g", world_size=1, missing_ranks=[0], timeout_s=1)


def test_all_problems_of_a_state_dict_are_in_the_message():
    error = errors.StateDictError("does not fit", ["w: shape", "b: missing"])
    assert str(error) == "does not fit\n  - w: shape\n  - b: missing"


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = {word for word in errors.__doc__.split() if word.endswith(("Error", "Exception"))} - {"(Exception)"}
    assert {error.__name__ for error in all_error_classes()} <= drawn


def test_what_a_url_says_beside_its_place_is_in_no_message():
    url = "s3://AKIA:se/cr%2Fet@bucket/run/step-1?endpoint_override=host:9000&session_token=t0k"
    for error in (
        errors.StoreError("denied", url=url, key="x"),
        errors.CheckpointNotFoundError(url, "nothing is there"),
        errors.CorruptCheckpointError("checksum", file=url),
        errors.UnsafeDataError("os.system", file=url),
        errors.FormatVersionError(found=2, supported=1, file=url),
        errors.SupersededError(checkpoint_id=url, attempt="0" * 24, newer="1" * 24),
        CheckpointException("save", url, [DEAD]),
    ):
        assert "s3://bucket/run/step-1" in str(error)
        assert not any(word in str(error) for word in ("AKIA", "cr%2Fet", "endpoint", "t0k", "?"))


def test_a_path_is_shown_as_it_is():
    for path in ("/runs/what?/a@b:c", "file:///runs/what?x=1", "./a?b"):
        assert errors.without_keys(path) == path


FULL = OSError(28, "No space left on device", "/dir/.ray_dcp_0.tmp")


def raised(error, cause):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (raised(errors.StoreError("full", url="/dir", key="x"), FULL), (28, FULL.strerror, "/dir/x")),
        (errors.StoreError("closed", url="s3://k:s@b/p?x=1"), (None, None, "s3://b/p")),
        (
            raised(
                errors.StoreUnavailableError("no", url="/d", num_attempts=2, elapsed_s=1.0),
                ConnectionError(104, "reset"),
            ),
            (104, "reset", "/d"),
        ),
        (
            raised(errors.ObjectNotFoundError("gone", url="/dir", key="x"), NotADirectoryError(20, "Not a directory")),
            (2, "No such file or directory", "/dir/x"),
        ),
        (errors.CheckpointNotFoundError("/dir", "nothing is there"), (2, "No such file or directory", "/dir")),
        (
            raised(errors.StorePermissionError("denied", url="/dir"), PermissionError(1, "Operation not permitted")),
            (1, "Operation not permitted", "/dir"),
        ),
        (errors.StorePermissionError("denied", url="s3://b"), (13, "Permission denied", "s3://b")),
        (errors.NotAFolderError("a file", url="/dir/file"), (20, "Not a directory", "/dir/file")),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
def test_what_the_operating_system_has_said_is_on_it_and_travels(error, facts):
    """A program looks at ``errno``, as it does with an ``OSError`` of Python's."""
    for carry in (lambda one: one, lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy):
        arrived = carry(carry(error))
        assert (arrived.errno, arrived.strerror, arrived.filename) == facts
        assert str(arrived) == str(error)
