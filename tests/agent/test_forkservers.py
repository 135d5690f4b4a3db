"""The agent's side of the forkserver: orders that wait, that fail, and two forkservers at once.

The forkserver is a socket in the test's hand.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.agent.ranks import forkservers as module
from jupyter_distrib.agent.ranks.forkservers import Forkservers
from jupyter_distrib.system import open_files, process_environment
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.process import forkserver
from tests.installed_package import old_torch
from tests.notebook import ROOT


class Stage:
    """Forkservers whose processes are never started: `early` and `preloaded` are the links that those would have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = Loop()
        self.started: list[tuple[Link, Link]] = []
        self.preloaded_came = 0
        self.pids: list[tuple[int, ...]] = []
        self.failures: list[str] = []
        self.log = b""
        monkeypatch.setattr(module.subprocess, "Popen", self._popen)
        self.forkservers = Forkservers(self.loop, self._preloaded)

    def _popen(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        links = [Link(socket.socket(fileno=os.dup(int(fd)))) for fd in command[-2:]]
        self.started.append((links[0], links[1]))
        os.write(options["stdout"].fileno(), self.log)  # type: ignore[attr-defined]
        return type("Process", (), {"pid": 40_000_000 + len(self.started)})()

    def _preloaded(self) -> None:
        self.preloaded_came += 1

    @property
    def early(self) -> Link:
        return self.started[-1][0]

    @property
    def preloaded(self) -> Link:
        return self.started[-1][1]

    def order(self, *ranks: int) -> list[int]:
        """Ask for these ranks; gives the descriptors that go with them."""
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(4 * len(ranks))]
        orders = tuple(
            m.WorkerOrder(
                group="c", worker=f"c.{rank}", agent_pid=1, rank=rank, world_size=9, local_rank=rank, local_world_size=9
            )
            for rank in ranks
        )
        self.forkservers.fork(orders, Descriptors(fds), self.pids.append, self.failures.append)
        return fds

    def turn(self) -> None:
        """Let everything happen that is due."""
        for key, mask in self.loop._selector.select(0.05):
            self.loop._dispatch(key.fd, key.data, mask)

    def answer(self, link: Link, fork: m.Fork, *pids: int) -> None:
        """Answer as a forkserver does, and let the agent take it in."""
        link.send(m.Forked(number=fork.number, pids=pids))
        self.turn()

    def take(self, link: Link) -> m.Fork:
        message, fds = link.receive()
        for fd in fds:
            os.close(fd)
        assert isinstance(message, m.Fork)
        assert len(fds) == 4 * len(message.orders)
        return message

    def close(self) -> None:
        self.forkservers.stop()
        for links in self.started:
            for link in links:
                link.close()
        for _ in range(3):
            self.turn()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    before = set(os.listdir("/proc/self/fd"))
    here = Stage(monkeypatch)
    yield here
    here.close()
    here.forkservers._log.close()
    here.loop._selector.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before), "descriptors are left open"


def test_orders_wait_for_the_forkserver(stage: Stage) -> None:
    stage.order(0, 1)
    stage.order(2)
    assert len(stage.started) == 1
    assert stage.forkservers.state == "importing torch"
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    first, second = stage.take(stage.early), stage.take(stage.early)
    assert [order.rank for order in first.orders] == [0, 1]
    assert [order.rank for order in second.orders] == [2]
    assert stage.forkservers.busy
    stage.answer(stage.early, first, 10, 11)
    stage.answer(stage.early, second, 12)
    assert stage.pids == [(10, 11), (12,)]
    assert not stage.forkservers.busy


def test_the_preloaded_forkserver_takes_over(stage: Stage) -> None:
    stage.forkservers.start()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.preloaded.send(m.ForkserverReady(pid=2, early=False))
    stage.turn()
    assert stage.preloaded_came == 1
    with pytest.raises(EOFError):
        stage.early.receive()
    stage.order(0)
    stage.take(stage.preloaded)


