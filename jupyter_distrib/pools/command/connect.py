"""Starts a command that reaches a host, and through it the host's relay; takes up its connection again when it has
broken. Blocks, in a thread for each host."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import IO, Any

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command import bootstrap, piped_relay, takeover
from jupyter_distrib.pools.command.command import HostCommand, last_line
from jupyter_distrib.system import process
from jupyter_distrib.system.launch import new_log
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link, encode

BROUGHT = ("cloudpickle", "nvidia-ml-py", "threadpoolctl")
"""Packages sent to hosts along with this one, so that hosts need nothing but torch."""
ANSWER_S = 30.0
"""Seconds to wait for the Python on the host to answer."""
START_S = 90.0
"""Seconds to wait for it to start an agent."""
LOOK_S = 0.2
"""Seconds between checks whether the host is still wanted."""
ENDING_S = 2.0
"""Seconds to wait for a command to end after its input has ended."""
TURNED_AWAY_S = 10.0
"""Seconds in which a command is repeated that was one of too many at the same time."""
PAUSES_S = (0.2, 1.5)
"""Limits of the pauses in between, which differ, so that not all try again together."""
ATTEMPT_S = 15.0
"""Seconds for one attempt to take up a broken connection."""
AGAIN_S = 1.0
"""Seconds between attempts to take up a broken connection."""
_MAX_BANNER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConnection:
    """A host whose relay has started."""

    host: str
    process: subprocess.Popen[bytes]
    link: Link
    log: IO[bytes]
    facts: dict[str, Any] = field(default_factory=dict)
    """The result of `PipedRelay._start`."""

    def said(self) -> str:
        """Return the last line of the command's standard error."""
        return last_line(_read(self.log))

    def end(self) -> None:
        """End the command, and with it the process at its other end. Takes seconds if it does not comply."""
        with suppress(OSError):
            self.link.sock.shutdown(socket.SHUT_RDWR)
        _end(self.process, 0)  # no output yet: the process must see the end of its input
        self.link.close()
        self.log.close()


_GIVEN_UP = "the request was cancelled before the ranks started."


class GivenUpConnecting(PoolError):
    """Raised when the host is no longer wanted."""


def connect(
    command: HostCommand, host: str, archive: Future[bytes], start: Mapping[str, Any], given_up: threading.Event
) -> HostConnection:
    """Reach a host and start its relay.

    Args:
        command: The way to the hosts.
        host: The one to reach.
        archive: This package as a file for this version of Python; awaited only when the host answers.
        start: Arguments of `PipedRelay._start`.
        given_up: Set when the host is no longer wanted.

    Raises:
        PoolError: The message says why the host cannot be used.
    """
    until_s = time.monotonic() + TURNED_AWAY_S
    while True:
        dialogue = _Dialogue(command, _begun(command, host), given_up)
        try:
            dialogue.run(archive, start)
            return dialogue.connection
        except _TurnedAway:
            dialogue.give_up()
            if time.monotonic() > until_s:
                raise
        except BaseException:
            dialogue.give_up()
            raise
        if given_up.wait(secrets.SystemRandom().uniform(*PAUSES_S)):
            raise GivenUpConnecting(_GIVEN_UP)


class _TurnedAway(PoolError):
    """Raised when a host is asked by too many at the same time."""


class HostGone(PoolError):
    """Raised when a broken connection cannot be taken up again, however often that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnection:
    """The way to take up a broken connection again.

    Args:
        secret: The secret that the relay asks for.
        limit_s: Seconds within which it has to succeed.
        given_up: Set when the host is no longer wanted.
    """

    command: HostCommand
    secret: str = field(repr=False)
    limit_s: float
    given_up: threading.Event

    def again(self, before: HostConnection, heard: int) -> tuple[HostConnection, int]:
        """Return a connection that takes the place of a broken one, and the number of messages that the relay has
        heard.

        Args:
            before: The broken connection.
            heard: Number of messages that have come from the relay.

        Raises:
            PoolError: The message continues "its connection has ended" with the reason why it was not re-established.
        """
        until_s = time.monotonic() + self.limit_s
        while True:
            dialogue = _Dialogue(self.command, _begun(self.command, before.host, before), self.given_up)
            try:
                heard_there = dialogue.resume(self.secret, heard, min(until_s, time.monotonic() + ATTEMPT_S))
                return dialogue.connection, heard_there
            except HostGone:
                dialogue.give_up()
                raise
            except PoolError as error:
                dialogue.give_up()
                if time.monotonic() + AGAIN_S > until_s:
                    reason = str(error).rstrip(".")
                    raise PoolError(f"was not taken up again within {self.limit_s:g} s ({reason})") from None
            if self.given_up.wait(AGAIN_S):
                raise GivenUpConnecting(_GIVEN_UP)


def _begun(command: HostCommand, host: str, before: HostConnection | None = None) -> HostConnection:
    """Start the command for a host; `before` is the connection whose place it takes."""
    ours, theirs = socket.socketpair()
    log = new_log()
    try:
        with theirs:
            process = _started(command, host, theirs, log)
    except BaseException:
        ours.close()
        log.close()
        raise
    if before is None:
        return HostConnection(host=host, process=process, link=Link(ours), log=log)
    return replace(before, process=process, link=Link(ours), log=log)


@cache
def _for_any_python() -> bytes:
    return source_archive.archive(BROUGHT)


def _started(command: HostCommand, host: str, theirs: socket.socket, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the command in a new session, without a terminal on which it could prompt."""
    words, fd = command.words(host), theirs.fileno()
    try:
        return subprocess.Popen(words, stdin=fd, stdout=fd, stderr=log, start_new_session=True)
    except OSError as error:
        why = process.why_not_started(words[0], error)
        raise PoolError(f"{words[0]} cannot be started: {why}. Install it, or correct the pool.") from None


