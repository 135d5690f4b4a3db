"""The ways of large values to hosts: files of a folder that all of them share, else the pipes."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from jupyter_distrib.coordinator.engine import ContentPart
from jupyter_distrib.coordinator.incoming_content import IncomingContent
from jupyter_distrib.coordinator.part_transfer import PartTransfer
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
    left.mkdir()
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