def test_a_forkserver_of_other_packages_completes_its_orders_and_gets_no_more(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.package_folders, "on_path", lambda: (str(tmp_path),))
    stage.forkservers._packages = module.PackageFolders([str(tmp_path)])
    stage.order(0)
    old = stage.early
    old.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    first = stage.take(old)
    stage.order(1)
    second = stage.take(old)

    (tmp_path / "new-1.0.dist-info").mkdir()
    stage.order(2)
    assert len(stage.started) == 2
    stage.early.send(m.ForkserverReady(pid=2, early=True))
    stage.turn()
    third = stage.take(stage.early)
    assert [order.rank for order in third.orders] == [2]
    stage.answer(old, first, 10)
    stage.answer(old, second, 11)
    with pytest.raises(EOFError):
        old.receive()
    stage.answer(stage.early, third, 12)
    assert stage.pids == [(10,), (11,), (12,)]
    stage.order(3)
    assert len(stage.started) == 2


def start_first_rank(stage: Stage) -> None:
    """Have the early forkserver start a rank, and the time of every timer come that is due."""
    stage.order(0)
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.answer(stage.early, stage.take(stage.early), 10)
    stage.loop._fire()


def test_the_preloaded_forkserver_is_forked_when_ranks_have_been(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They, and their first cell, have the processor for themselves."""
    monkeypatch.setattr(module, "PRELOAD_AFTER_S", 0.0)
    start_first_rank(stage)
    assert stage.early.receive() == (m.Preload(), [])
    stage.order(1)
    stage.answer(stage.early, stage.take(stage.early), 11)
    stage.loop._fire()
    assert not stage.early.wait(0), "once is enough"


def test_preloading_does_not_wait_for_a_pause_forever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells in a loop that each want fresh ranks leave none."""
    monkeypatch.setattr(module, "PRELOAD_AFTER_S", 60.0)
    monkeypatch.setattr(module, "PRELOAD_BY_S", 0.0)
    start_first_rank(stage)
    assert stage.early.receive() == (m.Preload(), [])


def test_without_use_for_it_there_is_no_preloaded_forkserver(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRELOAD_AFTER_S", 0.0)
    stage.forkservers.start()
    stage.forkservers.growing = False
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.loop._fire()
    assert not stage.early.wait(0)
    assert stage.forkservers.state == "ready"


def test_answers_of_two_forkservers_are_not_mixed_up(stage: Stage) -> None:
    """The preloaded one comes while the early one still forks, and is faster."""
    stage.order(0, 1)
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    first = stage.take(stage.early)
    stage.preloaded.send(m.ForkserverReady(pid=2, early=False))
    stage.turn()
    stage.order(2)
    stage.answer(stage.preloaded, stage.take(stage.preloaded), 12)
    stage.answer(stage.early, first, 10, 11)
    assert stage.pids == [(12,), (10, 11)]
    with pytest.raises(EOFError):  # and then it is not needed any more
        stage.early.receive()


def test_a_forkserver_that_cannot_start_says_why(stage: Stage) -> None:
    stage.log = b"ImportError: torch is broken\n"
    stage.order(0)
    stage.order(1)
    stage.forkservers.on_child_ended(stage.forkservers.session, 1)
    assert len(stage.failures) == 2
    assert "ImportError: torch is broken" in stage.failures[0]
    stage.log = b""
    stage.order(2)
    assert len(stage.started) == 2, "the next attempt starts another"
    for link in stage.started[0]:
        link.close()
    stage.turn()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.take(stage.early)
    assert len(stage.failures) == 2


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-9, "was killed by SIGKILL before it was ready, 2 times: try again."),
        (-11, "was killed by SIGSEGV before it was ready, 2 times: try again."),
        (-40, "was killed by signal 40 before it was ready, 2 times: try again."),
        (0, "ended with exit status 0 before it was ready, 2 times: try again."),
        (3, "ended with exit status 3 before it was ready, 2 times: try again."),
        (1, "ended with exit status 1 before it was ready, 2 times: try again."),
    ],
)
def test_a_forkserver_that_ends_without_a_word_is_started_once_more_and_then_reported(
    stage: Stage, code: int, says: str
) -> None:
    for turn in (1, 3):
        stage.order(0)
        stage.forkservers.on_child_ended(stage.forkservers.session, code)
        assert len(stage.started) == turn + 1, "one more is started"
        assert len(stage.failures) == turn // 2
        stage.log = b"last words\n" if code != 1 else b""
        stage.forkservers.on_child_ended(stage.forkservers.session, code)
        assert len(stage.started) == turn + 1, "and no third one"
        (*_, failure) = stage.failures
        assert failure.startswith(f"the ranks could not be started: the process that starts them {says}")


