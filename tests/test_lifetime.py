"""A process ends, or is forked, while a save goes on behind it. Each script is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import ray_dcp as dcp
from tests.slack import within

_WRITERS = """
    import os, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import ray_dcp as dcp


    class AtTheEnd(dcp.StoreWriter):
        '''Begins to write when the main thread has ended, and has a pool do it.'''

        def write_data(self, plan, planner):
            while threading.main_thread().is_alive() and not ENDS.is_set():
                time.sleep(0.01)
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(super().write_data, plan, planner).result()


    class Gated(dcp.StoreWriter):
        def write_data(self, plan, planner):
            assert GATE.wait(30)
            return super().write_data(plan, planner)


    class Full(dcp.StoreWriter):
        def write_data(self, plan, planner):
            raise OSError(28, "No space left on device")


    def filled(place):
        state = {"w": torch.zeros(4)}
        dcp.load(state, checkpoint_id=place, no_dist=True)
        return state["w"].tolist()


    GATE, ENDS = threading.Event(), threading.Event()
    ROOT = sys.argv[1]
"""


def run(script: str, tmp_path: Path, *, returns: int = 0) -> tuple[str, str]:
    """What the script prints, and what on stderr."""
    whole = textwrap.dedent(_WRITERS) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", whole, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=within(120),
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == returns, done.stderr
    return done.stdout, done.stderr


def loaded(place: Path) -> list[float]:
    state = {"w": torch.zeros(4)}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    return state["w"].tolist()


def test_a_save_and_a_sweep_under_way_are_finished_when_the_process_ends_and_nothing_is_said(tmp_path):
    left = tmp_path / "step-00000009" / "__0_0_0000000000000001deadbeef.distcp"
    left.parent.mkdir()
    left.write_bytes(b"of a run long ago")
    os.utime(left, (1.0, 1.0))
    script = """
        from ray_dcp.maintenance.sweep import removal

        list_own_folders = removal.list_own_folders

        def slowly(store):
            while threading.main_thread().is_alive() and not ENDS.is_set():
                time.sleep(0.01)
            return list_own_folders(store)

        removal.list_own_folders = slowly
        dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{ROOT}/step-00000001", no_dist=True)
        dcp.async_save({"w": torch.full((4,), 2.0)}, storage_writer=AtTheEnd(f"{ROOT}/step-00000002"), no_dist=True)
        threading._register_atexit(ENDS.set)
    """
    assert run(script, tmp_path) == ("", "")
    assert loaded(tmp_path / "step-00000002") == [2.0] * 4
    assert not left.exists()


def test_a_failure_that_nobody_saw_is_printed_with_its_cause_when_the_process_ends(tmp_path):
    script = """
        try:
            dcp.RankPool(object).start()
        except dcp.errors.GroupError as error:
            print(error)
        dcp.async_save({"w": torch.ones(4)}, storage_writer=Full(f"{ROOT}/seen"), no_dist=True).exception()
        dcp.async_save({"w": torch.ones(4)}, storage_writer=Full(f"{ROOT}/c"), no_dist=True)
        sys.exit(3)
    """
    printed, told = run(script, tmp_path, returns=3)
    assert "not connected to Ray. Call ray.init() first" in printed  # said by a pool
    assert told.startswith("ray_dcp: an asynchronous save failed, and nobody had asked")
    assert told.count(f"save of {tmp_path}/c failed in phase 'write': rank 0: OSError") == 1
    assert told.count("Traceback") == 1  # the writer's
    assert "seen" not in told
    assert "No space left on device" in told


def test_a_fork_saves_and_loads_by_itself_and_waits_for_nothing_of_its_parent(tmp_path):
    script = """
        import gc, multiprocessing
        from ray_dcp.gc_pause import collector_paused
        from ray_dcp.errors import ForkedProcessError

        fork = multiprocessing.get_context("fork")

        def in_child(response, told):
            seen = []
            for look in (response.result, response.upload_completion.exception):
                try:
                    seen.append(type(look(20)).__name__)
                except ForkedProcessError as error:
                    seen.append((error.pid == os.getppid(), "goes on there" in str(error)))
            dcp.save({"w": torch.full((4,), 2.0)}, checkpoint_id=f"{ROOT}/child", no_dist=True)
            dcp.async_save({"w": torch.full((4,), 3.0)}, checkpoint_id=f"{ROOT}/behind", no_dist=True).result(60)
            seen += [filled(f"{ROOT}/child"), filled(f"{ROOT}/behind"), gc.isenabled()]
            dcp.async_save({"w": torch.ones(4)}, storage_writer=Full(f"{ROOT}/full"), no_dist=True)
            told.put(seen)

        class Steps(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, number):
                return torch.tensor(filled(f"{ROOT}/step-00000001"))

        def pause_for_ever():
            with collector_paused():
                paused.set()
                ended.wait()

        paused, ended = threading.Event(), threading.Event()
        dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{ROOT}/step-00000001", no_dist=True)
        threading.Thread(target=pause_for_ever).start()
        paused.wait()
        response = dcp.async_save({"w": torch.ones(4)}, storage_writer=Gated(f"{ROOT}/parent"), no_dist=True)
        told = fork.Queue()
        child = fork.Process(target=in_child, args=(response, told))
        child.start()
        print(told.get(timeout=60))
        child.join(60)
        print(child.exitcode, response.running())
        batches = torch.utils.data.DataLoader(Steps(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        print([batch.sum().item() for batch in batches])
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # by the way that runs atexit
        print(os.waitpid(pid, 0)[1])
        GATE.set()
        ended.set()
        response.result(30)
    """
    printed, told = run(script, tmp_path)
    assert printed.splitlines() == [
        "[(True, True), 'ForkedProcessError', [2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0], True]",
        "0 True",
        "[8.0, 8.0]",
        "0",
    ]
    assert told.count("an asynchronous save failed") == 1
    assert f"{tmp_path}/full" in told
    assert loaded(tmp_path / "parent") == [1.0] * 4
