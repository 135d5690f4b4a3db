"""The ways of large values to hosts: files of a folder that all of them share, else the pipes."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from jupyter_distrib.coordinator.engine import ContentPart
from jupyter_distrib.coordinator.part_transfer import PartTransfer
from jupyter_distrib.coordinator.relay import IncomingContent
from jupyter_distrib.errors import PayloadError
from jupyter_distrib.pools.command import transfer
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.system.call_soon import CallSoon

SIZE = 40 << 20
CONTENT = os.urandom(1 << 20) * (SIZE >> 20)


def moved(folder: str, hosts: int = 2) -> list[list[Any]]:
    """Send the content to some hosts; return the references of the parts that each of them took."""
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    loop = cast("CallSoon", type("Calls", (), {"put": calls.put}))
    taken: list[list[Any]] = [[] for _ in range(hosts)]
    contents = [IncomingContent() for _ in range(hosts)]
    fd = shared_memory.write([memoryview(CONTENT)])
    carrier = transfer.carrier([fd], folder)
    closed = threading.Event()
    close = carrier.close
    carrier.close = lambda: (close(), closed.set())  # type: ignore[method-assign, assignment, func-returns-value]
    sent = PartTransfer("run", [fd], loop, threading.Event(), carrier)
    ended = [False] * hosts
    for host in range(hosts):

        def receive(part: ContentPart | Exception, host: int = host) -> Future[None] | None:
            assert isinstance(part, ContentPart), part
            taken[host].append(part.reference)
            contents[host].add(*part.arguments)
            ended[host] = part.last
            done: Future[None] = Future()
            done.set_result(None)
            return None if part.last else done

        sent.add(receive)
    while not all(ended):
        calls.get(timeout=20)()
    assert closed.wait(20)
    for content in contents:
        there = content.finish()
        assert os.pread(there, SIZE, 0) == CONTENT
        os.close(there)
    os.close(fd)
    return taken


def test_a_large_value_goes_by_the_folder_that_all_hosts_share_and_leaves_nothing_there(tmp_path: Path) -> None:
    left = tmp_path / f"{transfer.PREFIX}left"
    left.mkdir(mode=0o700)
    (left / f"{0:032x}").write_bytes(b"a part")
    os.utime(left, (0, 0))
    one, other = moved(str(tmp_path))
    assert one == other
    assert [type(reference) for reference in one] == [str] * 4 + [bytes]
    assert all(Path(path).parent.parent == tmp_path for path in one[:-1])
    assert list(tmp_path.iterdir()) == [], "nor what another one had left"


@pytest.mark.parametrize("folder", ["", "/no/such/folder"])
def test_without_one_or_without_room_in_it_values_go_through_the_pipes(folder: str) -> None:
    [references] = moved(folder, hosts=1)
    assert {type(reference) for reference in references} == {bytes}


def test_a_host_that_does_not_see_the_file_says_what_to_do() -> None:
    with pytest.raises(PayloadError, match=r"/no/part, in a folder .* shares .* set copy_files = true"):
        IncomingContent().add("/no/part", 0, 10)


def test_no_more_parts_are_on_their_way_than_the_slowest_host_takes() -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    loop = cast("CallSoon", type("Calls", (), {"put": calls.put}))
    fd = shared_memory.write([memoryview(CONTENT)])
    sent = PartTransfer("run", [fd], loop, threading.Event(), transfer.Pipes())
    slow: list[Future[None]] = []
    last = False

    def receive(part: ContentPart | Exception) -> Future[None] | None:
        nonlocal last
        assert isinstance(part, ContentPart), part
        last = part.last
        slow.append(Future())
        return None if last else slow[-1]

    def quick(part: ContentPart | Exception) -> Future[None] | None:
        taken: Future[None] = Future()
        taken.set_result(None)
        return taken

    sent.add(receive)
    sent.add(quick)
    for count in range(SIZE // transfer.Pipes.part_bytes - transfer.Pipes.ahead):
        while len(slow) < count + transfer.Pipes.ahead:
            calls.get(timeout=20)()
        with pytest.raises(queue.Empty):
            calls.get(timeout=0.05)
        slow[count].set_result(None)
    for taken in slow:
        if not taken.done():
            taken.set_result(None)
        if not last:
            calls.get(timeout=20)()
    assert len(slow) == SIZE // transfer.Pipes.part_bytes
    os.close(fd)


def test_files_in_a_shared_folder_are_the_users_alone(tmp_path: Path) -> None:
    """Values are unpickled from them, and the folder around them may be a team's."""
    tmp_path.chmod(0o777)
    carrier, before = transfer.SharedFolder(str(tmp_path)), os.umask(0)
    try:
        part = Path(str(carrier.packed(memoryview(b"x"), cast("Any", None), last=False)))
    finally:
        os.umask(before)
    assert part.read_bytes() == b"x"
    assert [path.stat().st_mode & 0o777 for path in (part.parent, part)] == [0o700, 0o600]
    assert part.parent.parent == tmp_path
    carrier.close()


