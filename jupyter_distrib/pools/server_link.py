"""The kernel's link to an agent or coordinator on this machine.

Each thread sends its commands itself; one thread reads the events. An interrupt, which Python raises in the main
thread, never cuts a frame in two.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.base import Lost, Node, Sink
from jupyter_distrib.system import confinement, interrupts, reap
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.wire.link import Link, encode, peer_uid

ENDING_S = 5.0
"""Seconds to wait for the end of a killed agent, which closes its links a moment earlier."""


def greeted(sock: socket.socket, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
    """Say hello on a new connection. Raises `PoolError`."""
    if peer_uid(sock) not in (None, os.getuid()):
        path = sock.getpeername()
        sock.close()
        raise PoolError(f"the agent's socket {path} belongs to another user; remove it and try again.")
    node = LocalNode(Link(sock), sink, lost)
    node.send(hello)
    return node


class LocalNode(Node):
    """The link to this machine's agent. A thread receives its events."""

    def __init__(self, link: Link, sink: Sink, lost: Lost) -> None:
        self._link, self._sink, self._lost = link, sink, lost
        self._sending = threading.Lock()
        self._draining = False
        self._closed = False
        self._pid = 0
        """The agent's process id; 0 until it has answered, or if it is not visible from here."""
        self._end: select.poll | None = None
        """The poll for the end of the agent's process, once the agent has answered."""
        threading.Thread(target=self._read, name="jupyter_distrib-read", daemon=True).start()

    def send(self, command: m.Command, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        """Send as much of a command as the socket accepts now; a thread sends the rest."""
        owned = nullcontext(()) if descriptors is NO_DESCRIPTORS else descriptors
        with interrupts.Uninterrupted(), self._sending, owned as each:
            fds = tuple(each)
            if self._link.fileno() >= 0:
                self._link.post(encode(command, len(fds)), fds)
                with suppress(OSError):  # the reader notices that the agent is gone, and says so
                    if not (self._draining or self._link.flush()):
                        self._drain_in_thread()

    def has_ended(self) -> bool:
        """Return whether the agent's process has ended, even if the end of its link has not been read yet."""
        end = self._end
        return end is not None and bool(end.poll(0))

    def close(self) -> None:
        with interrupts.Uninterrupted(), self._sending:
            self._closed = True
            self._close_if_sent()

    def give_up(self, ranks: Sequence[int]) -> None:
        """Close the link to an agent that does not answer, so that the next cell gets another one: release its name,
        and kill its ranks (these pids) in its place."""
        with suppress(OSError, TypeError):
            Path(self._link.sock.getpeername()).unlink()
        for pid in set(ranks).intersection(reap.children(self._pid) if self._pid else ()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.close()

    def _close_if_sent(self) -> None:
        """Close a closed link once nothing is left to send. Called with `_sending` held."""
        if self._closed and not self._draining:
            with suppress(OSError):
                self._link.sock.shutdown(socket.SHUT_RDWR)

    def _drain_in_thread(self) -> None:
        """Send the rest to an agent that reads more slowly than commands are sent."""
        self._draining = True
        threading.Thread(target=self._drain, name="jupyter_distrib-write", daemon=True).start()

    def _drain(self) -> None:
        """Send until nothing is left; in a thread of its own."""
        poll = select.poll()
        poll.register(self._link.sock, select.POLLOUT)
        while self._draining:
            poll.poll()
            with self._sending:
                self._draining = False
                with suppress(OSError):
                    self._draining = not self._link.flush()
        with self._sending:
            self._close_if_sent()

    def _read(self) -> None:
        agent, reason = -1, "the agent that looks after the ranks has ended"
        while True:
            try:
                event, fds = self._link.receive()
            except (EOFError, OSError):
                break
            if isinstance(event, m.NotServed):
                reason = f"the agent that looks after the ranks cannot serve this notebook: {event.reason.rstrip('.')}"
                break
            if isinstance(event, m.Welcomed) and event.pid_namespace in ("", confinement.pid_namespace()):
                agent, self._pid = _opened(event.pid), event.pid
                self._end = _watching(agent)
            try:
                self._sink(event, Descriptors(fds) if fds else NO_DESCRIPTORS)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - threads that wait for a run must hear of its end whatever breaks here
                traceback.print_exc()
                reason = f"the notebook failed to handle an event of its ranks ({type(error).__name__}: {error})"
                break
        with self._sending:
            self._link.close()
        given_up = self._closed
        if not given_up:
            self._lost(reason)
        self._end = None  # not earlier: a cell that begins now has to see that the agent has ended
        if not given_up:
            _sweep(agent)
        if agent >= 0:
            os.close(agent)


def _opened(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends; return -1 where the system has no such
    descriptors."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return -1


def _sweep(agent: int) -> None:
    """Wait for the agent's end, then end everything that its ranks had started: the ranks themselves end with it."""
    if (end := _watching(agent)) is not None and end.poll(ENDING_S * 1000):
        reap.kill_orphans()


def _watching(agent: int) -> select.poll | None:
    """Return a poll for the end of the agent; None where the system has no descriptors of processes."""
    if agent < 0:
        return None
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    return poll
