"""The elastic job as its users start it: `make demo`, and submitted to a running cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from ray_dcp.catalog.listing import list_checkpoints
from tests.slack import within

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
T = TypeVar("T")
JOB = REPOSITORY / "jobs" / "elastic_train.py"
_FAST = ["--steps", "60", "--min-step-seconds", "0.1"]


@contextmanager
def started_job(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The job as a child process, whose temporary files all go to ``folder``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    job = subprocess.Popen(
        [sys.executable, str(JOB), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"TMPDIR": str(folder)},
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(timeout=within(60))


def run_job(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    with started_job(folder, "--json", str(folder / "result.json"), *arguments) as job:
        output, _ = job.communicate(timeout=within(300))
    assert job.returncode == 0, output
    return json.loads((folder / "result.json").read_text()), output


def workers_over_time(result: dict[str, Any]) -> list[int]:
    return [stretch["world_size"] for stretch in result["stretches"]]


@pytest.mark.parametrize(
    ("kill", "workers", "expected", "more"),
    [
        ("step", ("1", "2"), [2, 1, 2], ["--async-save"]),
        pytest.param("save", ("1", "3"), [3, 2, 3], [], marks=pytest.mark.soak),
    ],
)
def test_a_run_that_loses_a_node_ends_as_if_it_had_not(
    kill: str, workers: tuple[str, str], expected: list[int], more: list[str], tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    arguments = (*_FAST, *more, "--kill", kill, "--workers", *workers, "--storage", str(storage))
    result, output = run_job(tmp_path, *arguments)

    assert workers_over_time(result) == expected, output
    assert result["comparison"]["max_relative_deviation"] < 1e-5
    assert result["comparison"]["steps_off"] == result["comparison"]["steps_missing"] == []
    lost, grown = result["resumes"]
    # Without the callback Ray waits a minute for the lost node's worker.
    assert lost["seconds"] < within(50)
    if kill == "save":
        # Nobody saw the checkpoint that the node died over; the one before it was whole.
        assert lost["step"] == 15
        assert lost["steps_repeated"] == 5
    else:
        assert lost["steps_repeated"] >= 1
    assert lost["step"] % 5 == grown["step"] % 5 == 0
    assert result["checkpoint_id"].endswith("step-00000060")
    assert [info.step for info in list_checkpoints(Path(result["checkpoint_id"]).parent)] == list(range(5, 61, 5))
    assert "killed a node" in output
    assert "grown back" in output


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_stopped_leaves_nothing_behind(sent: signal.Signals) -> None:
    # A short name: Ray's sockets are to be in there as well.
    with tempfile.TemporaryDirectory(prefix="tj-") as folder, started_job(Path(folder), "--workers", "1", "2") as job:
        mine = psutil.Process(job.pid)
        children: set[psutil.Process] = set()

        def raylet() -> psutil.Process | None:
            children.update(mine.children(recursive=True))
            return next((child for child in children if child.name() == "raylet"), None)

        wait_for("raylet", raylet)
        job.send_signal(sent)
        output, _ = job.communicate(timeout=within(60))
        # Ray has a handler of its own for SIGTERM, which exits with 1.
        assert job.returncode in (128 + sent, 1), output
        assert [child for child in children if still_runs(child)] == []
        assert os.listdir(folder) == []


def still_runs(process: psutil.Process) -> bool:
    """Not so one that has ended and that nobody asked for its exit code: in a container process 1 may never ask."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port(taken: set[int]) -> int:
    """A port that nobody listens on, above those that Ray gives to workers."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = int(found.getsockname()[1])
        if port > 20000 and port not in taken:
            taken.add(port)
            return port


@pytest.fixture
def jobs_address() -> Iterator[str]:
    """Where the Jobs API is of a cluster that was started from the shell."""
    taken: set[int] = set()
    dashboard = free_port(taken)
    with tempfile.TemporaryDirectory(prefix="rj-", ignore_cleanup_errors=True) as folder:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={folder}"]
        command += ["--num-cpus=2", "--object-store-memory=100000000", f"--dashboard-port={dashboard}"]
        for option in ("port", "metrics-export-port", "ray-client-server-port", "dashboard-agent-listen-port"):
            command.append(f"--{option}={free_port(taken)}")
        settings = {"RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | settings
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield f"http://127.0.0.1:{dashboard}"
        finally:
            children = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            head.wait(timeout=within(60))
            _, alive = psutil.wait_procs(children, timeout=10)
            for child in alive:
                child.kill()


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 60) -> T:
    """The first answer of ``look`` that is not None."""
    deadline = time.monotonic() + within(timeout_s)
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:g} s"
        time.sleep(0.05)
    return found


def connected(address: str) -> JobSubmissionClient | None:
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError):
        return None


def test_the_job_can_be_submitted_to_a_running_cluster(
    jobs_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    client = wait_for("Jobs API", lambda: connected(jobs_address))
    arguments = ["--address", "auto", "--workers", "1", "1", "--steps", "20", "--min-step-seconds", "0.05"]
    arguments += ["--storage", str(tmp_path / "storage"), "--json", str(tmp_path / "result.json")]
    job = client.submit_job(
        entrypoint=" ".join([sys.executable, "jobs/elastic_train.py", *arguments]),
        runtime_env={"working_dir": str(REPOSITORY)},
    )

    def ended() -> JobStatus | None:
        status = client.get_job_status(job)
        return status if status.is_terminal() else None

    status = wait_for("end of the job", ended, timeout_s=200)
    logs = client.get_job_logs(job)
    assert status == JobStatus.SUCCEEDED, logs
    result = json.loads((tmp_path / "result.json").read_text())
    # A worker is killed there, which Ray starts again by itself.
    assert workers_over_time(result) == [1, 1]
    assert result["comparison"]["max_relative_deviation"] < 1e-5
    assert "killed a worker" in logs
