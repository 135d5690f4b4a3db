"""Sends the large values of a cell to the nodes, in parts.

    kernel --memory--> thread: one part after another --carrier--> every node's `add_part`, the last with its `send`

A further part is sent only when a node has taken an earlier one, so that a command such as Stop waits behind a few
parts at most, however large the whole is; and while the node takes a part, the kernel still writes the next ones.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jupyter_distrib.coordinator.engine import ContentPart, Receive
from jupyter_distrib.errors import PoolError
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire.descriptors import Descriptors

Taking = deque[list[Any]]
"""The calls that sent earlier parts to the nodes and have not been waited for."""


class Carrier(Protocol):
    """The engine's way to carry parts. Used in the thread of a transfer."""

    @property
    def part_bytes(self) -> int: ...

    @property
    def ahead(self) -> int:
        """Number of parts that may be on their way to a node."""

    def packed(self, buffer: memoryview, taking: Taking, *, last: bool) -> Any:
        """Return the reference of a part, see `ContentPart`; may wait for earlier parts and then remove them from
        `taking`."""

    def wait(self, calls: list[Any]) -> None:
        """Wait for the calls that sent the oldest unconfirmed part to the nodes."""

    def close(self) -> None:
        """Remove leftovers of the parts."""

    def failure(self, error: Exception) -> str:
        """Describe in a sentence why parts cannot be carried."""


class PartTransfer:
    """The content of one run; see `coordinator.engine.Transfer`.

    Args:
        fds: Descriptors of the content, see `shared_memory.Arriving`; duplicated.
        given_up: Set when no node is left.
    """

    def __init__(
        self, run: str, fds: Sequence[int], calls: CallSoon, given_up: threading.Event, carrier: Carrier
    ) -> None:
        self.run = run
        self._calls, self._given_up, self._carrier = calls, given_up, carrier
        self._nodes: list[Receive] = []
        self._asked: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        """Calls that sent each part but the last to the nodes."""
        own = Descriptors.duplicates(fds)
        threading.Thread(target=self._send, args=(own,), name="jupyter_distrib-put", daemon=True).start()

    def add(self, receive: Receive) -> None:
        """Add a node; only in the loop iteration in which this object was made."""
        self._nodes.append(receive)

    def _send(self, descriptors: Descriptors) -> None:
        """Send the content, in a thread of its own. Owns the descriptors."""
        try:
            with (
                shared_memory.Arriving(descriptors) as arriving,
                arriving.mapped() as content,
                memoryview(content) as view,
            ):
                self._send_parts(arriving, view)
        except shared_memory.GivenUp as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - engines raise all kinds
            self._fail(PoolError(self._carrier.failure(error)))
        finally:
            self._carrier.close()

    def _send_parts(self, arriving: shared_memory.Arriving, view: memoryview) -> None:
        carrier, size, taking = self._carrier, arriving.size_bytes, Taking()
        for start in range(0, size, carrier.part_bytes):
            end = start + carrier.part_bytes
            arriving.wait(end)
            last = end >= size
            with view[start:end] as buffer:
                part = ContentPart(carrier.packed(buffer, taking, last=last), start, size, last)
            self._calls.put(lambda part=part: self._hand_over(part))  # type: ignore[misc]
            if last:
                break
            del part
            taking.append(self._asked.get())
            if not taking[-1] or self._given_up.is_set():
                return
            if len(taking) >= carrier.ahead:
                carrier.wait(taking.popleft())
        for calls in taking:
            carrier.wait(calls)

    def _fail(self, error: Exception) -> None:
        self._calls.put(lambda: self._hand_over(error))

    def _hand_over(self, part: ContentPart | Exception) -> None:
        asked = [receive(part) for receive in self._nodes]
        self._asked.put([one for one in asked if one is not None])