def as_stranger(program: str, *arguments: str) -> None:
    """Run a program as another user, to whom the folder with this test's files is open."""
    become = "import os, sys; os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
    subprocess.run([sys.executable, "-c", become + textwrap.dedent(program), *arguments], check=True, timeout=60)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A folder into which every user may write, and in which every user may rename; it gives its group to new ones."""
    folder = tmp_path / "team"
    folder.mkdir()
    folder.chmod(0o2777)
    for above in (tmp_path, *tmp_path.parents):
        if above == Path(tempfile.gettempdir()):
            break
        above.chmod(above.stat().st_mode | 0o011)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_parts_are_never_written_into_a_folder_that_has_taken_the_place_of_the_hidden_one(team: Path) -> None:
    """Whoever owned the folder could put another file in the place of a part, and parts are unpickled."""
    carrier = transfer.SharedFolder(str(team))
    assert carrier.packed(memoryview(b"x"), cast("Any", None), last=False) != b"x", "a file is written"
    first = Path(str(carrier.packed(memoryview(b"x"), cast("Any", None), last=False)))
    as_stranger(
        "os.rename(sys.argv[1], sys.argv[1] + '-away'); os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)",
        str(first.parent),
    )
    second = Path(str(carrier.packed(memoryview(b"y"), cast("Any", None), last=False)))
    assert os.listdir(first.parent) == []
    with pytest.raises(PayloadError, match="cannot be read here"):
        IncomingContent().add(str(second), 0, 1)
    carrier.close()
    assert os.listdir(f"{first.parent}-away") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("bits", [0o777, 0o700])
def test_a_folder_that_is_swapped_before_it_is_held_open_gets_nothing(
    team: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(**arguments: Any) -> str:
        as_stranger(f"os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], {bits})", str(team / ".jupyter_distrib-theirs"))
        return str(team / ".jupyter_distrib-theirs")

    monkeypatch.setattr(transfer.tempfile, "mkdtemp", made)
    carrier = transfer.SharedFolder(str(team))
    assert carrier.packed(memoryview(b"x"), cast("Any", None), last=False) == b"x", "by the pipes"
    assert all(path.stat().st_size == 0 for path in team.rglob("*") if path.is_file())
    carrier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_folder_of_mine_that_a_colleague_renames_is_not_removed(team: Path) -> None:
    """Neither as one that was left, nor in the place of the hidden one."""
    for name in ("results", "more"):
        (team / name).mkdir(mode=0o700)
        (team / name / "precious").write_text("text")
        os.utime(team / name, (0, 0))
    left = team / f"{transfer.PREFIX}left"
    as_stranger("os.rename(*sys.argv[1:])", str(team / "results"), str(left))
    carrier = transfer.SharedFolder(str(team))
    part = Path(str(carrier.packed(memoryview(b"x"), cast("Any", None), last=False)))
    assert (left / "precious").read_text() == "text"
    as_stranger(
        "os.rename(sys.argv[1], sys.argv[1] + '-away'); os.rename(sys.argv[2], sys.argv[1])",
        str(part.parent), str(team / "more"),
    )  # fmt: skip
    carrier.close()
    assert (part.parent / "precious").read_text() == "text"
