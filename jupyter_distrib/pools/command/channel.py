"""The coordinator's end of the pipe to one host: calls go out in their order, answers and the agent's frames come back.

Nothing blocks. What arrives is read in the coordinator's loop; calls may be made in any thread. See
`coordinator.engine.Channel`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from jupyter_distrib.coordinator.relay_inbox import Answer, Entry
from jupyter_distrib.pools.command.connect import HostConnection
from jupyter_distrib.pools.command.piped_relay import ALIVE_S
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import encode_pieces, split

SILENT_ALIVES = 8
"""Number of missed keep-alives after which the host counts as lost."""


CLOSE_S = 2.0
"""Seconds to wait for the loop, which may have ended already."""


class ChannelLost(ConnectionError):
    """Raised by calls to a host that is out of reach."""


class RaisedOnHost(RuntimeError):
    """Raised by a call whose method raised an exception on the host."""


class PipeChannel:
    """The pipe to one host."""

    def __init__(self, connection: HostConnection, loop: Loop, calls: CallSoon) -> None:
        self.connection = connection
        self._loop, self._calls, self._link = loop, calls, connection.link
        self._lock = threading.Lock()
        """Lock held to queue frames and to number calls."""
        self._number = 1
        self._waiting: dict[int, Future[Any]] = {}
        """Unanswered calls, by number."""
        self._receivers: list[Future[Answer]] = []
        """Pending requests for frames from the agent."""
        self._entries: list[Entry] = []
        """Frames that have arrived and that no request has fetched yet."""
        self._answers = 0
        self._values = IncomingValues()
        self._silent = 0
        self._lost: ChannelLost | None = None
        self._agent_ended = False

    def open(self) -> None:
        """Begin to read. Called in the loop."""
        self._watch()
        self._loop.later(ALIVE_S, self._keep_alive)

    # ------------------------------------------------------------------------------------------------ calls

    def order(self, method: str, *arguments: Any) -> Any:
        """Call a method. The end of the call is reported only for a part of a value, to limit the parts in transit."""
        if method == "take":
            return self.ask(method, *arguments)
        self._send(m.RelayCall(number=0, method=method, arguments=arguments))
        return None

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "receive":
            self._receivers.append(answer)
            self._hand_over()
            return answer
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = answer
        if method == "send" and len(arguments) == 1:
            # Without a content nothing can go wrong there: the answer would only cost time.
            del self._waiting[number]
            number = 0
            answer.set_result(None)
        if not self._send(m.RelayCall(number=number, method=method, arguments=arguments)):
            self._fail_calls()
        return answer

    def _send(self, message: m.Message) -> bool:
        """Send as much of a message as the pipe accepts now; return whether the host is within reach."""
        pieces = encode_pieces(message)
        with self._lock:
            if self._lost is not None:
                return False
            waits = self._link.unsent
            for piece in pieces:
                self._link.post(piece)
            with suppress(OSError):  # the reader notices
                self._link.flush()
            if self._link.unsent and not waits:
                self._calls.put(self._watch)
        return True

    def _watch(self) -> None:
        if self._lost is None:
            self._loop.watch(self._link.fileno(), self._read, self._flush if self._link.unsent else None)

    def _flush(self) -> None:
        with self._lock, suppress(OSError):
            self._link.flush()
        self._watch()

    # ------------------------------------------------------------------------------------------------ answers

    def _read(self) -> None:
        self._silent = 0
        try:
            for message, _ in self._link.read():
                self._take(message)
        except (EOFError, OSError):
            return self.lose(self._reason())
        self._hand_over()

    def _take(self, message: m.Message) -> None:
        match message:
            case m.RelayContent():
                self._values.add(message)
            case m.RelayPassed():
                content = self._values.pop(0)[0] if message.has_content else None
                self._entries += [(frame, content) for frame in split(message.frames)]
            case m.RelayReturned():
                value = message.value
                if message.contents is not None:
                    value = list(zip(message.contents, self._values.pop(message.number), strict=True))
                self._answer(message.number, lambda answer: answer.set_result(value))
            case m.RelayFailed():
                self._answer(message.number, lambda answer: answer.set_exception(RaisedOnHost(message.text)))
            case m.RelayEnded():
                self._agent_ended = True

    def _answer(self, number: int, settle: Callable[[Future[Any]], None]) -> None:
        with self._lock:
            answer = self._waiting.pop(number, None)
        if answer is not None:
            settle(answer)

    def _hand_over(self) -> None:
        """Answer a request with the frames that have arrived; with none when the agent has ended."""
        if not self._receivers:
            return
        if self._entries:
            entries, self._entries = self._entries, []
            self._answers += 1
            self._receivers.pop(0).set_result((self._answers - 1, entries))
        elif self._agent_ended:
            self._receivers.pop(0).set_result((self._answers, []))
        elif self._lost is not None:
            self._receivers.pop(0).set_exception(self._lost)

    # ------------------------------------------------------------------------------------------------ ending

    def _keep_alive(self) -> None:
        if self._lost is not None:
            return
        self._silent += 1
        if self._silent >= SILENT_ALIVES:
            return self.lose(f"nothing has come from it for {SILENT_ALIVES * ALIVE_S:g} s")
        self._send(m.RelayAlive())
        self._loop.later(ALIVE_S, self._keep_alive)

    def _reason(self) -> str:
        """Return why the pipe has ended."""
        said = self.connection.said()
        return f"its connection has ended ({said})" if said else "its connection has ended"

    def lose(self, reason: str) -> None:
        """Treat the host as lost. Called in the loop."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = ChannelLost(reason)
        self._loop.watch(self._link.fileno(), None)
        self._fail_calls()
        self._hand_over()

    def close(self) -> None:
        """Stop reading, in a thread that then ends the connection."""
        closed = threading.Event()

        def leave() -> None:
            self.lose("it was given back")
            closed.set()

        self._calls.put(leave)
        closed.wait(CLOSE_S)

    def _fail_calls(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(self._lost or ChannelLost("its connection has ended"))


class IncomingValues:
    """Large values that arrive in parts, before the messages that they belong to."""

    def __init__(self) -> None:
        self._complete: dict[int, list[bytearray]] = {}
        self._begun: dict[int, bytearray] = {}

    def add(self, content: m.RelayContent) -> None:
        """Add a part to the value of this number."""
        value = self._begun.setdefault(content.number, bytearray())
        value += content.part
        if len(value) >= content.size_bytes:
            self._complete.setdefault(content.number, []).append(self._begun.pop(content.number))

    def pop(self, number: int) -> list[bytearray]:
        """Return the complete values of a number."""
        return self._complete.pop(number, [])
