"""What a rank is made of: late threads, local modules, the shell it offers, its streams, and its process group."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_distrib import reporting
from jupyter_distrib.events import Cleared, Displayed, Returned, Started, WorkerOrder, Wrote
from jupyter_distrib.link import Link
from jupyter_distrib.worker import displaying, shell
from jupyter_distrib.worker.late import LateThreads
from jupyter_distrib.worker.main import Worker
from jupyter_distrib.worker.modules import LocalModules

ROOT = Path(__file__).parent.parent


def run(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        **options,
    )


# ---------------------------------------------------------------------------------------------------- late threads


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Standard streams that a test may replace."""
    out, err = io.StringIO(), io.StringIO()
    for name, stream in (("stdout", out), ("__stdout__", out), ("stderr", err), ("__stderr__", err)):
        monkeypatch.setattr(sys, name, stream)
    return SimpleNamespace(out=out, err=err)


class Talker:
    """A thread that prints when it is told to."""

    def __init__(self) -> None:
        self._go, self._done, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self._text = ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self._go.acquire() and not self._over:
            print(self._text)
            self._done.release()

    def say(self, text: str) -> None:
        self._text = text
        self._go.release()
        self._done.acquire()

    def end(self) -> None:
        self._over = True
        self._go.release()
        self.thread.join()


def test_without_late_threads_the_streams_are_the_plain_ones(streams: SimpleNamespace) -> None:
    late = LateThreads(0, lambda event: pytest.fail("nothing is late"))
    late.begin()
    assert (sys.stdout, vars(streams.out)) == (streams.out, {})
    late.end("r-1")
    late.begin()
    assert (sys.stdout, vars(streams.out)) == (streams.out, {})


def test_a_late_thread_writes_to_its_own_run(streams: SimpleNamespace) -> None:
    sent: list[Wrote] = []
    late = LateThreads(3, sent.append)
    late.begin()
    talker = Talker()
    talker.say("in time")
    late.end("r-1")
    late.begin()
    talker.say("too late")
    print("of the second cell")
    other = Talker()
    other.say("of the second cell's thread")
    late.end("r-2")
    late.begin()
    talker.say("still the first's")
    other.say("the second's")
    assert streams.out.getvalue() == "in time\nof the second cell\nof the second cell's thread\n"
    texts = {run: "".join(event.text for event in sent if event.run == run) for run in ("r-1", "r-2")}
    assert texts == {"r-1": "too late\nstill the first's\n", "r-2": "the second's\n"}
    assert {event.rank for event in sent} == {3}
    talker.end()
    other.end()
    late.end("r-3")
    late.begin()
    assert (sys.stdout, vars(streams.out)) == (streams.out, {}), "the last late thread has ended"


# ---------------------------------------------------------------------------------------------------- local modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + len(text) * 1_000_000_000))


def test_an_edited_module_is_imported_again(folder: Path) -> None:
    modules = LocalModules()
    write(folder / "helper_a.py", "value = 1")
    write(folder / "helper_b.py", "from helper_a import value\nimport textwrap")
    import helper_b  # type: ignore[import-not-found]

    modules.remember()
    assert modules.refresh() == []
    assert sys.modules["helper_b"] is helper_b, "nothing changed"
    write(folder / "helper_a.py", "value = 22")
    assert modules.refresh() == [str(folder / "helper_a.py")]
    import helper_b as again

    assert again.value == 22, "the module that imported the edited one is new as well"
    modules.remember()
    assert modules.refresh() == []


def test_a_package_is_one_unit_and_a_deleted_file_a_change(folder: Path) -> None:
    modules = LocalModules()
    write(folder / "helper_package" / "__init__.py", "")
    write(folder / "helper_package" / "part.py", "value = 1")
    import helper_package.part  # type: ignore[import-not-found]

    modules.remember()
    (folder / "helper_package" / "part.py").unlink()
    assert modules.refresh() == [str(folder / "helper_package" / "part.py")]
    assert "helper_package" not in sys.modules
    assert "helper_package.part" not in sys.modules
    del helper_package


def test_installed_modules_stay() -> None:
    modules = LocalModules()
    modules._baseline, modules._last, modules._looked_at = frozenset(), "", (0, "")  # as if nothing had been imported
    modules.remember()
    assert {"json", "pytest", "jupyter_distrib", "jupyter_distrib.link"} <= modules._others
    assert "tests" in modules._known