def test_the_last_words_of_a_forkserver_that_was_killed_are_reported(stage: Stage) -> None:
    stage.log = b"warning\n" * 1000 + b"no space left\n"
    stage.order(0)
    for _ in range(2):
        stage.forkservers.on_child_ended(stage.forkservers.session, -9)
    (failure,) = stage.failures
    assert failure.endswith("\nno space left")
    assert len(failure) < 2200


def test_a_forkserver_that_may_start_no_thread_says_so(stage: Stage) -> None:
    stage.log = b"Traceback (most recent call last):\nRuntimeError: can't start new thread\n"
    stage.order(0)
    stage.forkservers.on_child_ended(stage.forkservers.session, 1)
    (failure,) = stage.failures
    assert failure.startswith("the ranks could not be started: this user may not start more processes (ulimit -u, or ")
    assert "Traceback" not in failure


def test_the_last_words_of_one_failure_are_not_reported_at_the_next(stage: Stage) -> None:
    for words in (b"no space left\n", b""):
        stage.log = words
        stage.order(0)
        for _ in range(2):
            stage.forkservers.on_child_ended(stage.forkservers.session, -9)
    assert ["no space left" in failure for failure in stage.failures] == [True, False]


def test_a_forkserver_that_was_ready_in_between_makes_the_next_failure_the_first(stage: Stage) -> None:
    stage.order(0)
    stage.forkservers.on_child_ended(stage.forkservers.session, -9)
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.answer(stage.early, stage.take(stage.early), 10)
    stage.early.close()
    stage.preloaded.close()
    for _ in range(2):
        stage.turn()
    stage.order(1)
    stage.forkservers.on_child_ended(stage.forkservers.session, -9)
    assert not stage.failures
    stage.early.send(m.ForkserverReady(pid=2, early=True))
    stage.turn()
    assert [order.rank for order in stage.take(stage.early).orders] == [1]


def test_a_forkserver_that_ends_while_nobody_waits_costs_nobody_an_attempt(stage: Stage) -> None:
    stage.forkservers.start()
    stage.forkservers.on_child_ended(stage.forkservers.session, -9)
    stage.order(0)
    stage.forkservers.on_child_ended(stage.forkservers.session, -9)
    assert not stage.failures
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    assert [order.rank for order in stage.take(stage.early).orders] == [0]


def test_a_forkserver_that_can_open_no_more_says_so_and_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError("with descriptors that have not arrived")

    monkeypatch.setattr(forkserver.os, "fork", fork)
    ours, theirs = (Link(each) for each in socket.socketpair())
    read_fd, write_fd = os.pipe()
    with ours.sock, theirs.sock, os.fdopen(read_fd, "rb") as file:
        forkserver._fork_ranks(theirs, None, m.Fork(number=7, orders=()), [write_fd, open_files.LOST], early=False)
        answer, _ = ours.receive()
        assert file.read() == b"", "those that have arrived are closed"
    assert isinstance(answer, m.ForkFailed)
    assert answer.number == 7
    assert "the system cannot fork: Too many open files: the limit is " in answer.reason


