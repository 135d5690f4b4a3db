"""The coordinator's end of the pipe to one host: calls go out in their order, answers and the agent's frames come back.
When the pipe breaks, another pipe takes its place, and nobody notices except by the delay (`wire/resumable.py`).

Nothing blocks. What arrives is read in the coordinator's loop; calls may be made in any thread. See
`coordinator.engine.Channel`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from jupyter_distrib.coordinator.relay_inbox import Answer, Entry
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command.connect import HostConnection, Reconnection
from jupyter_distrib.pools.command.piped_relay import ALIVE_S, is_answered_only_on_failure
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import encode, encode_pieces, split
from jupyter_distrib.wire.resumable import HeardMessages, SentMessages, is_counted

SILENT_ALIVES = 8
"""Number of missed keep-alives after which the pipe counts as broken."""
SAY_S = 3.0
"""Seconds without a pipe after which the user gets a note."""
CLOSE_S = 2.0
"""Seconds to wait for the loop, which may have ended already."""


class ChannelLost(ConnectionError):
    """Raised by calls to a host that is out of reach."""


class RaisedOnHost(RuntimeError):
    """Raised by a call whose method raised an exception on the host."""


class PipeChannel:
    """The pipe to one host.

    Args:
        reconnection: The way to another pipe when this one breaks; without it, the host is lost then.
        say: Tells the user that this takes a while.
    """

    def __init__(
        self,
        connection: HostConnection,
        loop: Loop,
        calls: CallSoon,
        reconnection: Reconnection | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.connection, self._reconnection, self._say = connection, reconnection, say
        self._loop, self._calls, self._link = loop, calls, connection.link
        self._lock = threading.Lock()
        """Lock held to queue frames and to number calls."""
        self._number = 1
        self._waiting: dict[int, Future[Any]] = {}
        """Unanswered calls, by number."""
        self._last_cell = 0
        """The number of the last call that is answered only if it fails."""
        self._receivers: list[Future[Answer]] = []
        """Pending requests for frames from the agent."""
        self._entries: list[Entry] = []
        """Frames that have arrived and that no request has fetched yet."""
        self._answers = 0
        self._values = IncomingValues()
        self._silent = 0
        # The call that starts the relay, and its answer, have passed already.
        self._sent, self._heard = SentMessages(1), HeardMessages(1)
        self._is_broken = False
        """Whether the pipe is broken, and no other has come yet."""
        self._lost: ChannelLost | None = None
        self._agent_ended = False

    def open(self) -> None:
        """Begin to read. Called in the loop."""
        self._watch()
        self._loop.later(ALIVE_S, self._keep_alive)

    # ------------------------------------------------------------------------------------------------ calls

    def order(self, method: str, *arguments: Any) -> Any:
        """Call a method. The end of the call is reported only for a part of a value, to limit the parts in transit."""
        if method == "add_part":
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
            if is_answered_only_on_failure(method, arguments):
                self._waiting.pop(self._last_cell, None)  # which has ended
                self._last_cell = number
        if not self._send(m.RelayCall(number=number, method=method, arguments=arguments)):
            self._fail_calls()
        return answer

    def _send(self, message: m.Message) -> bool:
        """Send as much of a message as the pipe accepts now; return whether the host is within reach."""
        pieces = encode_pieces(message)
        with self._lock:
            if self._lost is not None:
                return False
            if is_counted(message):
                self._sent.add(pieces)
            if not self._is_broken:
                self._post(pieces)
        return True

    def _post(self, pieces: Sequence[bytes]) -> None:
        waits = self._link.unsent
        for piece in pieces:
            self._link.post(piece)
        with suppress(OSError):  # the reader notices
            self._link.flush()
        if self._link.unsent and not waits:
            self._calls.put(self._watch)

    def _watch(self) -> None:
        if self._lost is None and not self._is_broken:
            self._loop.watch(self._link.fileno(), self._read, self._flush if self._link.unsent else None)

    def _flush(self) -> None:
        with self._lock, suppress(OSError):
            self._link.flush()
        self._watch()

    # ------------------------------------------------------------------------------------------------ answers

    def _read(self) -> None:
        self._silent = 0
        try:
            self._handle_all(self._link.read())
        except (EOFError, OSError):
            self._break(self._reason())

    def _handle_all(self, messages: Iterable[tuple[m.Message, list[int]]]) -> None:
        is_due = False
        for message, _ in messages:
            if isinstance(message, m.RelayAlive):
                with self._lock:
                    self._sent.confirm(message.heard)
            elif is_counted(message):
                is_due |= self._heard.add(len(self._link.frame))
            self._handle(message)
        if is_due:
            self._send(m.RelayAlive(heard=self._heard.count))
        self._hand_over()

    def _handle(self, message: m.Message) -> None:
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
            self._break(f"nothing has come from it for {SILENT_ALIVES * ALIVE_S:g} s")
        self._send(m.RelayAlive(heard=self._heard.count))
        self._loop.later(ALIVE_S, self._keep_alive)

    def _break(self, reason: str) -> None:
        """Look for another pipe, or treat the host as lost. Called in the loop."""
        if self._lost is not None or self._is_broken:
            return
        if self._reconnection is None or not self._reconnection.limit_s:
            return self.lose(reason)
        with self._lock:
            self._is_broken = True
        self._loop.watch(self._link.fileno(), None)
        broken = self.connection
        self._loop.later(SAY_S, lambda: self._say_broken(broken, reason))
        threading.Thread(
            target=self._reconnect, args=(self._reconnection, reason), name="jupyter_distrib-reconnect", daemon=True
        ).start()

    def _say_broken(self, connection: HostConnection, reason: str) -> None:
        if self._is_broken and self._lost is None and self.connection is connection:
            self._say(
                f"node {connection.host}: {reason}. The connection is being re-established; the ranks there go on "
                "meanwhile."
            )

    def _reconnect(self, reconnection: Reconnection, reason: str) -> None:
        """Take the connection up again; in a thread."""
        before = self.connection
        threading.Thread(target=before.end, name="jupyter_distrib-end", daemon=True).start()
        try:
            connection, heard = reconnection.again(before, self._heard.count)
        except PoolError as error:
            text = f"{reason}: {str(error).rstrip('.')}"
            self._calls.put(lambda: self.lose(text))
        else:
            self._calls.put(lambda: self._resume(connection, heard))

    def _resume(self, connection: HostConnection, heard: int) -> None:
        """Continue with another pipe. Called in the loop."""
        with self._lock:
            self.connection, self._link = connection, connection.link
            if self._lost is None and self._sent.knows(heard):
                self._is_broken, self._silent = False, 0
                self._post(self._sent.after(heard))
            else:
                self._link.post(encode(m.RelayCall(number=0, method="end")))
                with suppress(OSError):
                    self._link.flush()
                threading.Thread(target=connection.end, name="jupyter_distrib-end", daemon=True).start()
        if self._is_broken:
            return self.lose("it has lost count of the messages")
        self._handle_all(self._link.arrived())
        self._watch()

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
        if self._reconnection is not None:
            self._reconnection.given_up.set()
        if not self._is_broken:
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