@pytest.mark.parametrize("many", [1, 63, 64, 65, 1000])
def test_what_came_last_is_found_whatever_was_taken_away(folder: Path, many: int) -> None:
    modules = LocalModules()
    write(folder / "helper_a.py", "value = 1")
    import helper_a  # type: ignore[import-not-found]

    for number in range(many):
        sys.modules[f"helper_{number}"] = types.ModuleType(f"helper_{number}")
    modules.remember()
    assert list(modules._known) == ["helper_a"]
    assert len(modules._others) == many

    modules = LocalModules()
    del sys.modules[modules._last]
    write(folder / "helper_b.py", "value = 1")
    import helper_b

    modules.remember()
    assert list(modules._known) == ["helper_b"]
    del helper_a, helper_b


# ---------------------------------------------------------------------------------------------------- shell


def test_commands_run_and_leave_their_status(capfd: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"rank": 3, "name": "x y"}
    here = shell.RankShell(namespace)
    here.system("echo hello $rank {rank + 1} ${HOME:+home}; exit 3")
    assert capfd.readouterr().out == "hello 3 4 home\n"
    assert namespace["_exit_code"] == 3
    assert here.getoutput("printf 'a\\nb'; echo c >&2") == ["a", "bc"]
    assert here.getoutput("echo {name}", split=False) == "x y\n"


@pytest.mark.parametrize(
    ("command", "expanded"),
    [
        ("$rank", "3"),
        ("$rank.txt", "3.txt"),
        ("$PATH $rank", "$PATH 3"),
        ("$", "$"),
        ("{rank:03d}", "{rank:03d}"),
        ("{rank}{rank}", "33"),
        ("awk '{print $1}'", "awk '{print $1}'"),
        ("{", "{"),
        ("}{rank", "}{rank"),
        ("$ranks", "$ranks"),
    ],
)
def test_names_are_put_into_commands(command: str, expanded: str) -> None:
    assert shell.RankShell({"rank": 3})._expand(command) == expanded


def test_line_magics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    here = shell.RankShell({"sub": "inner"})
    here.run_line_magic("cd", "$sub")
    assert os.getcwd() == here.run_line_magic("pwd", "") == str(tmp_path / "inner")
    monkeypatch.setenv("JD_TEST", "0")
    here.run_line_magic("env", "JD_TEST={1 + 1}")
    assert here.run_line_magic("env", "JD_TEST") == "2"
    here.run_line_magic("set_env", "JD_TEST=3")
    assert os.environ["JD_TEST"] == "3"
    assert here.run_line_magic("time", "1 + 1") == 2
    assert here.run_line_magic("time", "x = 5") is None
    assert here.user_ns["x"] == 5
    assert capsys.readouterr().out.count("wall time") == 2
    assert here.run_line_magic("matplotlib", "inline") is None
    with pytest.raises(NameError, match="%timeit cannot run on a rank"):
        here.run_line_magic("timeit", "1")
    with pytest.raises(ZeroDivisionError):
        here.run_line_magic("time", "1 / 0")


def test_displaying_text_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    displaying.display("text", [1], metadata={})
    assert capsys.readouterr().out == "text\n[1]\n"


class Shows:
    """Shows itself in one format."""

    def __init__(self, kind: str, content: object) -> None:
        self._bundle = {kind: content, "text/plain": "plain"}

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        return self._bundle


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Displayed | Cleared]:
    events: list[Displayed | Cleared] = []
    monkeypatch.setattr(displaying, "current", displaying.Displayer("r-1", 3, events.append))
    return events


def bundles(events: list[Displayed | Cleared]) -> list[dict[str, str]]:
    return [event.data for event in events if isinstance(event, Displayed)]


def test_bytes_and_json_travel_as_text(shown: list[Displayed | Cleared]) -> None:
    displaying.display(Shows("image/png", b"\x00\xff"), metadata={"image/png": {"width": 3}})
    displaying.display({"application/json": {"a": [1, 2]}}, raw=True, metadata={"nan": float("nan")})
    displaying.close()
    assert bundles(shown) == [
        {"image/png": "AP8=", "text/plain": "plain"},
        {"application/json": '{"a": [1, 2]}'},
    ]
    assert [event.metadata for event in shown if isinstance(event, Displayed)] == [{"image/png": {"width": 3}}, {}]


def test_a_display_that_is_too_large_is_a_sentence(
    shown: list[Displayed | Cleared], capsys: pytest.CaptureFixture[str]
) -> None:
    displaying.display(Shows("text/html", "x" * 12_000_000))
    displaying.display(Shows("text/html", "x" * 12_000_000), display_id="large")
    displaying.close()
    sentence = "A display of 12.0 MB is left out; up to 10.0 MB are shown. Save it to a file, or make it smaller."
    assert capsys.readouterr().out == f"{sentence}\n"
    assert bundles(shown) == [{"text/plain": sentence}]


def test_code_of_a_rank_is_not_for_the_notebook(
    shown: list[Displayed | Cleared], capsys: pytest.CaptureFixture[str]
) -> None:
    displaying.display(Shows("application/javascript", "alert(1)"))
    displaying.close()
    assert (shown, capsys.readouterr().out) == ([], "plain\n")


