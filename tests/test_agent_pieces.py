"""The agent's loop, its journal of detached runs, what it reads from a dead rank, and whom it kills."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from jupyter_distrib.agent import death, reap, thinning, usage
from jupyter_distrib.agent import journal as journals
from jupyter_distrib.agent.journal import Journal
from jupyter_distrib.agent.loop import Loop
from jupyter_distrib.agent.thinning import Entry
from jupyter_distrib.events import (
    Cell,
    Displayed,
    Ended,
    Execute,
    Frame,
    Measured,
    Moved,
    Noted,
    Parcel,
    Progressed,
    Returned,
    Sampled,
    Setting,
    Stalled,
    Wrote,
)
from jupyter_distrib.record import RunRecord
from tests.processes import is_alive, wait_until, wait_until_gone

# ---------------------------------------------------------------------------------------------------- loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = signal.getsignal(signal.SIGCHLD)
    loop = Loop()
    yield loop
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)
    loop._selector.close()


def test_timers_fire_in_order_unless_cancelled(loop: Loop) -> None:
    fired: list[str] = []
    loop.later(0.02, lambda: fired.append("third"))
    loop.later(0.0, lambda: fired.append("first"))
    loop.later(0.0, lambda: fired.append("second"))
    loop.later(0.01, lambda: fired.append("never")).cancel()
    loop.later(0.03, loop.stop)
    loop.run()
    assert fired == ["first", "second", "third"]


def test_a_timer_may_set_another(loop: Loop) -> None:
    fired: list[int] = []

    def again(left: int) -> None:
        fired.append(left)
        loop.later(0, (lambda: again(left - 1)) if left else loop.stop)

    again(3)
    loop.run()
    assert fired == [3, 2, 1, 0]


def test_descriptors_are_watched_and_forgotten(loop: Loop) -> None:
    a, b = socket.socketpair()
    got: list[bytes] = []

    def read() -> None:
        got.append(b.recv(10))
        loop.watch(b.fileno(), None)
        a.send(b"unheard")
        loop.later(0.01, loop.stop)

    loop.watch(b.fileno(), read)
    loop.watch(b.fileno(), read, None)
    a.send(b"heard")
    loop.run()
    assert got == [b"heard"]
    loop.watch(b.fileno(), None)
    a.close()
    b.close()


def test_a_callback_may_take_away_what_another_waits_for(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    calls: list[int] = []

    def call(number: int) -> None:
        calls.append(number)
        for _, end in pairs:
            loop.watch(end.fileno(), None)
        loop.stop()

    for number, (end, other) in enumerate(pairs):
        loop.watch(other.fileno(), lambda number=number: call(number))
        end.send(b"x")
    loop.run()
    assert len(calls) == 1
    for one, other in pairs:
        one.close()
        other.close()


def test_the_end_of_a_child_wakes_it(loop: Loop) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    ended: list[int] = []

    def reaped() -> None:
        if child.poll() is not None:
            ended.append(child.returncode)
            loop.stop()

    loop.on_child_ended = reaped
    loop.later(10, loop.stop)
    began_s = time.monotonic()
    loop.run()
    assert ended == [0]
    assert time.monotonic() - began_s < 5


# ---------------------------------------------------------------------------------------------------- journal


def detached() -> Execute:
    return Execute(
        run="s-7",
        crew="c",
        ranks=(0, 1),
        cell=Cell(source="1", filename="Cell In[1]"),
        inputs=Parcel(data=b""),
        setting=Setting(strategy="ddp"),
        detached=True,
        label="Cell In[1]",
    )


def test_a_journal_replays_what_happened(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    journal = Journal(detached(), 4, gpus=True, notebook="")
    with (tmp_path / "value").open("w+b") as value:
        value.write(b"big")
        value.flush()
        journal.add(Returned(run="s-7", rank=0, value=None), (value.fileno(),))
    assert not journal.ended
    journal.add(Ended(run="s-7", at_s=1.0), ())
    assert journal.ended
    (first, fds), (last, none) = journal.entries()
    assert isinstance(first, Returned)
    assert os.pread(fds[0], 10, 0) == b"big", "its own descriptor, not the caller's"
    assert isinstance(last, Ended)
    assert none == ()
    told = journal.attached()
    assert (told.run, told.ranks, told.world_size, told.gpus, told.strategy) == ("s-7", (0, 1), 4, True, "ddp")
    elapsed_s = told.elapsed_s
    assert journal.attached().elapsed_s == elapsed_s, "the clock stops with the run"
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before


def sample(rss_bytes: int) -> Sampled:
    return Sampled(
        run="s-7", rank=0, rss_bytes=rss_bytes, cpu_percent=1.0, gpu_memory_bytes=None, gpu_memory_total_bytes=None,
        gpu_percent=None, at_s=0.0,
    )  # fmt: skip


def test_a_long_journal_knows_the_peak() -> None:
    journal = Journal(detached(), 2, gpus=False, notebook="")
    for number in range(3 * journals.MAX_ENTRIES):
        journal.add(sample(10**9 if number == 99 else number), ())
    samples = [event.rss_bytes for event, _ in journal.entries() if isinstance(event, Sampled)]
    assert len(samples) <= journals.MAX_ENTRIES
    assert (max(samples), samples[-1]) == (10**9, 3 * journals.MAX_ENTRIES - 1)


def test_a_long_journal_says_how_much_output_it_leaves_out() -> None:
    journal, record = (
        Journal(detached(), 2, gpus=False, notebook=""),
        RunRecord(run="s-7", label="", ranks=(0, 1), world_size=2),
    )
    count = 5 * journals.MAX_ENTRIES
    for number in range(count):
        journal.add(Wrote(run="s-7", rank=number % 2, stream="stdout", text=f"line {number}\n"), ())
    journal.add(Returned(run="s-7", rank=0, value=None), ())
    for number in range(count, 2 * count):
        journal.add(Wrote(run="s-7", rank=1, stream="stdout", text=f"line {number}\n"), ())
    journal.add(Ended(run="s-7", at_s=1.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES
    for event in entries:
        record.apply(event)  # type: ignore[arg-type]
    told = [event for event in entries if isinstance(event, Wrote)]
    for rank, lines in ((0, count // 2), (1, count // 2 + count)):
        assert lines == sum(e.skipped_lines + e.text.count("\n") for e in told if e.rank == rank)
    *_, last = record.lines_since()
    assert last.text == f"line {2 * count - 1}"
    ends = [index for index, event in enumerate(entries) if getattr(event, "rank", None) == 0]
    assert isinstance(entries[ends[-1]], Returned), "a rank says nothing after its end"


def test_a_long_journal_spans_all_that_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it costs to keep it short grows with the events, not with their square."""
    looked_at: list[int] = []

    def counted(entries: Sequence[Entry]) -> tuple[list[Entry], list[Displayed]]:
        looked_at.append(len(entries))
        return thinning.thinned(entries)

    monkeypatch.setattr(journals, "thinned", counted)
    journal, count = Journal(detached(), 2, gpus=False, notebook=""), 20 * journals.MAX_ENTRIES
    journal.add(measured(0, 0, lr=0.1), ())
    for step in range(count):
        journal.add(measured(step % 2, step, loss=1.0), ())
        journal.add(Progressed(run="s-7", rank=0, label="epoch", step=step, total=count, at_s=0.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES
    assert sum(looked_at) <= 4 * 2 * count
    reported = [event for event in entries if isinstance(event, Measured)]
    assert reported[0].values == {"lr": 0.1}
    steps = [event.step for event in reported]
    assert steps == sorted(steps)
    assert steps[1] < count // 10
    assert steps[-1] == count - 1
    assert max(event.step for event in entries if isinstance(event, Progressed)) == count - 1


def test_a_long_journal_is_bounded_whatever_is_told() -> None:
    journal, count = Journal(detached(), 2, gpus=False, notebook=""), 3 * journals.MAX_ENTRIES
    for number in range(count):
        journal.add(Noted(run="s-7", rank=0, text=str(number)), ())
        journal.add(Stalled(run="s-7", text=str(number), places=(), at_s=0.0), ())
        journal.add(Moved(run="s-7", at_s=0.0), ())
        journal.add(Displayed(run="s-7", rank=0, data={"text/plain": "x"}, metadata={}, at_s=0.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES + 1
    left = sum(isinstance(event, Displayed) for event in entries)
    assert entries[0] == Noted(run="s-7", rank=None, text=f"{count - left} older displays are left out.")


def measured(rank: int, step: int, **values: float) -> Measured:
    return Measured(run="s-7", rank=rank, step=step, values=values, at_s=0.0)


def test_a_journal_holds_so_many_bytes_of_displays() -> None:
    journal = Journal(detached(), 2, gpus=False, notebook="")
    for number in range(10):
        data = {"text/plain": str(number), "image/png": "x" * (journals.MAX_DISPLAY_BYTES // 4)}
        journal.add(Displayed(run="s-7", rank=0, data=data, metadata={}, at_s=0.0), ())
    kept = [event.data["text/plain"] for event, _ in journal.entries() if isinstance(event, Displayed)]
    assert kept == ["7", "8", "9"]


def test_a_long_journal_loses_old_output_only() -> None:
    journal = Journal(detached(), 2, gpus=False, notebook="")
    journal.add(Noted(run="s-7", rank=None, text="first"), ())
    for number in range(4 * journals.MAX_ENTRIES):
        journal.add(Wrote(run="s-7", rank=0, stream="stdout", text=str(number)), ())
        journal.add(Progressed(run="s-7", rank=0, label="", step=number, total=None, at_s=0.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES + 1
    assert isinstance(entries[0], Noted)
    assert isinstance(entries[-1], Progressed)
    assert entries[-1].step == 4 * journals.MAX_ENTRIES - 1


# ---------------------------------------------------------------------------------------------------- death


def test_a_crash_report_gives_the_lines() -> None:
    text = "import faulthandler, ctypes\nfaulthandler.enable()\ndef inner():\n    ctypes.string_at(0)\n\ninner()\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert death.is_crash(done.returncode)
    frames = death.crash_frames(b"earlier words\n" + done.stderr)
    assert [(frame.line, frame.function) for frame in frames if frame.filename == "<string>"] == [
        (6, "<module>"),
        (4, "inner"),
    ]


def test_our_own_lines_are_left_out_of_a_crash_report() -> None:
    ours = os.path.join(os.path.dirname(os.path.dirname(death.__file__)), "worker", "main.py")
    report = "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
    report += f'  File "Cell In[3]", line 7 in f\n  File "{ours}", line 1 in serve\n'
    assert death.crash_frames(report.encode()) == (Frame(filename="Cell In[3]", line=7, function="f"),)
    assert death.crash_frames(b'  File "x", line 1 in f\n') == (), "no crash, no frames"


@pytest.mark.parametrize(
    ("code", "crash"),
    [(-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGKILL, False), (0, False), (11, False)],
)
def test_which_signals_are_crashes(code: int, crash: bool) -> None:
    assert death.is_crash(code) is crash


def test_last_lines_are_few_and_readable() -> None:
    tail = b"".join(b"%d\n" % i for i in range(100)) + b"\xff end"
    assert death.last_lines(tail) == (*(str(i) for i in range(81, 100)), "\ufffd end")


# ---------------------------------------------------------------------------------------------------- reap


def program(text: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True, **options
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


TALK = """
import socket, sys, time
kind, port = sys.argv[1], int(sys.argv[2])
if kind == "listen":
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    ends = [server.accept()[0] for _ in range(port)]
    print("connected", flush=True)
elif kind == "connect6":
    end = socket.create_connection(("::ffff:127.0.0.1", port))
    print("connected", flush=True)
else:
    end = socket.create_connection(("127.0.0.1", port))
    print("connected", flush=True)
time.sleep(60)
"""


def sockets_of(pid: int) -> set[int]:
    found = set()
    for fd in (Path("/proc") / str(pid) / "fd").iterdir():
        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))) is not None:
            found.add(int(match[1]))
    return found


def test_only_sockets_between_the_ranks_are_found() -> None:
    """Two ranks talk to each other; one of them also to a third process, a tracking server say."""
    first = program(TALK, "listen", "1")
    outsider = program(TALK, "listen", "1")
    port, other_port = line_of(first), line_of(outsider)
    both = TALK.replace(
        "time.sleep(60)",
        f"extra = socket.create_connection(('127.0.0.1', {other_port}))\nprint('both', flush=True)\ntime.sleep(60)",
    )
    second = program(both, "connect", port)
    try:
        assert [line_of(first), line_of(outsider), line_of(second), line_of(second)] == [
            "connected",
            "connected",
            "connected",
            "both",
        ]
        found = set(reap.sockets_between([first.pid, second.pid]))
        assert len(found) == 2
        assert found <= sockets_of(first.pid) | sockets_of(second.pid)
        assert found & sockets_of(first.pid)
        assert found & sockets_of(second.pid)
        assert not found & sockets_of(outsider.pid)
        assert reap.sockets_between([first.pid]) == ()
        assert reap.sockets_between([]) == ()
        assert len(reap.sockets_between([first.pid, second.pid, outsider.pid])) == 4
    finally:
        end(first, second, outsider)


def test_an_ipv4_end_inside_ipv6_is_the_same_end() -> None:
    first = program(TALK, "listen", "1")
    second = program(TALK, "connect6", line_of(first))
    try:
        assert line_of(first) == line_of(second) == "connected"
        assert len(reap.sockets_between([first.pid, second.pid])) == 2
    finally:
        end(first, second)


NEST = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, daemon.pid, flush=True)
time.sleep(60)
"""


def test_a_session_is_killed_and_nothing_else() -> None:
    rank = program(NEST, start_new_session=True)
    bystander = program("import time; print(1, flush=True); time.sleep(60)")
    child, daemon = map(int, line_of(rank).split())
    line_of(bystander)
    reap.kill_left({rank.pid}, set())
    rank.wait()
    assert wait_until_gone([child], 5) == []
    assert is_alive(daemon), "a session of its own"
    assert is_alive(bystander.pid)
    os.kill(daemon, signal.SIGKILL)
    end(bystander, rank)


def test_marked_processes_are_killed_and_no_others() -> None:
    marks = {"JUPYTER_DISTRIB_WORKER": "x-c1.0.1"}
    rank = program(NEST, start_new_session=True, env={**os.environ, **marks})
    namesake = program(
        "import time; print(1, flush=True); time.sleep(60)", env={**os.environ, "JUPYTER_DISTRIB_WORKER": "x-c1.0.10"}
    )
    child, daemon = map(int, line_of(rank).split())
    line_of(namesake)
    # A program's environment is there a moment after its process.
    assert wait_until(lambda: reap.mark_of(daemon, "JUPYTER_DISTRIB_WORKER") == "x-c1.0.1", 5)
    assert reap.mark_of(os.getpid(), "JUPYTER_DISTRIB_NOT_SET") == ""
    reap.kill_left(set(), {"x-c1.0.1"})
    rank.communicate()
    assert wait_until_gone([child, daemon], 5) == []
    assert is_alive(namesake.pid)
    end(namesake)


def test_what_ranks_have_left_that_end_together_is_found_with_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    others = reap._others

    def counted(chosen: Callable[[int], bool]) -> list[int]:
        looks.append(chosen)
        return others(chosen)

    monkeypatch.setattr(reap, "_others", counted)
    ranks = [
        program(NEST, start_new_session=True, env={**os.environ, "JUPYTER_DISTRIB_WORKER": f"x-c1.{n}.1"})
        for n in range(2)
    ]
    started = [int(pid) for rank in ranks for pid in line_of(rank).split()]
    loop = Loop()
    sweep = reap.Sweep(loop)
    for n, rank in enumerate(ranks):
        loop.later(0, partial(sweep.add, rank.pid, f"x-c1.{n}.1"))
    loop.later(0, loop.stop)
    loop.run()
    for rank in ranks:
        rank.communicate()
    assert wait_until_gone(started, 5) == []
    assert len(looks) == 1


def test_what_is_gone_is_no_trouble() -> None:
    gone = program("pass")
    gone.communicate()
    reap.kill_left({gone.pid}, set())
    assert reap.session_of(gone.pid) == 0
    assert reap.rss_bytes(gone.pid) == 0
    assert reap.children(gone.pid) == []
    assert reap.mark_of(gone.pid, "PATH") is None


def test_children_and_memory_of_a_process() -> None:
    child = program("import time; print(1, flush=True); time.sleep(60)")
    line_of(child)
    assert child.pid in reap.children(os.getpid())
    assert reap.rss_bytes(child.pid) > 1 << 20
    assert reap.session_of(child.pid) == os.getsid(0)
    end(child)


def test_adopted_children_are_killed_unless_known() -> None:
    text = """
import os, subprocess, sys
from jupyter_distrib.agent import reap
start = lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
known, spared, stray = start(), start(), start()
reap.kill_adopted(frozenset([known.pid]), lambda pid: pid == spared.pid)
states = stray.wait(), known.poll(), spared.poll()
known.kill(); spared.kill()  # before anybody reads on and ends this program
print(*states)
"""
    process = program(text, cwd=Path(__file__).parent.parent)
    assert line_of(process) == "-9 None None"
    end(process)


# ---------------------------------------------------------------------------------------------------- usage


def test_memory_and_time_of_a_process_and_its_children() -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'b = bytearray(80_000_000); print(); input()'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = usage.read(process.pid)
        alone = reap.rss_bytes(process.pid)
        process.communicate(b"\n")
    assert used is not None
    assert used.rss_bytes > alone + 80_000_000
    assert used.cpu_s > 0
    assert used.state in "RS"
    assert not used.stopped


def test_a_stopped_process_is_seen_to_be() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        used = usage.read(process.pid)
        assert used is not None
        assert used.stopped
        process.kill()
    assert usage.read(process.pid) is None


def test_where_there_is_no_proc_the_process_itself_is_told() -> None:
    used = usage._from_psutil(os.getpid())
    assert used is not None
    assert used.rss_bytes > 10_000_000
    assert used.cpu_s > 0


def test_a_signal_is_sent_only_to_who_handles_it() -> None:
    assert usage.catches(os.getpid(), signal.SIGINT)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not usage.catches(process.pid, signal.SIGRTMIN + 10)
        process.kill()
