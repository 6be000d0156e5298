"""The parts of the comparison that decide what counts as right, and as possible."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

RANK_1_OF_2 = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)


@pytest.fixture
def part(side_by_side):
    return side_by_side


def held(tensors):
    return {
        f"layer.{number}.weight": SimpleNamespace(to_local=lambda tensor=tensor: tensor)
        for number, tensor in enumerate(tensors)
    }


@pytest.mark.parametrize("layout", ["ROWS", "COLUMNS"])
def test_a_value_in_a_wrong_place_is_found(part, layout):
    states = part("states")
    layout = states.Layout[layout]
    state = states.Tensors(num_tensors=3, rows=8, columns=6)
    right = [state._local_values(number, layout, RANK_1_OF_2) for number in range(3)]
    assert state.differences(held(right), layout, RANK_1_OF_2) == []

    swapped = [right[1], right[0], right[2]]
    assert state.differences(held(swapped), layout, RANK_1_OF_2) == ["layer.0.weight", "layer.1.weight"]
    rolled = [right[0], right[1], right[2].roll(1, dims=layout.value)]
    assert state.differences(held(rolled), layout, RANK_1_OF_2) == ["layer.2.weight"]
    unread = [right[0], torch.full_like(right[1], torch.nan), right[2]]
    assert state.differences(held(unread), layout, RANK_1_OF_2) == ["layer.1.weight"]


def test_no_scalar_of_a_template_is_right_before_the_load(part):
    states = part("states")
    state = states.Scalars(6)
    template = state.template(states.Layout.ROWS, RANK_1_OF_2)
    assert state.differences(template, states.Layout.ROWS, RANK_1_OF_2) == list(template)
    values = state.values(states.Layout.ROWS, RANK_1_OF_2)
    assert state.differences(values, states.Layout.ROWS, RANK_1_OF_2) == []


def measure(part, limit, **seconds_by_side):
    results, probes = part("results"), part("probes")

    def sample(seconds):
        return results.Sample(seconds, extra_nbytes=0, cpu_s=0.0, differences=())

    figures = {
        side: results.Figure([sample(s) for s in runs], warm_up=sample(9)) for side, runs in seconds_by_side.items()
    }
    return results.Measure("save", 2**30, probes.Limit[limit], [1.2, 1.0, 1.4], figures)


def test_ratios_say_how_many_times_as_fast_ray_dcp_is(part):
    measured = measure(part, "WRITE", torch=[3.0, 4.0, 9.0], ray_dcp=[2.0, 1.5, 8.0])
    assert measured.ratio_of_minima("torch") == 2.0
    assert measured.ratio_of_medians("torch") == 2.0


def test_shares_of_the_limit_are_of_the_best_runs_and_of_the_medians(part):
    measured = measure(part, "WRITE", ray_dcp=[3.0, 2.0, 8.0])
    assert measured.percent_by_minima("ray_dcp") == pytest.approx(50)
    assert measured.percent_by_medians("ray_dcp") == pytest.approx(40)


def test_a_figure_above_its_limit_is_flagged_but_not_one_that_has_none(part):
    assert measure(part, "WRITE", ray_dcp=[0.9]).beats_limit("ray_dcp")
    assert not measure(part, "WRITE", ray_dcp=[0.96]).beats_limit("ray_dcp")
    assert not measure(part, "COPY", ray_dcp=[0.1]).beats_limit("ray_dcp")


def test_the_work_of_other_programs_is_noticed(part):
    machine = part("machine")
    company = machine.Company(own_load=10**6)
    assert company.objections_at_start() == []
    assert company.others_cpus() >= 0
    assert machine.Company(own_load=-1).objections_at_start() != []


def test_what_a_process_uses_is_counted_from_the_start_on(part, tmp_path):
    bytes_on_disk = tmp_path / "bytes"
    bytes_on_disk.write_bytes(bytes(10**6))
    use = part("process_use").ProcessUse()
    before = use.so_far()
    memory = bytearray(b"x" * 2**26)
    assert bytes_on_disk.read_bytes()
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    used = use.so_far()
    assert used.extra_nbytes >= before.extra_nbytes + 0.9 * len(memory)
    assert 10**6 <= used.read_nbytes - before.read_nbytes < 1.5 * 10**6
    assert 0.05 <= used.cpu_s < 60


def test_another_process_can_be_watched(part):
    child = subprocess.Popen([sys.executable, "-c", "input(); sum(range(10**6)); print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        use = part("process_use").ProcessUse(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert use.so_far().cpu_s > 0.001
    finally:
        child.communicate(b"\n")


def test_a_childs_work_is_its_familys(part):
    child = subprocess.Popen([sys.executable, "-c", "input(); sum(range(10**6)); print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        alone, family = part("process_use").ProcessUse(), part("process_use").FamilyUse()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        own = alone.so_far()
        assert family.so_far().cpu_s > own.cpu_s + 0.001
    finally:
        child.communicate(b"\n")
    assert family.so_far().cpu_s > 0, "an ended child is left out"


def test_memory_that_is_shared_counts_apart(part):
    kept_nbytes = part("process_use").kept_nbytes
    private, shared = kept_nbytes(os.getpid())
    with mmap.mmap(-1, 2**24) as memory:
        memory[:] = b"x" * 2**24
        more_private, more_shared = kept_nbytes(os.getpid())
    assert 0.9 * 2**24 < more_shared - shared < 1.5 * 2**24
    assert more_private - private < 2**24


def test_pieces_are_counted_for_as_long_as_it_goes_on(part):
    left = iter([True, True, False])
    assert part("loops").rate_while(lambda: None, lambda: next(left)) > 0
    assert next(left, "all asked") == "all asked"
    for make in part("loops").LOOPS.values():
        assert make()() is not None


def load(part, *, needed, counted, reported):
    used = part("process_use").Used(extra_nbytes=0, cpu_s=0.0, read_nbytes=counted)
    return part("rank").Load(part("timed_call").TimedCall(0, 1, used), [], needed, reported)


def test_what_was_read_is_the_larger_of_what_the_kernel_counts_and_what_a_side_reports(part):
    bytes_read = part("spread").bytes_read
    modest = bytes_read([load(part, needed=100, counted=200, reported=100) for _ in range(8)])
    assert modest.read_per_needed == 2
    assert modest.reported_nbytes == 800
    mapped = bytes_read([load(part, needed=100, counted=0, reported=150) for _ in range(8)])
    assert mapped.read_per_needed == 1.5
    silent = bytes_read([load(part, needed=100, counted=800, reported=None) for _ in range(8)])
    assert silent.read_per_needed == 8
    assert silent.reported_nbytes is None
