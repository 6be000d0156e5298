"""The elastic job as its users start it: `make demo`, and submitted to a running cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


# The same by day in a cluster that others have started: see below.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kill", "workers", "expected", "more"),
    [("step", ("1", "2"), [2, 1, 2], ["--async-save"]), ("save", ("1", "3"), [3, 2, 3], [])],
)
def test_a_run_that_loses_a_node_ends_as_if_it_had_not(
    kill: str, workers: tuple[str, str], expected: list[int], more: list[str], tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    arguments = (*_FAST, *more, "--kill", kill, "--workers", *workers, "--storage", str(storage))
    result, output = run_job(tmp_path, *arguments)

    assert workers_over_time(result) == expected, output
    require_as_if_no_node_had_been_lost(result, num_steps=60)
    if kill == "save":
        # Nobody saw the checkpoint that the node died over; the one before it was whole.
        lost = result["resumes"][0]
        assert lost["step"] == 15
        assert lost["steps_repeated"] == 5
    assert "killed a node" in output
    assert "grown back" in output


def require_as_if_no_node_had_been_lost(result: dict[str, Any], *, num_steps: int) -> None:
    """The run has lost a node, and grown again, and neither its losses nor its checkpoints show it."""
    assert result["comparison"]["max_relative_deviation"] < 1e-5
    assert result["comparison"]["steps_off"] == result["comparison"]["steps_missing"] == []
    lost, grown = result["resumes"]
    # Without the callback Ray waits a minute for the lost node's worker.
    assert lost["seconds"] < within(50)
    # None, where the next checkpoint was there when the node was gone at last; never more than since the one before.
    assert 0 <= lost["steps_repeated"] < 10
    assert lost["step"] % 5 == grown["step"] % 5 == 0
    assert result["checkpoint_id"].endswith(f"step-{num_steps:08d}")
    committed = [info.step for info in list_checkpoints(Path(result["checkpoint_id"]).parent)]
    assert committed == list(range(5, num_steps + 1, 5))


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


class Cluster:
    """A cluster that is started from the shell, with room for one worker on each node."""

    def __init__(self, folder: str, until_done: ExitStack) -> None:
        self._folder = folder
        self._until_done = until_done
        self._ports: set[int] = set()
        self._settings = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": f"{within(3000):.0f}",
            "RAY_health_check_failure_threshold": "3",
        }
        port, dashboard = free_port(self._ports), free_port(self._ports)
        self.address, self.jobs_address = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        client, agent = free_port(self._ports), free_port(self._ports)
        head = [f"--port={port}", f"--dashboard-port={dashboard}"]
        head += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
        self._start("--head", "--node-ip-address=127.0.0.1", *head)

    def add_node(self) -> None:
        self._start(f"--address={self.address}", f"--dashboard-agent-listen-port={free_port(self._ports)}")

    def _start(self, *arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", *arguments]
        # A folder each, as on two machines: nodes of one folder unpack a job's files over each other's.
        command += ["--object-store-memory=100000000", f"--temp-dir={self._folder}/{len(self._ports)}"]
        command.append(f"--metrics-export-port={free_port(self._ports)}")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with (Path(self._folder) / "nodes.log").open("a") as log:
            node = subprocess.Popen(command, stdout=log, stderr=log, env=environment | self._settings)
        self._until_done.callback(self._end, node)

    def _end(self, node: subprocess.Popen[bytes]) -> None:
        children = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        node.terminate()
        node.wait(timeout=within(60))
        _, alive = psutil.wait_procs(children, timeout=10)
        for child in alive:
            child.kill()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # A short name: Ray's sockets are to be in there as well.
    with (
        tempfile.TemporaryDirectory(prefix="rj-", ignore_cleanup_errors=True) as folder,
        ExitStack() as until_done,
    ):
        yield Cluster(folder, until_done)


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 60, every_s: float = 0.05) -> T:
    """The first answer of ``look`` that is not None."""
    deadline = time.monotonic() + within(timeout_s)
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:g} s"
        time.sleep(every_s)
    return found


def connected(address: str) -> JobSubmissionClient | None:
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError):
        return None


class SubmittedJob:
    """The job in a cluster that was there before it."""

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str) -> None:
        self._client = wait_for("Jobs API", lambda: connected(cluster.jobs_address))
        self._result = folder / "result.json"
        # Its own files and no others: ray_dcp is installed on each node, and compiled.
        program = shutil.copytree(JOB.parent, folder / "program" / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        everything = ["--address", "auto", "--storage", str(folder / "storage"), "--json", str(self._result)]
        self._job = self._client.submit_job(
            entrypoint=" ".join([sys.executable, "jobs/elastic_train.py", *everything, *arguments]),
            runtime_env={"working_dir": str(program.parent)},
        )

    def says(self, words: str) -> bool | None:
        logs = self._client.get_job_logs(self._job)
        assert words in logs or not self._client.get_job_status(self._job).is_terminal(), logs
        return words in logs or None

    def ended(self) -> JobStatus | None:
        status = self._client.get_job_status(self._job)
        return status if status.is_terminal() else None

    def result(self) -> tuple[dict[str, Any], str]:
        status = wait_for("end of the job", self.ended, timeout_s=200, every_s=1)
        logs = self._client.get_job_logs(self._job)
        assert status == JobStatus.SUCCEEDED, logs
        return json.loads(self._result.read_text()), logs


def test_the_job_can_be_submitted_to_a_running_cluster_which_loses_a_node_and_gets_another(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster.add_node()
    # Steps are as slow as leaves time for a node to come meanwhile.
    course = ("--steps", "40", "--min-step-seconds", "0.4", "--async-save")
    job = SubmittedJob(cluster, tmp_path, *course, "--kill-node", "--workers", "1", "2")
    wait_for("training on one worker", lambda: job.says("training goes on with 1 workers"), timeout_s=150, every_s=1)
    cluster.add_node()
    result, logs = job.result()
    assert workers_over_time(result) == [2, 1, 2], logs
    require_as_if_no_node_had_been_lost(result, num_steps=40)
    assert "killed a node" in logs


@pytest.mark.soak
def test_a_worker_that_is_killed_in_a_running_cluster_is_started_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    course = ("--steps", "20", "--min-step-seconds", "0.05")
    result, logs = SubmittedJob(cluster, tmp_path, *course, "--workers", "1", "1").result()
    assert workers_over_time(result) == [1, 1]
    assert result["comparison"]["max_relative_deviation"] < 1e-5
    assert "killed a worker" in logs
