"""The folder of all logs stays below its total: the runs that ended first go, those that go on stay, and nothing else is
touched."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_distrib.agent.ranks.log_file import LogFile
from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import log_folder
from jupyter_distrib.system.log_folder import LogFolder

TOTAL = 1 << 20
OTHER_USER = 12345


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogFolder:
    monkeypatch.setenv(log_folder.TOTAL_VARIABLE, str(TOTAL))
    (tmp_path / "runs").mkdir()
    return LogFolder(tmp_path / "runs")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def add(folder: LogFolder, number: int, size_bytes: int) -> Path:
    """Add the log of a run, written later than that of every lower number."""
    run = folder.path / f"a1b2c3-{number}"
    run.mkdir()
    (run / "rank0.log").write_bytes(b"x" * size_bytes)
    for path in (run / "rank0.log", run):
        os.utime(path, (1000 + number, 1000 + number))
    return run


def go_on(run: Path, held: ExitStack) -> None:
    file = held.enter_context((run / "rank0.log").open("r+b"))
    log_folder.hold(file.fileno())


def left(folder: LogFolder) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.path.glob("a1b2c3-*"))


def test_the_runs_that_ended_first_go_as_far_as_needed(folder: LogFolder) -> None:
    runs = [add(folder, number, TOTAL // 5) for number in range(8)]
    folder.tidy()
    assert left(folder) == [4, 5, 6, 7]
    assert folder.pop_notice() == (
        "the logs of the 4 oldest runs were removed: all logs together may take 1.0 MB (JUPYTER_DISTRIB_LOG_TOTAL_BYTES)"
    )
    with pytest.raises(PoolError, match=r"the logs of run a1b2c3-0 were removed: of all logs the newest are kept"):
        log_folder.check(runs[0])
    log_folder.check(runs[7])
    log_folder.check(folder.path / "a1b2c3-99")  # never wrote anything


def test_it_is_said_once(folder: LogFolder) -> None:
    for number in range(8):
        add(folder, number, TOTAL // 5)
    folder.tidy()
    assert folder.pop_notice()
    assert not folder.pop_notice()
    for number in range(8, 12):
        add(folder, number, TOTAL // 5)
    folder.tidy()
    assert left(folder) == [8, 9, 10, 11]
    assert not folder.pop_notice()


def test_a_run_that_goes_on_stays_however_old_it_is(folder: LogFolder, held: ExitStack) -> None:
    go_on(add(folder, 0, TOTAL // 2), held)
    for number in range(1, 6):
        add(folder, number, TOTAL // 5)
    folder.tidy()
    assert left(folder) == [0, 4, 5]


def test_a_run_of_another_process_stays_too(folder: LogFolder) -> None:
    log = add(folder, 0, TOTAL) / "rank0.log"
    code = (
        "import sys; from jupyter_distrib.system import log_folder\n"
        "file = open(sys.argv[1], 'r+b'); log_folder.hold(file.fileno()); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        folder.tidy()
        assert left(folder) == [0]
        process.kill()
    folder.tidy()
    assert left(folder) == []


def test_where_locks_cannot_tell_nothing_is_removed(folder: LogFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    add(folder, 0, 2 * TOTAL)
    folder.tidy()
    assert left(folder) == [0]
    assert not folder.has_room(100_000, 1_000_000)


def test_while_another_process_removes_logs_this_one_does_not(folder: LogFolder, held: ExitStack) -> None:
    add(folder, 0, 2 * TOTAL)
    lock = held.enter_context((folder.path / "removed-runs.txt").open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder.tidy()
    assert left(folder) == [0]


def test_something_in_the_place_of_the_list_stops_nobody(folder: LogFolder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder.path / "removed-runs.txt").symlink_to(victim)
    add(folder, 0, 2 * TOTAL)
    folder.tidy()
    assert left(folder) == []
    assert victim.read_text() == "precious"


def test_more_runs_than_are_kept_go_whatever_their_size(folder: LogFolder) -> None:
    for number in range(log_folder.KEPT_RUNS + 3):
        add(folder, number, 1)
    folder.tidy()
    assert left(folder)[0] == 3


def test_a_process_that_lives_for_long_looks_for_surplus_runs_however_little_they_print(folder: LogFolder) -> None:
    for number in range(3 * log_folder.KEPT_RUNS):
        log = LogFile(folder.path / f"a1b2c3-{number}" / "rank0.log")
        log.write(b"step\n")
        log.close()

    assert log_folder.KEPT_RUNS <= len(left(folder)) < 1.1 * log_folder.KEPT_RUNS
    assert max(left(folder)) == 3 * log_folder.KEPT_RUNS - 1


def test_foreign_files_links_and_folders_are_neither_followed_nor_removed(folder: LogFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank0.log").write_bytes(b"x" * TOTAL)
    (folder.path / "a1b2c3-100").symlink_to(outside)
    (folder.path / "a1b2c3-101").write_bytes(b"x" * TOTAL)
    for name in ("thesis", "experiment-7", "A1B2C3-7", "a1b2c3-7.old"):
        (folder.path / name).mkdir()
        (folder.path / name / "rank0.log").write_bytes(b"x" * TOTAL)
    mixed = add(folder, 0, TOTAL)
    (mixed / "notes.txt").write_text("precious")
    (mixed / "rank1.log").symlink_to(outside / "rank0.log")
    add(folder, 1, TOTAL)
    before = {path for path in folder.path.rglob("*") if "rank0" not in path.name or "a1b2c3" not in str(path)}

    folder.tidy()

    assert not (mixed / "rank0.log").exists()
    assert left_over(before) == {folder.path / "a1b2c3-1"}
    assert (outside / "rank0.log").stat().st_size == TOTAL


def left_over(before: set[Path]) -> set[Path]:
    return {path for path in before if not os.path.lexists(path)}


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_folders_and_logs_of_another_user_stay(folder: LogFolder) -> None:
    theirs, log = add(folder, 0, TOTAL), add(folder, 1, TOTAL) / "rank0.log"
    os.chown(theirs, OTHER_USER, OTHER_USER)
    os.chown(log, OTHER_USER, OTHER_USER)
    add(folder, 2, TOTAL)
    folder.tidy()
    assert left(folder) == [0, 1]


def test_the_folder_is_looked_into_when_a_part_of_the_total_was_written_and_not_before(
    folder: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    tidy = folder.tidy
    monkeypatch.setattr(folder, "tidy", lambda more=0: (looks.append(more), tidy(more)))
    size = 0
    for _ in range(TOTAL // 2 // 64):
        assert folder.has_room(64, size)
        size += 64
    assert 0 < len(looks) <= 64, "for 8192 writes"


def test_without_a_choice_it_is_a_tenth_of_the_disk_that_is_free_without_the_logs(
    folder: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(log_folder.TOTAL_VARIABLE)
    usage = type("Usage", (), {"free": 9 * TOTAL})
    monkeypatch.setattr(log_folder.shutil, "disk_usage", lambda path: usage)
    for number in range(4):
        add(folder, number, TOTAL // 2)
    folder.tidy()
    assert folder.limit_bytes == 11 * TOTAL // 10
    assert left(folder) == [2, 3] or left(folder) == [3]
    usage.free = 10**15
    folder.tidy()
    assert folder.limit_bytes == log_folder.TOTAL_BYTES


@pytest.mark.parametrize("chosen", ["", "many", "-5", "1e9"])
def test_a_choice_that_is_not_a_number_is_ignored(
    folder: LogFolder, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log_folder.TOTAL_VARIABLE, chosen)
    folder.tidy()
    assert folder.limit_bytes > TOTAL
