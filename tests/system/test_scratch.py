"""Folders for temporary files: their own process removes them, or the next sweep, and never those of a living one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jupyter_distrib.system import scratch

HOLDER = """
import sys
from jupyter_distrib.system import scratch
with scratch.folder() as folder:
    (folder / "half.json.tmp").write_text("half")
    (folder / "session").mkdir()
    (folder / "session" / "log").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files of this test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_gone_after_the_block(temporary: Path) -> None:
    with scratch.folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("")
        scratch.sweep()
        assert (folder / "file").exists()
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_is_swept_and_a_living_ones_is_not(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        scratch.sweep()
        assert (folder / "half.json.tmp").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.exists()
        scratch.sweep()
    assert not list(temporary.iterdir())


def test_a_sweep_while_one_is_made_does_not_take_it_away(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, swept = scratch.fcntl.flock, []

    def late(file: object, operation: int) -> None:
        if not swept:
            swept.append(file)
            scratch.sweep()  # in the moment between the file and its lock
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    with scratch.folder() as folder:
        assert folder.is_dir()
        assert list(temporary.iterdir()) == [folder]
    assert swept


def test_one_whose_process_was_killed_before_the_lock_goes_later(temporary: Path) -> None:
    bare = Path(tempfile.mkdtemp(prefix=scratch.PREFIX))
    scratch.sweep()
    assert bare.exists()
    os.utime(bare, (0, 0))
    scratch.sweep()
    assert not bare.exists()


def test_what_is_not_ours_stays(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / ".jupyter_distrib").write_text("")
    (outside / "precious").write_text("")
    (temporary / f"{scratch.PREFIX}link").symlink_to(outside)
    named = temporary / f"{scratch.PREFIX}of-mine"
    named.mkdir()
    (named / "data").write_text("")
    os.utime(named, (0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        killed = Path(process.stdout.readline().strip())
        (killed / "link").symlink_to(outside)
        process.kill()
    scratch.sweep()
    assert not killed.exists()
    assert (outside / "precious").exists()
    assert (named / "data").exists()
    assert (temporary / f"{scratch.PREFIX}link").is_symlink()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_the_folder_of_another_user_stays(temporary: Path) -> None:
    theirs = Path(tempfile.mkdtemp(prefix=scratch.PREFIX))
    (theirs / ".jupyter_distrib").write_text("")
    os.chown(theirs, 12345, 12345)
    scratch.sweep()
    assert theirs.exists()
