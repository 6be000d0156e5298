"""What memory can still be taken, as procfs and the control groups say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_dcp.staging.host_memory import available_nbytes

MIB = 1 << 20


def system(root: Path, **files: str) -> str:
    """A file for each name, in which two underscores stand for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


MACHINE = {"proc__meminfo": "MemTotal: 999999 kB\nMemFree: 5 kB\nMemAvailable:    4096 kB\nHugePages_Total: 0\n"}


def test_of_this_machine():
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < available_nbytes() < total


def test_where_nothing_says_so(tmp_path):
    assert available_nbytes(str(tmp_path)) is None


def test_of_the_machine_alone(tmp_path):
    assert available_nbytes(system(tmp_path, **MACHINE)) == 4 * MIB


@pytest.mark.parametrize("seen_as", ["top", "folder", "folder above"])
def test_a_limit_of_version_2(tmp_path, seen_as):
    """A container sees its own group as the top, or under its name; a limit may be that of a group above."""
    folder = {"top": "", "folder": "jobs__ours__", "folder above": "jobs__"}[seen_as]
    root = system(
        tmp_path,
        **MACHINE,
        proc__self__cgroup="0::/jobs/ours\n",
        **{
            f"sys__fs__cgroup__{folder}memory.max": f"{5 * MIB}\n",
            f"sys__fs__cgroup__{folder}memory.current": f"{4 * MIB}\n",
            f"sys__fs__cgroup__{folder}memory.stat": f"anon 17\ninactive_file {MIB}\nactive_file {MIB // 2}\n",
        },
    )
    assert available_nbytes(root) == 2 * MIB + MIB // 2


def test_no_limit_of_version_2(tmp_path):
    group = {"sys__fs__cgroup__memory.max": "max\n", "sys__fs__cgroup__memory.current": f"{9 * MIB}\n"}
    assert available_nbytes(system(tmp_path, **MACHINE, proc__self__cgroup="0::/\n", **group)) == 4 * MIB


@pytest.mark.parametrize(("limit", "left"), [(6 * MIB, 3 * MIB), (2**63 - 4096, 4 * MIB), (MIB, 0)])
def test_a_limit_of_version_1(tmp_path, limit, left):
    group = "sys__fs__cgroup__memory__ours__memory."
    root = system(
        tmp_path,
        **MACHINE,
        proc__self__cgroup="8:cpu,cpuacct:/\n4:memory:/ours\n0::/\n",
        **{f"{group}limit_in_bytes": str(limit), f"{group}usage_in_bytes": str(4 * MIB),
           f"{group}stat": f"total_inactive_file {MIB}\ntotal_active_file 0\n"},
    )  # fmt: skip
    assert available_nbytes(root) == left
