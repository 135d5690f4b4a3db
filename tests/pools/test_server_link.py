"""The kernel's end of the link to the agent: what is sent arrives whole and in order, and nobody waits for the agent."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.run import PoolLink, Run
from jupyter_distrib.pools.server_link import LocalNode, greeted
from jupyter_distrib.wire import link as links
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link, encode

BIG = "k" * 100_000
"""Two of them are more than a unix socket takes at once."""


@dataclass
class Ends:
    node: LocalNode
    agent: Link
    lost: queue.SimpleQueue[str]

    def heard(self, count: int) -> list[m.Command]:
        return [self.agent.receive()[0] for _ in range(count)]  # type: ignore[misc]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, theirs = socket.socketpair()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(event: m.Event, fds: object) -> None:
        raise ValueError("cannot take this")

    theirs.settimeout(60)
    both = Ends(node=LocalNode(Link(mine), sink, lost.put), agent=Link(theirs), lost=lost)
    yield both
    both.node.close()
    theirs.close()


def test_commands_arrive_in_order_whether_the_agent_reads_or_not(ends: Ends) -> None:
    big = [m.Forget(group=f"{n}", keys=(BIG,)) for n in range(20)]
    for command in big:  # more than the socket takes, and nobody reads: must not block
        ends.node.send(command)
    ends.node.send(m.Probe(run="last"))

    assert ends.heard(21) == [*big, m.Probe(run="last")]
    ends.node.send(m.Probe(run="direct"))
    assert ends.heard(1) == [m.Probe(run="direct")]


def test_what_was_sent_before_the_end_arrives(ends: Ends) -> None:
    commands = [m.Forget(group=f"{n}", keys=(BIG,)) for n in range(20)]
    for command in commands:
        ends.node.send(command)
    ends.node.close()

    assert ends.heard(20) == commands
    with pytest.raises(EOFError):
        ends.agent.receive()
    assert ends.lost.empty()


def test_descriptors_go_along_and_are_taken_over(ends: Ends) -> None:
    read_fd, write_fd = os.pipe()
    ends.node.send(m.Probe(run="first"), Descriptors([write_fd]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)

    command, (fd,) = ends.agent.receive()
    assert command == m.Probe(run="first")
    os.write(fd, b"through")
    os.close(fd)
    assert os.read(read_fd, 20) == b"through"
    os.close(read_fd)


def test_an_agent_that_is_gone_is_reported_once_and_takes_descriptors_with_it(ends: Ends) -> None:
    ends.agent.sock.shutdown(socket.SHUT_RDWR)
    assert "has ended" in ends.lost.get(timeout=60)
    read_fd, write_fd = os.pipe()

    ends.node.send(m.Probe(run="late"), Descriptors([write_fd]))

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)
    os.close(read_fd)
    assert ends.lost.empty()


def test_an_event_on_which_the_notebook_breaks_ends_the_link_and_says_so(ends: Ends) -> None:
    """Whoever waits for a run would wait for ever if only the thread that reads ended."""
    ends.agent.send(m.Noted(run="r", rank=None, text="hello"))

    assert "ValueError: cannot take this" in ends.lost.get(timeout=60)
    with pytest.raises(EOFError):
        ends.agent.receive()


def test_who_waits_for_a_run_hears_of_its_end_though_what_follows_from_it_breaks() -> None:
    run = Run(RunRecord(run="r", label="Cell In[1]", ranks=[0], world_size=1), PoolLink(pool="local"))
    run.on_ended.append(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run.deliver(m.Ended(run="r", at_s=1.0))

    assert run.done()


def test_an_interrupt_cuts_no_command_in_two(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = links.Link.flush

    def pressed(link: Link) -> None:
        signal.raise_signal(signal.SIGINT)
        flush(link)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(links.Link, "flush", pressed)
    with pytest.raises(KeyboardInterrupt):
        ends.node.send(m.Probe(run="whole"))
    monkeypatch.undo()
    ends.node.send(m.Probe(run="next"))

    assert ends.heard(2) == [m.Probe(run="whole"), m.Probe(run="next")]


SERVES = """
import os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
sock, _ = listener.accept()
sys.stdout.write(sock.recv(4).hex())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("uid", "is_greeted"), [(0, True), (12345, False)])
def test_a_socket_of_another_user_is_told_nothing(uid: int, is_greeted: bool) -> None:
    """It would get the notebook's code and environment."""
    name = f"\0jupyter_distrib-test-{secrets.token_hex(8)}"
    hello = m.Hello(protocol=m.PROTOCOL, session="s", pid=1, label="x", python="", torch="", cloudpickle="")
    program = SERVES.replace("sys.argv[1]", repr(name))
    with (
        subprocess.Popen([sys.executable, "-c", program, "", str(uid)], stdout=subprocess.PIPE, text=True) as process,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        assert process.stdout is not None
        assert process.stdout.readline()
        sock.connect(name)
        if is_greeted:
            node = greeted(sock, hello, lambda *_: None, lambda _: None)
            assert process.stdout.read() == encode(hello)[:4].hex()
            node.close()
        else:
            with pytest.raises(PoolError, match="belongs to another user"):
                greeted(sock, hello, lambda *_: None, lambda _: None)
            assert process.stdout.read() == ""
