"""The notebook's files on their way to hosts whose connection is slow, or breaks."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.coordinator import file_sync
from jupyter_distrib.wire.messages import Ended, Exited, Failed, Interrupted, Stop
from tests.pools.command.test_reconnect import Bed
from tests.processes import wait_until

pytestmark = pytest.mark.slow

NAMES = [f"{number}.bin" for number in range(6)]
SEEN = "import os\n(os.getcwd(), {name: open(name, 'rb').read() for name in os.listdir()})"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's folder, without files, and the only one from which it imports."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [])
    return folder


@pytest.fixture
def bed(tmp_path: Path, project: Path) -> Iterator[Bed]:
    one = Bed(tmp_path, "command", copy_files="true")
    yield one
    one.close()


def fill(folder: Path) -> dict[str, bytes]:
    """Write files each of which is a part; return them."""
    chance = random.Random(9)
    files = {name: chance.randbytes(file_sync.FILE_LIMIT_BYTES) for name in NAMES}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def arrived(copy: Path, project: Path) -> list[str]:
    """The files of a copy that are complete: their modification times are set last."""
    names = sorted(os.listdir(copy))
    return [name for name in names if os.stat(copy / name).st_mtime_ns == os.stat(project / name).st_mtime_ns]


def test_a_cell_is_stopped_while_its_files_are_copied_and_the_next_one_copies_the_rest(bed: Bed, project: Path) -> None:
    copy = Path(bed.client.run(bed.group, SEEN).values[0][0])
    assert copy != project
    files = fill(project)
    slow = bed.folder / "a-slow"
    slow.write_text(str(5 * file_sync.FILE_LIMIT_BYTES // 2))
    run = bed.client.start(bed.group, SEEN)
    assert wait_until(lambda: arrived(copy, project) == NAMES[:2], 10)
    bed.client.send(Stop(run=run))
    outcome = bed.client.finish(run, (0, 1))
    assert slow.exists(), "the connection is as slow as it was"
    assert not outcome.of(Exited)
    assert outcome.of(Interrupted, 0)

    there = {name: os.stat(copy / name).st_ctime_ns for name in NAMES[:2]}
    slow.unlink()
    values = bed.client.run(bed.group, SEEN).values
    assert [values[rank][1] == files for rank in range(2)] == [True, True]
    assert {name: os.stat(copy / name).st_ctime_ns for name in there} == there, "these are not copied again"


def test_files_arrive_once_when_the_connection_breaks_between_and_in_them(bed: Bed, project: Path) -> None:
    files = fill(project)
    bed.breaks("a", 5 * file_sync.FILE_LIMIT_BYTES // 2, 1)
    bed.breaks("b", 1)
    values = bed.client.run(bed.group, SEEN).values
    assert [values[rank][1] == files for rank in range(2)] == [True, True]
    assert not bed.left


def test_a_cell_for_whose_files_no_folder_can_be_made_fails_and_says_why(
    bed: Bed, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(bed.client.run(bed.group, SEEN).values[0][0])
    monkeypatch.setattr(sys, "path", [str(project / "library")])
    (copy.parent / "1").write_text("in its place")
    bed.client.start(bed.group, "7")
    assert bed.client.wait(Failed).failure.message == (
        f"node a could not receive this cell: the folder {copy.parent}/1 cannot be made (File exists)."
    )
    bed.client.wait(Ended)
    (copy.parent / "1").unlink()
    assert bed.client.run(bed.group, "7").values == {0: 7, 1: 7}