class _Dialogue:
    """The first messages on a new connection, until the relay has started."""

    def __init__(self, command: HostCommand, connection: HostConnection, given_up: threading.Event) -> None:
        self._command, self._given_up = command, given_up
        self.connection = connection
        self._link = connection.link
        self._host = connection.host
        self._heard = b""
        self.has_relay = False
        """Whether the host has a relay, which removes its folder when its input ends."""

    def run(self, archive: Future[bytes], start: Mapping[str, Any]) -> None:
        """Bring the package to the host and start the relay."""
        mark = secrets.token_hex(8)
        with suppress(OSError):  # the command has ended, which is reported where its answer is missing
            self._link.sock.sendall(bootstrap.line(mark, self._command.kind, piped_relay.__name__))
        version = self._wait_for_mark(mark, ANSWER_S)
        self._check_version(version)
        self.has_relay = True
        package = archive.result() if version == sys.version_info[:2] else _for_any_python()
        self._send(bootstrap.packed(package) + encode(m.RelayCall(number=1, method="start", arguments=(dict(start),))))
        self.connection.facts.update(self._wait_for_start())

    def resume(self, secret: str, heard: int, until_s: float) -> int:
        """Make the relay use this connection; return the number of messages that it has heard.

        Args:
            secret: The secret that the relay asks for.
            heard: Number of messages that have come from the relay.
            until_s: Time by `time.monotonic` until which that has to succeed.

        Raises:
            PoolError: This attempt failed.
            HostGone: Later attempts will fail, too.
        """
        mark, connection = secrets.token_hex(8), self.connection
        with suppress(OSError):
            self._link.sock.sendall(takeover.line(mark, connection.facts["folder"], secret, heard))
        if self._wait_for_mark(mark, until_s - time.monotonic()) == takeover.NO_RELAY:
            raise HostGone("the ranks' processes there are gone")
        _, _, after = self._heard.partition(b"\0:" + mark.encode())
        resumed = Link(self._link.sock, after.partition(b"\n")[2])
        self.connection = replace(connection, link=resumed)
        message = next(iter(resumed.arrived()), None)
        while message is None:
            self._wait(until_s)
            message = self._next(resumed)
        if not isinstance(message[0], m.RelayResumed):
            raise self._failure()
        return message[0].heard

    def _next(self, link: Link) -> tuple[m.Message, list[int]] | None:
        try:
            return next(iter(link.read()), None)
        except (EOFError, OSError):
            raise self._failure() from None

    def give_up(self) -> None:
        """End the command, which nobody else ends."""
        if self.has_relay:
            return self.connection.end()
        _end(self.connection.process)
        self._link.close()
        self.connection.log.close()

    def _wait_for_mark(self, mark: str, limit_s: float) -> tuple[int, int]:
        """Wait for the mark; anything before it is a banner or the output of a startup file."""
        until_s = time.monotonic() + limit_s
        while (version := bootstrap.found(mark, self._heard)) is None:
            self._wait(until_s)
            try:
                data = self._link.sock.recv(1 << 16)
            except OSError:
                data = b""
            self._heard += data
            if not data:
                raise self._failure()
            if len(self._heard) > _MAX_BANNER_BYTES:
                raise PoolError(
                    f"host {self._host} prints more than {_MAX_BANNER_BYTES >> 20} MB before a Python answers: the "
                    "start-up files there (~/.bashrc) must print nothing unless their shell is interactive."
                )
        return version

    def _check_version(self, version: tuple[int, int]) -> None:
        if version < bootstrap.OLDEST:
            found, oldest = (".".join(map(str, each)) for each in (version, bootstrap.OLDEST))
            raise PoolError(f"host {self._host} has Python {found}, which is too old: set python to {oldest} or newer.")

    def _send(self, data: bytes) -> None:
        self._link.sock.settimeout(START_S)
        try:
            self._link.sock.sendall(data)
        except OSError:
            raise self._failure() from None
        self._link.sock.settimeout(None)

    def _wait_for_start(self) -> Mapping[str, Any]:
        until_s = time.monotonic() + START_S
        while True:
            self._wait(until_s)
            try:
                messages = list(self._link.read())
            except (EOFError, OSError):
                raise self._failure() from None
            for message, _ in messages:
                if isinstance(message, m.RelayFailed):
                    raise PoolError(f"host {self._host}: {message.text}")
                if isinstance(message, m.RelayReturned) and isinstance(message.value, dict):
                    return message.value

    def _wait(self, until_s: float) -> None:
        """Wait until something can be read."""
        poll = select.poll()
        poll.register(self._link.sock, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            if self._given_up.is_set():
                raise GivenUpConnecting(_GIVEN_UP)
            if time.monotonic() > until_s:
                raise self._failure()

    def _failure(self) -> PoolError:
        """Return the error for a command that did not start a Python, once it has ended or its time is up."""
        with suppress(subprocess.TimeoutExpired):
            self.connection.process.wait(LOOK_S)
        said = f"{self._heard.decode('utf-8', 'replace')}\n{_read(self.connection.log)}"
        kind = HostGone if self._command.is_final(said) else PoolError
        if not self.has_relay and self._command.is_turned_away(said):
            kind = _TurnedAway
        return kind(self._command.failure(self._host, self.connection.process.poll(), said))


def _read(log: IO[bytes]) -> str:
    """Return the content of a log, or its end if it is long."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), 1 << 16, max(0, size - (1 << 16))).decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes], *signals: int) -> None:
    for number in (*signals, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
            return