def test_a_forkserver_without_torch_says_what_to_install() -> None:
    command = [sys.executable, "-S", "-m", "jupyter_distrib.worker.process.forkserver", str(os.getpid()), "0", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stderr.startswith("torch is not installed for ranks")
    assert len(done.stderr.splitlines()) == 1


def test_a_forkserver_with_an_old_torch_says_which_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jupyter_distrib.worker.process.forkserver", str(os.getpid()), "0", "0"]
    env = {**os.environ, **old_torch(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert done.stderr.startswith("torch 2.6.0 is too old for jupyter_distrib, which needs ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_forkserver_with_a_torch_that_lacks_a_private_name_says_which(tmp_path: Path) -> None:
    tmp_path.joinpath("sitecustomize.py").write_text(
        "import torch\ndel torch.utils.data.dataloader._BaseDataLoaderIter"
    )
    command = [sys.executable, "-m", "jupyter_distrib.worker.process.forkserver", str(os.getpid()), "0", "0"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    version = process_environment.version("torch")
    assert done.stderr == (
        f"torch {version} has no torch.utils.data.dataloader._BaseDataLoaderIter, which jupyter_distrib needs: "
        "install torch 2.9 to 2.15, or a newer jupyter_distrib.\n"
    )


def test_an_order_that_dies_with_its_forkserver_is_given_to_the_next_once(stage: Stage) -> None:
    stage.order(0)
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.take(stage.early)
    stage.early.close()
    stage.turn()
    assert not stage.forkservers.busy
    stage.preloaded.send(m.ForkserverReady(pid=2, early=False))
    stage.turn()
    assert [order.rank for order in stage.take(stage.preloaded).orders] == [0]
    assert not stage.failures
    stage.preloaded.close()
    stage.turn()
    (failure,) = stage.failures
    assert failure.endswith(
        "the process that starts them has ended while it started them, as did the one before: try again."
    )
    assert not stage.forkservers.busy
    started = len(stage.started)
    stage.order(1)
    for link in stage.started[0]:
        link.close()
    stage.forkservers.on_child_ended(40_000_001, -9)
    for _ in range(3):
        stage.turn()
    assert len(stage.started) == started + 1, "the next order starts one"
    stage.early.send(m.ForkserverReady(pid=3, early=True))
    stage.turn()
    assert [order.rank for order in stage.take(stage.early).orders] == [1], "and it is not given to a third one"


def test_ranks_that_cannot_be_forked_fail_for_the_reason_that_the_forkserver_gives(stage: Stage) -> None:
    """Later orders, and their answers, are not mixed up with theirs."""
    stage.order(0, 1)
    stage.order(2)
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    first, second = stage.take(stage.early), stage.take(stage.early)
    stage.answer(stage.early, second, 12)
    stage.early.send(m.ForkFailed(number=first.number, reason="no more processes."))
    stage.turn()
    assert stage.pids == [(12,)]
    assert stage.failures == ["no more processes."]
    assert not stage.forkservers.busy


def test_a_forkserver_that_cannot_be_started_fails_its_orders(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as context:
        context.setattr(module.subprocess, "Popen", no_more)
        stage.order(0)
    assert len(stage.failures) == 1
    assert "may not start more" in stage.failures[0]
    stage.order(1)
    assert len(stage.started) == 1, "the next order starts one"


def test_an_order_that_cannot_be_sent_for_want_of_files_fails_and_the_next_one_is_sent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    stage.forkservers.start()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    with monkeypatch.context() as context:
        context.setattr(Link, "post", full)
        stage.order(0)
    (failure,) = stage.failures
    assert failure.startswith("the ranks could not be started: Too many open files: the limit is ")
    assert not stage.forkservers.busy
    stage.order(1)
    assert [order.rank for order in stage.take(stage.early).orders] == [1]


def test_an_order_for_a_forkserver_that_has_just_died_goes_to_the_next(stage: Stage) -> None:
    stage.forkservers.start()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.early.close()
    stage.preloaded.close()
    stage.order(0)
    stage.forkservers.on_child_ended(40_000_001, -9)
    for _ in range(3):
        stage.turn()
    assert len(stage.started) == 2
    stage.early.send(m.ForkserverReady(pid=3, early=True))
    stage.turn()
    assert [order.rank for order in stage.take(stage.early).orders] == [0]
    assert not stage.failures


def test_the_preloaded_forkserver_serves_what_the_base_one_left(stage: Stage) -> None:
    stage.forkservers.start()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    stage.early.close()
    stage.turn()
    stage.order(0)
    stage.forkservers.on_child_ended(40_000_001, -9)
    assert not stage.failures
    stage.preloaded.send(m.ForkserverReady(pid=2, early=False))
    stage.turn()
    stage.take(stage.preloaded)
    assert len(stage.started) == 1


def test_a_preloaded_forkserver_that_has_died_is_not_waited_for(stage: Stage) -> None:
    stage.forkservers.start()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    assert stage.forkservers.state == "ready (still importing)"
    stage.preloaded.close()
    stage.turn()
    assert stage.forkservers.state == "ready"
    stage.order(0)
    stage.take(stage.early)


@pytest.mark.slow
def test_many_orders_at_once_all_arrive(stage: Stage) -> None:
    """More than the socket takes at once."""
    stage.forkservers.start()
    stage.early.send(m.ForkserverReady(pid=1, early=True))
    stage.turn()
    for _ in range(40):
        stage.order(*range(60))
    count = 0
    stage.early.sock.setblocking(False)
    while count < 40:
        stage.turn()
        for message, fds in stage.early.read():
            assert isinstance(message, m.Fork)
            assert len(fds) == 240
            count += 1
            for fd in fds:
                os.close(fd)
    assert not stage.failures
