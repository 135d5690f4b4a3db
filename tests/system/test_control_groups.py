"""What control groups of either version tell, by files as they write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_distrib.system import control_groups

Files = dict[str, str]
NO_GROUP: Files = {"proc/vmstat": "nr_free 1\noom_kill 9\n", "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2 kB\n"}
VERSION_2: Files = NO_GROUP | {
    "proc/self/cgroup": "0::/a/b\n",
    "mount/a/b/memory.events": "oom_kill 3\n",
    "mount/a/b/memory.events.local": "low 0\noom_kill 2\n",
    "mount/a/b/memory.max": "max\n",
    "mount/a/b/memory.current": "10\n",
    "mount/a/memory.max": "1000\n",
    "mount/a/memory.current": "900\n",
    "mount/a/memory.stat": "anon 500\ninactive_file 300\n",
    "mount/a/b/cpu.max": "max 100000\n",
    "mount/a/cpu.max": "150000 100000\n",
}
IN_A_CONTAINER: Files = NO_GROUP | {
    "proc/self/cgroup": "0::/not/here\n",
    "mount/memory.events": "oom_kill 3\n",
    "mount/memory.max": "8\n",
    "mount/memory.current": "9\n",
    "mount/cpu.max": "10000 100000\n",
}
VERSION_1: Files = NO_GROUP | {
    "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
    "mount/memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n",
    "mount/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
    "mount/memory/a/memory.usage_in_bytes": "100\n",
    "mount/cpu/a/cpu.cfs_quota_us": "-1\n",
    "mount/cpu/a/cpu.cfs_period_us": "100000\n",
    "mount/cpu/cpu.cfs_quota_us": "300000\n",
    "mount/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (0, 0, 1 << 62, 8)),
        (NO_GROUP, (9, 0, 2048, 8)),
        (VERSION_2, (2, 1000, 400, 2)),
        (IN_A_CONTAINER, (3, 8, 0, 1)),
        (VERSION_1, (1, 0, 2048, 3)),
    ],
    ids=["nothing", "no group", "version 2", "in a container", "version 1"],
)
def test_limits_of_any_group_above_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Files, expected: tuple[int, ...]
) -> None:
    """Kills, limit and free memory in bytes, and cores."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    where = tmp_path / "proc", tmp_path / "mount"
    assert expected == (
        control_groups.out_of_memory_kills(*where),
        control_groups.memory_limit_bytes(*where),
        control_groups.free_memory_bytes(*where),
        control_groups.cores(*where),
    )


def test_something_is_known_here() -> None:
    assert 0 < control_groups.free_memory_bytes() <= 1 << 62
    assert 0 < control_groups.cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028"])
def test_groups_whose_names_hold_another_separator_than_the_systems_are_told_apart(
    tmp_path: Path, separator: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_bytes(f"4:memory:/job{separator}A\n0::/\n".encode())

    assert control_groups.memberships(tmp_path) == [("memory", f"/job{separator}A"), ("", "/")]
