"""What ranks write: complete in the logs, in batches to the notebook, and a log that cannot be written stops nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.agent.ranks import log_file
from jupyter_distrib.agent.ranks import output as module
from jupyter_distrib.agent.ranks.output import FIRST_LINES, SHOWN_BYTES, Pipe, RunOutput, _Batch, write_late
from jupyter_distrib.system import log_folder
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from tests.agent.test_torch_log import ADVICE, BROKEN, STACK


@pytest.fixture
def sent() -> list[m.Wrote | m.Noted]:
    return []


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop._selector.close()


@pytest.fixture
def output(tmp_path: Path, loop: Loop, sent: list[m.Wrote | m.Noted]) -> Iterator[RunOutput]:
    before = os.listdir("/proc/self/fd")
    out = RunOutput("r-1", tmp_path / "r-1", loop, sent.append)
    yield out
    out.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def turn(loop: Loop) -> None:
    for key, mask in loop._selector.select(0.02):
        loop._dispatch(key.fd, key.data, mask)


def texts(sent: list[m.Wrote | m.Noted], stream: str = "stdout", rank: int = 0) -> str:
    return "".join(
        event.text for event in sent if isinstance(event, m.Wrote) and (event.stream, event.rank) == (stream, rank)
    )


# ---------------------------------------------------------------------------------------------------- batches


def test_a_stack_of_torchs_cpp_code_is_in_the_log_alone(output: RunOutput, sent: list[m.Wrote | m.Noted]) -> None:
    for part in (BROKEN + ADVICE + STACK[:40], STACK[40:] + "mine\n"):
        output.write(0, "stderr", part.encode())
    output.end()
    output.write(0, "stderr", b"late\n", show=False)
    assert texts(sent, "stderr") == f"{BROKEN}mine\n"
    assert (output.directory / "rank0.log").read_text() == f"{BROKEN}{ADVICE}{STACK}mine\nlate\n"


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_is_too_long_is_shown_from_where_there_is_room(end: str) -> None:
    batch = _Batch()
    batch.add(("before\n" + "x" * 200_000 + f"the end{end}").encode())

    assert batch.pop_first() == ("before\n", 0)
    text, skipped = batch.pop()

    assert skipped == 0
    assert text.endswith(f"xthe end{end}")
    assert len(text) == SHOWN_BYTES


def test_a_batch_gives_what_came() -> None:
    batch = _Batch()
    batch.add(b"one\ntw")
    assert batch.pop() == ("one\ntw", 0)
    batch.add(b"o\n")
    assert batch.pop() == ("o\n", 0)
    assert batch.pop() == ("", 0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_may_be_cut_anywhere(size: int) -> None:
    data = "aé漢😀\n".encode() * 3
    batch, got = _Batch(), ""
    for at in range(0, len(data), size):
        batch.add(data[at : at + size])
        got += batch.pop()[0]
    assert got == data.decode()


def test_what_is_not_text_is_replaced() -> None:
    batch = _Batch()
    batch.add(b"a\xff\xfe\0b")
    assert batch.pop()[0] == "a\ufffd\ufffd\0b"


@pytest.mark.parametrize("chunk", [pytest.param(17, marks=pytest.mark.slow), 1000, 100_000, 1 << 22])
def test_skipped_lines_are_counted_exactly(chunk: int) -> None:
    data = b"".join(b"line %d\n" % i for i in range(200_000))
    batch, shown, skipped = _Batch(), "", 0
    for at in range(0, len(data), chunk):
        batch.add(data[at : at + chunk])
        if at % 7 == 0:
            first = batch.pop_first()[0]
            text, left_out = batch.pop()
            assert not left_out or text.startswith("line "), "cut at a line's end"
            shown, skipped = shown + first + text, skipped + left_out
    first = batch.pop_first()[0]
    text, left_out = batch.pop()
    shown, skipped = shown + first + text, skipped + left_out
    assert shown.count("\n") + skipped == 200_000
    assert shown.endswith("line 199999\n")


def test_the_first_lines_of_a_flood_are_shown_and_those_of_a_later_one_are_not() -> None:
    flood = b"".join(b"line %d\n" % i for i in range(100_000))
    batch = _Batch()
    batch.add(b"before\n")
    assert (batch.pop_first(), batch.pop()) == (("", 0), ("before\n", 0))
    batch.add(flood)
    first, _ = batch.pop_first()
    assert first == "".join(f"line {i}\n" for i in range(FIRST_LINES - 1)), "20 with the one before"
    assert batch.pop()[0].endswith("line 99999\n")
    batch.add(flood)
    assert batch.pop_first() == ("", 0)


def test_a_batch_holds_little_whatever_comes() -> None:
    batch = _Batch()
    for _ in range(100):
        batch.add(b"x" * 1_000_000)
        assert len(batch._data) <= 8 * SHOWN_BYTES
    text, skipped = batch.pop()
    assert len(text) == SHOWN_BYTES
    assert skipped == 0


def test_the_middle_of_a_character_is_not_a_beginning() -> None:
    batch = _Batch()
    batch.add("é".encode() * SHOWN_BYTES + b"x")
    text, _ = batch.pop()
    assert text.lstrip("\ufffd").strip("é") == "x"


# ---------------------------------------------------------------------------------------------------- logs


def test_the_log_is_byte_exact(output: RunOutput, sent: list[m.Wrote | m.Noted]) -> None:
    data = bytes(range(256)) * 100 + b"\n"
    output.write(0, "stdout", data)
    output.write(0, "stderr", b"err")
    output.write(1, "stdout", b"other", show=False)
    output.flush()
    folder = Path(output.log_directory)
    assert (folder / "rank0.log").read_bytes() == data + b"err"
    assert (folder / "rank1.log").read_bytes() == b"other"
    assert texts(sent, rank=1) == ""
    assert texts(sent, "stderr") == "err"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "rank0.log").stat().st_mode & 0o777 == 0o600


def test_no_output_no_folder(output: RunOutput) -> None:
    output.flush()
    assert output.log_directory == ""
    assert not output.directory.exists()


def test_batches_go_out_by_time(
    output: RunOutput, sent: list[m.Wrote | m.Noted], loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(1000):
        output.write(0, "stdout", b"x\n")
    assert not sent
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 1)
    loop._fire()
    assert [type(event) for event in sent] == [m.Wrote]
    assert texts(sent) == "x\n" * 1000


def test_a_full_log_is_said_once_and_the_run_goes_on(
    output: RunOutput, sent: list[m.Wrote | m.Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LIMIT_BYTES", 100)
    for number in range(30):
        output.write(0, "stdout", b"line %2d\n" % number)
    output.flush()
    notes = [event.text for event in sent if isinstance(event, m.Noted)]
    assert len(notes) == 1
    assert notes[0].startswith("the log of rank 0 is truncated")
    assert texts(sent) == "".join(f"line {number:2}\n" for number in range(30))
    log = (Path(output.log_directory) / "rank0.log").read_text()
    assert log.startswith("line  0\n")
    assert log.count("[log truncated here: it has reached 100 bytes; the end of the output follows]\n") == 1
    assert log.endswith("line 28\nline 29\n")
    output.write(1, "stdout", b"another rank's log goes on")
    assert (Path(output.log_directory) / "rank1.log").read_text() == "another rank's log goes on"


def test_of_a_log_that_is_cut_short_its_beginning_and_its_newest_end_are_kept(
    output: RunOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LIMIT_BYTES", 100)
    path = output.directory / "rank0.log"
    for number in range(10_000):
        output.write(0, "stdout", b"line %d\n" % number)
        if number % 1000 == 999:
            output.flush()
            assert path.read_text().startswith("line 0\nline 1\n")
            assert path.read_text().endswith(f"line {number}\n")
            assert path.stat().st_size < 300 + log_file.TAIL_BYTES
    output.end()
    output.write(0, "stdout", b"late\n", show=False)
    assert path.read_text().endswith("line 9999\nlate\n")
    assert path.stat().st_size < 300 + log_file.TAIL_BYTES


def test_the_logs_of_runs_that_go_on_are_cut_short_at_the_total_of_all_logs(
    output: RunOutput, sent: list[m.Wrote | m.Noted], loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log_folder.TOTAL_VARIABLE, str(1 << 20))
    other = RunOutput("a1b2c3-2", output.directory.parent / "a1b2c3-2", loop, sent.append)
    running = RunOutput("a1b2c3-1", output.directory.parent / "a1b2c3-1", loop, sent.append)
    for number in range(20_000):
        other.write(0, "stdout", b"other %090d\n" % number)
        running.write(0, "stdout", b"line %090d\n" % number)
    both = [running.directory / "rank0.log", other.directory / "rank0.log"]
    running.flush()
    other.flush()
    assert sum(path.stat().st_size for path in both) < 1 << 20
    assert sum(path.stat().st_size for path in both) > (1 << 20) * 3 // 4
    for path in both:
        assert path.read_bytes().split()[1] == b"0" * 90
        assert path.read_bytes().endswith(b"%090d\n" % 19_999)
    reason = "is truncated: all logs together may take 1.0 MB (JUPYTER_DISTRIB_LOG_TOTAL_BYTES)"
    assert [event.text for event in sent if isinstance(event, m.Noted)] == [f"the log of rank 0 {reason}"] * 2

    running.end()  # and the next one has its room
    newest = RunOutput("a1b2c3-3", output.directory.parent / "a1b2c3-3", loop, sent.append)
    newest.write(0, "stdout", b"x" * 100_000)
    newest.end()
    assert (newest.directory / "rank0.log").stat().st_size == 100_000
    assert not running.directory.exists()
    assert any("the logs of the oldest run were removed" in event.text for event in sent if isinstance(event, m.Noted))
    other.close()
    newest.close()


def test_a_rank_that_stopped_logging_still_marks_its_run_as_one_that_goes_on(
    output: RunOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log_folder.TOTAL_VARIABLE, str(1 << 20))
    running = RunOutput("a1b2c3-1", output.directory.parent / "a1b2c3-1", output._loop, output._send)
    running.write(0, "stdout", b"x" * 1000)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        running.write(0, "stdout", b"after\n")
    os.truncate(running.directory / "rank0.log", 2 << 20)
    log_folder.of(output.directory.parent).tidy()
    assert running.directory.exists()
    running.end()
    log_folder.of(output.directory.parent).tidy()
    assert not running.directory.exists()
    running.close()


def test_what_comes_after_the_end_of_a_run_is_added_to_its_log(output: RunOutput) -> None:
    output.write(0, "stdout", b"before\n")
    output.end()
    with (output.directory / "rank0.log").open("r+b") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
        fcntl.flock(log, fcntl.LOCK_UN)
    output.write(0, "stderr", b"after\n", show=False)
    assert (output.directory / "rank0.log").read_bytes() == b"before\nafter\n"


def test_a_full_disk_is_said_and_the_run_goes_on(
    output: RunOutput, sent: list[m.Wrote | m.Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    output.write(0, "stdout", b"before\n")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    output.write(0, "stdout", b"after\n")
    monkeypatch.undo()
    output.flush()
    assert texts(sent) == "before\nafter\n"
    assert [event.text for event in sent if isinstance(event, m.Noted)] == [
        "the log of rank 0 is truncated: [Errno 28] No space left on device"
    ]


def test_a_log_that_is_a_link_is_not_followed(output: RunOutput, sent: list[m.Wrote | m.Noted], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    output.directory.mkdir()
    (output.directory / "rank0.log").symlink_to(victim)
    output.write(0, "stdout", b"evil")
    output.flush()
    assert victim.read_text() == "precious"
    assert any(isinstance(event, m.Noted) and "cannot be written" in event.text for event in sent)
    assert texts(sent) == "evil"


@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_a_log_that_is_not_a_file_stops_nobody(output: RunOutput, sent: list[m.Wrote | m.Noted], what: str) -> None:
    output.directory.mkdir()
    path = output.directory / "rank0.log"
    os.mkfifo(path) if what == "fifo" else path.mkdir()
    output.write(0, "stdout", b"text\n")
    output.flush()
    assert texts(sent) == "text\n"
    assert any(isinstance(each, m.Noted) and "the log cannot be written" in each.text for each in sent)
    module.write_late(
        output.directory.parent, 0, m.Wrote(run=output.directory.name, rank=0, stream="stdout", text="late")
    )


@pytest.mark.parametrize("what", ["fifo", "folder", "dangling", "circle"])
def test_old_logs_are_removed_whatever_lies_between_them(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_folder, "KEPT_RUNS", 1)
    for number in (1, 2, 3):
        (tmp_path / f"a1b2c3-{number}").mkdir()
    (tmp_path / "a1b2c3-2" / "rank0.log").write_text("old")
    path = tmp_path / "a1b2c3-1" / "rank0.log"
    match what:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "dangling" | "circle":
            path.symlink_to("/nowhere" if what == "dangling" else path)
    for number, each in enumerate(
        (path, tmp_path / "a1b2c3-1", *(tmp_path / "a1b2c3-2").iterdir(), tmp_path / "a1b2c3-2")
    ):
        os.utime(each, (1.0 + number, 1.0 + number), follow_symlinks=False)
    log_folder.LogFolder(tmp_path).tidy()
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()].count("a1b2c3-2") == 0
    assert (tmp_path / "a1b2c3-3").is_dir()
    assert os.path.lexists(path), "it is no log of ours"


def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path: Path, loop: Loop, sent: list[m.Wrote | m.Noted]) -> None:
    (tmp_path / "file").write_text("")
    out = RunOutput("r", tmp_path / "file" / "r", loop, sent.append)
    for _ in range(3):
        out.write(0, "stdout", b"x")
    out.close()
    assert sum(isinstance(event, m.Noted) for event in sent) == 1
    assert texts(sent) == "xxx"


def test_late_output_after_close_is_lost_without_harm(
    output: RunOutput, tmp_path: Path, sent: list[m.Wrote | m.Noted]
) -> None:
    output.write(0, "stdout", b"a")
    output.close()
    output.write(0, "stdout", b"b", show=False)
    output.close()
    assert texts(sent) == "a"
    assert [path.read_bytes() for path in (tmp_path / "r-1").iterdir()] == [b"a"]


# ---------------------------------------------------------------------------------------------------- pipes


def test_a_pipe_is_read_to_its_end(loop: Loop) -> None:
    got: list[bytes] = []
    read_fd, write_fd = os.pipe()
    pipe = Pipe(loop, read_fd, got.append)
    os.write(write_fd, b"one")
    turn(loop)
    os.write(write_fd, b"two")
    pipe.drain()
    assert b"".join(got) == b"onetwo"
    os.write(write_fd, b"last words")
    os.close(write_fd)
    pipe.drain()
    pipe.drain()
    pipe.close()
    assert b"".join(got) == b"onetwolast words"
    assert pipe.tail == b"onetwolast words"


def test_only_the_tail_is_remembered(loop: Loop) -> None:
    count = 0

    def add(data: bytes) -> None:
        nonlocal count
        count += len(data)

    read_fd, write_fd = os.pipe()
    pipe = Pipe(loop, read_fd, add)
    for _ in range(20):
        os.write(write_fd, b"x" * 30_000)
        pipe.drain()
    os.write(write_fd, b"END")
    pipe.drain()
    assert count == 600_003
    assert len(pipe.tail) == module.TAIL_BYTES
    assert pipe.tail.endswith(b"xEND")
    pipe.close()
    os.close(write_fd)


@pytest.mark.slow
def test_a_chatty_rank_does_not_keep_the_loop_awake(loop: Loop) -> None:
    got: list[bytes] = []
    read_fd, write_fd = os.pipe()
    pipe = Pipe(loop, read_fd, got.append)
    for _ in range(50):
        os.write(write_fd, b"line\n")
        turn(loop)
    assert len(got) == 1, "after one read it waits a little"
    while len(got) == 1:
        loop._fire()
        turn(loop)
    assert b"".join(got) == b"line\n" * 50
    pipe.close()
    os.close(write_fd)


def test_neither_is_one_that_is_written_late(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "r-1").mkdir()
    (tmp_path / "r-1" / "rank0.log").symlink_to(victim)
    write_late(tmp_path, 0, m.Wrote(run="r-1", rank=0, stream="stdout", text="evil"))
    assert victim.read_text() == "precious"
    write_late(tmp_path, 1, m.Wrote(run="r-1", rank=1, stream="stdout", text="late"))
    assert (tmp_path / "r-1" / "rank1.log").read_text() == "late"


def test_a_log_is_the_users_alone_whatever_the_umask(output: RunOutput) -> None:
    before = os.umask(0)
    try:
        output.write(0, "stdout", b"x")
        output.flush()
        write_late(output.directory, 1, m.Wrote(run="late", rank=1, stream="stdout", text="x"))
    finally:
        os.umask(before)
    made = [output.directory / "rank0.log", output.directory / "late" / "rank1.log"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (*made, *(path.parent for path in made))] == [
        0o600, 0o600, 0o700, 0o700,
    ]  # fmt: skip