def test_a_flood_of_updates_becomes_the_newest(shown: list[Displayed | Cleared]) -> None:
    handle = displaying.display(Shows("text/html", "0"), display_id=True)
    for number in range(1, 1001):
        displaying.update_display(Shows("text/html", str(number)), display_id=handle.display_id)
    displaying.close()
    assert len(shown) < 20
    assert bundles(shown)[0]["text/html"] == "0"
    assert bundles(shown)[-1]["text/html"] == "1000"
    assert not isinstance(shown[0], Cleared)
    assert not shown[0].update


def test_clearing_with_wait_keeps_the_old_until_there_is_something_new(shown: list[Displayed | Cleared]) -> None:
    displaying.display(Shows("text/html", "old"))
    displaying.clear_output(wait=True)
    assert len(shown) == 1
    displaying.display(Shows("text/html", "new"))
    displaying.close()
    assert [type(event) for event in shown] == [Displayed, Cleared, Displayed]


def test_clearing_takes_back_what_is_on_its_way(shown: list[Displayed | Cleared]) -> None:
    for number in range(5):
        displaying.display(Shows("text/html", str(number)))
    displaying.clear_output()
    displaying.close()
    assert isinstance(shown[-1], Cleared)
    assert len(bundles(shown)) <= 2


# ---------------------------------------------------------------------------------------------------- process


def test_streams_are_taken_at_every_level(tmp_path: Path) -> None:
    program = """
    import ctypes, os, subprocess, sys
    from jupyter_distrib.worker import process
    out, err = (os.open(path, os.O_WRONLY | os.O_CREAT) for path in sys.argv[1:3])
    process.take_streams(out, err)
    print("python ü \\ud800")
    ctypes.CDLL(None).puts(b"c")
    os.write(1, b"descriptor\\n")
    subprocess.run("echo child; echo child-err >&2", shell=True)
    sys.stderr.write("err\\n")
    try:
        input("name? ")
    except EOFError as error:
        print(str(error)[:32])
    sys.stdout.write("held back")
    process.flush_streams()
    os._exit(0)
    """
    out, err = tmp_path / "out", tmp_path / "err"
    done = run(program, str(out), str(err))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = out.read_text()
    assert text.startswith("python ü \\ud800\nc\ndescriptor\nchild\n")
    assert "a rank has no keyboard: input()" in text
    assert text.endswith("held back")
    assert err.read_text() == "child-err\nerr\n"


def test_a_closed_stream_is_no_trouble() -> None:
    done = run(
        "import sys\nfrom jupyter_distrib.worker import process\n"
        "sys.stdout.close(); sys.stderr = None\nprocess.flush_streams()"
    )
    assert done.returncode == 0


def test_a_process_dies_with_its_parent() -> None:
    program = """
    import os, sys, time
    from jupyter_distrib.worker import process
    parent = os.getpid()
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        process.die_with_parent(parent)
        os.write(write_fd, str(os.getpid()).encode())
        time.sleep(60)
    print(os.read(read_fd, 20).decode(), flush=True)
    os._exit(0)
    """
    from tests.processes import wait_until_gone

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=20,
    )
    assert wait_until_gone([int(done.stdout)], 5) == []


def test_a_process_whose_parent_is_gone_already_ends() -> None:
    done = run("from jupyter_distrib.worker import process\nprocess.die_with_parent(2**22 - 1)\nprint('never')")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_parent_that_is_a_zombie_is_gone() -> None:
    """A killed agent stays one for as long as the kernel that started it lives."""
    program = """
    import os, sys
    from jupyter_distrib.worker import process
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    process.die_with_parent(zombie)
    """
    assert run(program).returncode == 1


def test_an_orphan_belongs_to_the_next_subreaper() -> None:
    program = """
    import os
    from jupyter_distrib.worker import process
    process.become_subreaper()
    me = os.getpid()
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        if process.fork_orphan() == 0:
            process.die_with_parent(me)
            os.write(write_fd, str(os.getppid() == me).encode())
            os._exit(0)
        os._exit(0)
    print(os.read(read_fd, 10).decode())
    """
    assert run(program).stdout == "True\n"


# ---------------------------------------------------------------------------------------------------- reporting


def test_reports_are_harmless_outside_a_run() -> None:
    assert reporting.current is None
    reporting.report(loss=1)
    assert list(reporting.progress(range(3))) == [0, 1, 2]


# ---------------------------------------------------------------------------------------------------- group

