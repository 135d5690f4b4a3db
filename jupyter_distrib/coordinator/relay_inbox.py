"""Holds messages from a node's agent until the coordinator fetches them. Filled by one thread of a relay, and emptied
by the two threads in which the engine calls it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_distrib.wire.link import kind_of, split

AT_ONCE_S = 0.02
"""Seconds within which the end of a cell is returned by the call that delivered the cell."""
GATHER_S = 0.003
"""Seconds to wait after the end of one rank, so that the ends of the others and of the run travel together."""
_NUMBER = struct.Struct("!Q")
Entry = tuple[bytes, Any]
"""Pair of a frame and the content of its shared memory, or None."""
Answer = bytes | tuple[int, list[Entry]]
"""Entries in their order, and the number of this answer: the engine may deliver a later one first. Bytes, which engines
carry at less cost, if no entry has a content; see `opened`."""


class RelayInbox:
    """Entries for one of two callers: the call that delivered a cell, or the call that waits for news."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news, self._at_once = threading.Condition(self._lock), threading.Condition(self._lock)
        """Conditions for the call that waits for news and for the call that delivered a cell."""
        self._entries: list[Entry] = []
        self._last_kind = ""
        """Class of the last message."""
        self._answers = 0
        self._is_call_first = False
        """Whether new entries are for the call that delivered a cell."""
        self._over = False

    def put(self, frame: bytes, content: Any, *, more: bool = False) -> None:
        """Add an entry; `more`: whether further ones have arrived and will be put next."""
        kind = kind_of(frame)
        with self._lock:
            self._entries.append((frame, content))
            self._last_kind = kind
            if not self._is_call_first:
                self._news.notify()
            elif kind == "Ended":
                self._at_once.notify()

    def end(self) -> None:
        """Wake both callers, because nothing more will come."""
        with self._lock:
            self._over = True
            self._news.notify()
            self._at_once.notify()

    @contextmanager
    def call_first(self) -> Iterator[None]:
        """Keep new entries for the call that delivers a cell, see `wait_for_end`."""
        with self._lock:
            self._is_call_first, self._last_kind = True, ""
        try:
            yield
        finally:
            with self._lock:
                self._is_call_first = False
                if self._entries or self._over:  # else a thread would wake just when the answer is sent
                    self._news.notify()

    def wait_for_end(self) -> Answer | None:
        """Wait briefly for the end of a cell; return the entries so far."""
        with self._lock:
            self._at_once.wait_for(lambda: self._over or self._last_kind == "Ended", AT_ONCE_S)
            return self._pop_answer()

    def wait_for_entries(self) -> Answer:
        """Wait for entries, and return all that have come since the last answer. Empty when nothing more will come."""
        with self._lock:
            while True:
                self._news.wait_for(lambda: (self._entries or self._over) and not self._is_call_first)
                self._news.wait_for(
                    lambda: self._over or self._is_call_first or self._last_kind != "Returned", GATHER_S
                )
                if (answer := self._pop_answer()) is not None:
                    return answer

    def _pop_answer(self) -> Answer | None:
        if not self._entries and not self._over:
            return None
        number, entries = self._answers, self._entries
        self._answers, self._entries = self._answers + 1, []
        if any(content is not None for _, content in entries):
            return number, entries
        return _NUMBER.pack(number) + b"".join(frame for frame, _ in entries)


def opened(answer: Answer) -> tuple[int, list[Entry]]:
    """Return the number and the entries of an answer."""
    if isinstance(answer, tuple):
        return answer
    (number,) = _NUMBER.unpack_from(answer)
    return number, [(frame, None) for frame in split(answer[_NUMBER.size :])]
