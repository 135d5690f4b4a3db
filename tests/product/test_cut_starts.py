"""What becomes of a cell whose ranks are about to start when a process is killed that they need: it is started once
more, and if that is killed as well, the cell says who was killed and how."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook import ROOT, Notebook
from tests.processes import agents, held_by_others, wait_until, wait_until_gone
from tests.product.control_groups import memory_group

pytestmark = pytest.mark.slow

GATE = """
import os, sys, time
if "jupyter_distrib.worker.process.forkserver" in sys.orig_argv:
    print("about to import", file=sys.stderr, flush=True)
    open(f"{folder}/{os.getpid()}", "w").close()
    while not os.path.exists("{folder}/go"):
        time.sleep(0.01)
    if os.path.exists("{folder}/end"):
        exec(open("{folder}/end").read())
"""
"""Holds each process that starts ranks before it imports torch."""
CELL = "%%distributed --ranks 2\nrank"
VALUES = "rank 0: 0\nrank 1: 1"


class Start:
    """A kernel one of whose cells waits for ranks, which wait for a process at the gate."""

    def __init__(self, book: Notebook, folder: Path, runtime: Path) -> None:
        self.book, self._folder, self.runtime = book, folder, runtime
        self._seen: set[int] = set()

    @property
    def agent(self) -> int:
        (agent,) = agents(self.runtime)
        return agent

    def next(self) -> int:
        """The next process that comes to the gate."""
        assert wait_until(lambda: self.come - self._seen), "none comes"
        (new,) = self.come - self._seen
        self._seen.add(new)
        return new

    @property
    def come(self) -> set[int]:
        """Everyone who has come to the gate."""
        return {int(path.name) for path in self._folder.iterdir() if path.name.isdigit()}

    def begin(self) -> int:
        first = self.next()
        self.book.start(CELL)
        assert wait_until(lambda: held_by_others(self.runtime, "")), "nobody waits for ranks"
        return first

    def let_go(self, code: str = "") -> None:
        """Let everyone pass, after this code."""
        if code:
            (self._folder / "end").write_text(code)
        (self._folder / "go").touch()

    def heal(self) -> None:
        (self._folder / "end").unlink()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    folder, sources = tmp_path / "gate", tmp_path / "sources"
    folder.mkdir()
    sources.mkdir()
    (sources / "sitecustomize.py").write_text(GATE.replace("{folder}", str(folder)))
    runtime = Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"], "cut")
    env = {"PYTHONPATH": f"{sources}:{ROOT}", "JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}
    with Notebook(tmp_path, env) as book:
        book.ok("%load_ext jupyter_distrib")
        yield Start(book, folder, runtime)
    for pid in (left := agents(runtime)):
        os.kill(pid, signal.SIGTERM)
    assert wait_until_gone(left, 20) == []


def test_who_starts_the_ranks_is_started_once_more_if_killed(start: Start) -> None:
    os.kill(start.begin(), signal.SIGKILL)
    start.next()
    start.let_go()
    outcome = start.book.finish()
    assert outcome.result == VALUES, outcome.text


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), "was killed by SIGKILL"),
        (lambda pid: os.kill(pid, signal.SIGSEGV), "was killed by SIGSEGV"),
        (lambda pid: os.kill(pid, signal.SIGTERM), "was killed by SIGTERM"),
    ],
    ids=["SIGKILL", "SIGSEGV", "SIGTERM"],
)
def test_killed_twice_it_is_reported_with_its_last_words_and_not_started_again(
    start: Start, end: Callable[[int], None], says: str
) -> None:
    end(start.begin())
    end(start.next())
    outcome = start.book.finish()

    assert outcome.ename == "PoolError"
    words = f"the ranks could not be started: the process that starts them {says} before it was ready, 2 times"
    assert outcome.evalue.startswith(words)
    assert outcome.evalue.endswith("\nabout to import")
    start.let_go()
    assert start.book.ok(CELL).result == VALUES


@pytest.mark.parametrize(
    ("code", "says", "starts"),
    [
        ("os._exit(3)", "the process that starts them ended with exit status 3 before it was ready, 2 times", 2),
        ("sys.stderr = open(os.devnull); os._exit(0)", "ended with exit status 0 before it was ready, 2 times", 2),
        ("raise SystemExit('the disk is gone')", "started: SystemExit: the disk is gone\nabout to import\n", 1),
        (
            r"sys.stderr.write('cut ' * 600 + '\nat y\nno such x'); os._exit(1)",
            "started: no such x\nat y\nno such x",
            1,
        ),
    ],
)
def test_an_end_at_import_has_a_reason(start: Start, code: str, says: str, starts: int) -> None:
    start.begin()
    start.let_go(code)
    outcome = start.book.finish()

    assert outcome.ename == "PoolError"
    assert outcome.evalue.startswith("the ranks could not be started:")
    assert says in outcome.evalue
    assert len(start.come) == starts
    start.heal()
    assert start.book.ok(CELL).result == VALUES


def test_the_out_of_memory_killer_is_named(start: Start) -> None:
    first = start.begin()
    with memory_group("jd-start", 90 << 20) as group:
        for pid in (start.agent, first):
            (group / "cgroup.procs").write_text(str(pid))
        start.let_go()
        outcome = start.book.finish()
        os.kill(start.agent, signal.SIGTERM)
    assert "was killed by SIGKILL, by the system's out-of-memory killer before it was ready, 2 times" in outcome.evalue


def test_an_agent_that_is_killed_while_ranks_start_is_replaced_once(start: Start) -> None:
    start.begin()
    os.kill(start.agent, signal.SIGKILL)
    start.next()
    start.let_go()
    outcome = start.book.finish()
    assert outcome.result == VALUES, outcome.text


def test_agents_that_are_killed_twice_are_reported(start: Start) -> None:
    start.begin()
    os.kill(start.agent, signal.SIGKILL)
    start.next()
    os.kill(start.agent, signal.SIGKILL)
    outcome = start.book.finish()

    assert outcome.ename == "PoolError"
    assert "the agent that looks after the ranks has ended, 2 times: try again." in outcome.evalue
    start.let_go()
    assert start.book.ok(CELL).result == VALUES


CUT = """
import threading
from jupyter_distrib.kernel.session import session
def cut(connection):
    while not connection.groups:
        pass
    connection.node._link.sock.shutdown(2)
threading.Thread(target=cut, args=[*session.current().pools.connections]).start()
"""


def test_a_link_that_is_cut_while_ranks_start_is_made_anew(start: Start) -> None:
    start.next()
    start.book.ok(CUT)
    start.book.start(CELL)
    assert wait_until(lambda: held_by_others(start.runtime, ""))
    start.let_go()
    outcome = start.book.finish()
    assert outcome.result == VALUES, outcome.text


def test_ranks_come_from_another_process_if_the_first_is_killed_between_two_of_them(start: Start) -> None:
    start.let_go()
    assert start.book.ok(CELL).result == VALUES
    os.kill(start.next(), signal.SIGKILL)
    outcome = start.book.cell("%%distributed --ranks 3\nrank")
    assert outcome.result == f"{VALUES}\nrank 2: 2", outcome.text