RANK = """
import os, sys, socket
import torch, torch.distributed as dist
from jupyter_distrib.events import WorkerOrder
from jupyter_distrib.worker import group, identity
rank, port, fd = map(int, sys.argv[1:4])
identity.take(WorkerOrder(
    crew="c", worker=f"c.{rank}", agent_pid=1, rank=rank, world_size=2, local_rank=rank, local_world_size=2
))
mine = group.Rendezvous(rank, 2)
group.install(mine)
mine.regroup("127.0.0.1", port, fd)
os.environ |= identity.environment() | mine.environment() | identity.with_defaults({})

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

# three groups of the user's own, one after another, in each of two runs
for run in ("r-1", "r-2"):
    mine.begin(run)
    for _ in range(3):
        dist.init_process_group("gloo")
        assert total() == 2
        assert mine.sequence() == 0
        dist.destroy_process_group()
        assert mine.sequence() == -1
# the strategy's group is kept from run to run, and tolerates the user's own calls
mine.begin("r-3")
mine.ensure("gloo")
first = dist.group.WORLD
mine.begin("r-4")
mine.ensure("gloo")
assert dist.group.WORLD is first
dist.init_process_group("gloo")
dist.init_process_group()
assert dist.group.WORLD is first and mine.automatic
before = mine.sequence()
total()
assert mine.sequence() == before + 1
try:
    dist.init_process_group("nccl")
except ValueError as error:
    assert "already made" in str(error) and "gloo" in str(error), error
else:
    raise SystemExit("nccl was taken")
# what the user does to it makes it unfit for the next run
dist.new_group([0, 1])
assert not mine.automatic
mine.begin("r-5")
mine.ensure("gloo")
assert dist.group.WORLD is not first and total() == 2
dist.destroy_process_group()
mine.begin("r-6")
mine.ensure("gloo")
assert total() == 2
# the user's own group over the strategy's
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="env://")
assert total() == 2 and not mine.automatic
mine.drop()
mine.drop()
assert not dist.is_initialized()
print("fine", flush=True)
"""


@pytest.mark.slow
def test_groups_come_and_go_in_two_ranks() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(port), str(fd if rank == 0 else -1)],
                pass_fds=[fd] if rank == 0 else [],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
    outputs = [rank.communicate(timeout=50)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert all("fine" in output for output in outputs)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    sys.platform != "linux"
    or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1)
    or not HUGE_PAGES.exists()
    or "[never]" in HUGE_PAGES.read_text(),
    reason="this system has no MADV_COLLAPSE (Linux 6.1), or no huge pages",
)
def test_memory_that_is_forked_often_is_in_huge_pages() -> None:
    program = """
        import mmap, re
        from jupyter_distrib.worker import process
        block = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_NOHUGEPAGE)
        block[:: 4096] = bytes(16384)
        block.madvise(mmap.MADV_HUGEPAGE)
        process.gather_memory()
        print(re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
        assert block[:] == bytes(64 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) >= 32 << 10, "kB"


# ---------------------------------------------------------------------------------------------------- telling


@pytest.fixture
def told() -> Iterator[tuple[Worker, Link]]:
    """A worker, and the agent's end of its link."""
    mine, theirs = map(Link, socket.socketpair())
    order = WorkerOrder(crew="c", worker="w", agent_pid=1, rank=0, world_size=1, local_rank=0, local_world_size=1)
    yield Worker(order, mine, -1), theirs
    mine.close()
    theirs.close()


def test_an_interrupt_cuts_no_event_in_two(told: tuple[Worker, Link]) -> None:
    """The agent would take the rest for another frame, and give the rank up with all that it keeps."""
    worker, theirs = told
    worker.interruptible = True
    big = Displayed(run="r", rank=0, data={"text/plain": "x" * 2_000_000}, metadata={}, at_s=1.0)
    got = []

    def read() -> None:
        theirs.wait(60_000)  # more is on its way than the socket takes: the main thread is in the midst of it
        os.kill(os.getpid(), signal.SIGINT)
        got.extend([theirs.receive()[0], theirs.receive()[0]])

    before = signal.signal(signal.SIGINT, worker.on_interrupt)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        worker._tell(big)
        worker._tell(Cleared(run="r", rank=0, at_s=2.0))
        reader.join(60)
    finally:
        signal.signal(signal.SIGINT, before)

    assert got == [big, Cleared(run="r", rank=0, at_s=2.0)]
    assert worker._unheard, "the control thread tries it again"


def test_a_cell_that_is_over_at_once_tells_its_start_with_its_end(told: tuple[Worker, Link]) -> None:
    worker, theirs = told
    start, end = (
        Started(run="r", rank=0, pid=5, device="cpu", at_s=1.0),
        Returned(run="r", rank=0, value=None, at_s=2.0),
    )

    worker._unannounced = start
    worker._tell(end)
    worker._unannounced = start
    worker._announce()
    worker._tell(end)

    assert [theirs.receive()[0] for _ in range(3)] == [replace(end, started=start), start, end]
