"""Requests that may have become jobs that nobody holds, with a scancel that writes down what it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.pools.slurm import allocation
from jupyter_distrib.pools.slurm.allocation import Request
from tests.processes import wait_until

Cancelled = Callable[[], list[str]]


@pytest.fixture
def cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cancelled:
    """The names that have been cancelled; `away` in the folder is a controller that does not answer."""
    program = tmp_path / "scancel"
    program.write_text(f'#!/bin/sh\n[ -e {tmp_path}/away ] && exit 1\necho "$2" >>{tmp_path}/said\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(allocation, "AGAIN_S", 0.01)
    said = tmp_path / "said"
    return lambda: said.read_text().splitlines() if said.exists() else []


def left(tmp_path: Path) -> int:
    return len(list((tmp_path / "runtime" / "slurm-requests").iterdir()))


def test_each_request_has_a_name_of_its_own(cancelled: Cancelled, tmp_path: Path) -> None:
    one, other = Request("train.ipynb"), Request("train.ipynb")
    assert one.name != other.name
    for each in (one, other):
        each.finish(certain=True)
    assert wait_until(lambda: not left(tmp_path), 10)


def test_a_request_that_was_answered_is_cancelled_once(cancelled: Cancelled, tmp_path: Path) -> None:
    request = Request("train.ipynb")
    request.finish(certain=True)
    assert wait_until(lambda: not left(tmp_path), 10)
    assert cancelled() == [f"--name={request.name}"]


def test_one_that_may_come_late_is_cancelled_until_it_cannot(
    cancelled: Cancelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "LATEST_S", 0.1)
    (tmp_path / "away").touch()
    request = Request("train.ipynb")
    request.finish(certain=False)
    assert left(tmp_path)
    (tmp_path / "away").unlink()
    assert wait_until(lambda: not left(tmp_path), 10)
    assert set(cancelled()) == {f"--name={request.name}"}
    assert len(cancelled()) > 1


def test_the_next_start_cancels_for_a_process_that_has_ended(cancelled: Cancelled, tmp_path: Path) -> None:
    own = Request("train.ipynb")
    code = "from jupyter_distrib.pools.slurm.allocation import Request; print(Request('gone').name)"
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "away").touch()
    allocation.cancel_left()
    assert left(tmp_path) == 2, "the controller did not answer"
    (tmp_path / "away").unlink()
    allocation.cancel_left()
    assert cancelled() == [f"--name={gone}"]
    assert left(tmp_path) == 1
    own.finish(certain=True)
    assert wait_until(lambda: not left(tmp_path), 10)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\n\xff\n", b"one line", b"\n--all\n", b"\n\n", b"\nx\0y 12345678\n", b"\n" * 99, b"x" * 100_000],
)
def test_a_file_that_is_not_a_request_cancels_nothing(cancelled: Cancelled, tmp_path: Path, content: bytes) -> None:
    Request("train.ipynb").finish(certain=True)
    assert wait_until(lambda: not left(tmp_path), 10)
    before = cancelled()
    folder = tmp_path / "runtime" / "slurm-requests"
    (folder / "file").write_bytes(content)
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/dev/zero")
    allocation.cancel_left()
    assert cancelled() == before


@pytest.mark.parametrize("what", ["file", "link", "fifo"])
def test_the_folder_of_requests_is_made_anew(cancelled: Cancelled, tmp_path: Path, what: str) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    folder = tmp_path / "runtime" / "slurm-requests"
    match what:
        case "file":
            folder.write_text("")
        case "link":
            folder.symlink_to(tmp_path)
        case "fifo":
            os.mkfifo(folder)
    Request("train.ipynb").finish(certain=True)
    assert wait_until(lambda: not left(tmp_path), 10)
