from __future__ import annotations

import errno
import fcntl
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.wire.descriptors import Descriptors


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def test_what_is_written_is_read_at_aligned_places() -> None:
    parts = (b"a" * 100, b"", b"b" * 70_000, b"c")
    sizes = [len(part) for part in parts]
    found = shared_memory.read(shared_memory.write(views(*parts)), sizes)
    assert [bytes(view) for view in found] == list(parts)
    starts, total = shared_memory.offsets(sizes)
    assert all(start % shared_memory.ALIGNMENT == 0 for start in starts)
    assert total % shared_memory.ALIGNMENT == 0


def test_nothing_at_all_can_be_written_and_read() -> None:
    assert [bytes(view) for view in shared_memory.read(shared_memory.write(views(b"")), [0])] == [b""]


def test_memory_that_is_not_finished_is_gone() -> None:
    with shared_memory.Unfinished(10) as memory:
        memory.add(memoryview(b"12345"), 0)
        fd = memory._fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


class Early:
    """A content of two buffers and four steps, and the descriptor by which a reader is told of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_memory, "STEP_BYTES", 1000)
        self.content = shared_memory.Content(views(b"a" * 2500, b"b" * 700))  # the second one from 2560 on
        descriptors = self.content.early()
        _, self.told = descriptors
        self.arriving = shared_memory.Arriving(descriptors)

    def steps(self) -> int:
        """Told by now, and not waited for."""
        os.set_blocking(self.told, False)
        try:
            return len(os.read(self.told, 100))
        except BlockingIOError:
            return 0
        finally:
            os.set_blocking(self.told, True)


def test_a_reader_is_told_of_each_step_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    early, found = Early(monkeypatch), list[int]()
    with early.content as content, early.arriving as arriving:

        def look() -> bool:
            found.append(early.steps())
            return False

        content.fill(given_up=look)
        found.append(early.steps())
        assert found == [0, 1, 1, 0, 2], "before each piece, and in the end"
        with arriving.mapped() as mapped:
            assert mapped[:] == b"a" * 2500 + bytes(60) + b"b" * 700 + bytes(4)


def test_a_reader_waits_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    early = Early(monkeypatch)
    with early.content as content, early.arriving as arriving, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arriving.wait, 10_000)
        content.fill()
        waiting.result(timeout=10)
        arriving.wait(2000)


def test_a_reader_of_what_was_given_up_has_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    early, asked = Early(monkeypatch), list[None]()
    with early.arriving as arriving:
        with early.content as content:
            content.fill(given_up=lambda: len(asked) == 2 or bool(asked.append(None)))
        arriving.wait(2000)
        with pytest.raises(shared_memory.GivenUp):
            arriving.wait(2001)


def test_whoever_has_lost_its_reader_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    early = Early(monkeypatch)
    with early.content as content:
        with early.arriving:
            pass
        assert content.fill()


def test_all_of_what_is_finished_has_arrived() -> None:
    with shared_memory.Arriving(Descriptors([shared_memory.write(views(b"x" * 100))])) as arriving:
        arriving.wait(arriving.size_bytes)


def test_readers_may_write_without_seeing_each_other() -> None:
    fd = shared_memory.write(views(b"x" * 10_000))
    one = shared_memory.read(os.dup(fd), [10_000])[0]
    two = shared_memory.read(fd, [10_000])[0]
    one[0] = 0
    assert (one[0], two[0]) == (0, ord("x"))


def test_reading_closes_the_descriptor_also_when_it_fails() -> None:
    fd = shared_memory.write(views(b"x"))
    with pytest.raises(PayloadError, match="incomplete"):
        shared_memory.read(fd, [1_000_000])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_views_outlive_everything_else_and_then_the_mapping_goes() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:jupyter_distrib")

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    before = maps()
    first, last = shared_memory.read(shared_memory.write(views(b"a" * 5000, b"b" * 5000)), [5000, 5000])
    tail = last[4000:]
    del first, last
    assert (bytes(tail[:1]), maps()) == (b"b", before + 1)
    tail.release()
    del tail
    assert maps() == before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd")
def test_the_memory_is_sealed_against_change_and_truncation() -> None:
    fd = shared_memory.write(views(b"x" * 100))
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"y", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1 << 20)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_without_memfd_an_unlinked_private_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = shared_memory.write(views(b"x" * 10_000))
    status = os.fstat(fd)
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    assert not os.get_inheritable(fd)
    assert bytes(shared_memory.read(fd, [10_000])[0]) == b"x" * 10_000


class Huge:
    """A buffer that is larger than any machine."""

    nbytes = 1 << 60


def test_too_little_room_is_one_clear_error_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PayloadError, match=r"1152921504.* GB of data .* of memory and .* are free"):
        shared_memory.write([Huge()])  # type: ignore[list-item]


def test_when_memory_is_short_and_the_disk_is_not_the_disk_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_memory, "_CHECK_FROM_BYTES", 1000)
    monkeypatch.setattr(shared_memory, "free_memory_bytes", lambda: 500)
    monkeypatch.setattr(shared_memory, "_spool_directory", lambda: str(tmp_path))
    fd = shared_memory.write(views(b"x" * 10_000))
    assert os.fstat(fd).st_dev == tmp_path.stat().st_dev
    assert bytes(shared_memory.read(fd, [10_000])[0][:2]) == b"xx"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_the_same_error_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    before = len(os.listdir("/proc/self/fd")) if Path("/proc").exists() else 0
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(PayloadError, match="are free"):
        shared_memory.write(views(b"x"))
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_limit_on_the_size_of_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for memory without a name as well."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_240, 10_240))

    def refused(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refused)
    with pytest.raises(PayloadError, match=r"50 kB of data .* more than 10\.2 kB \(ulimit -f\).* Raise the limit"):
        shared_memory.write(views(b"x" * 50_000))


def test_memory_that_a_reader_has_mapped_is_sealed_too() -> None:
    with shared_memory.Content(views(b"a" * 5000)) as content:
        with shared_memory.Arriving(content.early()) as arriving, arriving.mapped() as seen:
            content.fill()
            fd = content.finish()
            assert seen[:3] == b"aaa"
        assert shared_memory.is_sealed(fd)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"b", 0)
    os.close(fd)
