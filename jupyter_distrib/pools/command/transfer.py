"""Sends the large values of a cell to the hosts, in parts.

    kernel --memory--> thread: one part after another --pipe--> every host's `take`, the last part with its `send`

A host has taken the part before the last one when a further part is sent, so that a command such as Stop waits behind a
few parts at most, however large the whole is.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from jupyter_distrib.coordinator.engine import ContentPart, Receive
from jupyter_distrib.errors import PoolError
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire.descriptors import Descriptors

PART_BYTES = 4 << 20
AHEAD = 3
"""Number of parts on their way to a host."""


class PipeTransfer:
    """The content of one run; see `coordinator.engine.Transfer`.

    Args:
        fds: Descriptors of the content, see `shared_memory.Arriving`; duplicated.
        given_up: Set when no host is left.
    """

    def __init__(self, run: str, fds: Sequence[int], calls: CallSoon, given_up: threading.Event) -> None:
        self.run = run
        self._calls, self._given_up = calls, given_up
        self._hosts: list[Receive] = []
        self._asked: queue.SimpleQueue[list[Future[Any]]] = queue.SimpleQueue()
        """Calls with which the hosts were given each part but the last."""
        own = Descriptors.duplicates(fds)
        threading.Thread(target=self._send, args=(own,), name="jupyter_distrib-put", daemon=True).start()

    def add(self, receive: Receive) -> None:
        """Add a host; only in the turn of the loop in which this was made."""
        self._hosts.append(receive)

    def _send(self, descriptors: Descriptors) -> None:
        """Send the content, in a thread of its own. Owns the descriptors."""
        try:
            with (
                shared_memory.Arriving(descriptors) as arriving,
                arriving.mapped() as content,
                memoryview(content) as view,
            ):
                size, taking = arriving.size_bytes, deque[list[Future[Any]]]()
                for start in range(0, size, PART_BYTES):
                    arriving.wait(start + PART_BYTES)
                    last = start + PART_BYTES >= size
                    part = ContentPart(bytes(view[start : start + PART_BYTES]), start, size, last)
                    self._calls.put(lambda part=part: self._hand_over(part))  # type: ignore[misc]
                    if last:
                        return
                    taking.append(self._asked.get())
                    if not taking[-1] or self._given_up.is_set():
                        return
                    if len(taking) >= AHEAD:
                        wait(taking.popleft())
        except shared_memory.GivenUp as error:
            self._calls.put(lambda error=error: self._hand_over(error))  # type: ignore[misc]
        except OSError as error:
            failure = PoolError(f"the values for this cell cannot be read ({error.strerror}).")
            self._calls.put(lambda: self._hand_over(failure))

    def _hand_over(self, part: ContentPart | Exception) -> None:
        asked = [receive(part) for receive in self._hosts]
        self._asked.put([one for one in asked if one is not None])
