"""Sends the large values of a cell to the nodes, through Ray's object store.

    kernel --memory--> thread: ray.put of each part --> store --> every node's `take`, the last part with its `send`

A node copies one part while the next is put, the one after that is on its way, and the kernel still writes what
follows. The store holds a few parts at a time, however large the whole is.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from jupyter_distrib.coordinator.engine import ContentPart, Receive
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.ray.cluster import cause
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire.descriptors import Descriptors

PART_BYTES = 64 << 20
AHEAD = 2
"""Number of parts in the store that some node has not taken yet, beside the one that is being put."""
ROOM_S = 3.0
"""Seconds to wait for room: Ray frees it some time after it could (`free_objects_period_milliseconds`)."""
AGAIN_S = 0.1


class RayTransfer:
    """The content of one run; see `coordinator.engine.Transfer`.

    Args:
        fds: Descriptors of the content, see `shared_memory.Arriving`; duplicated.
        given_up: Set when no node is left.
    """

    def __init__(self, run: str, fds: Sequence[int], calls: CallSoon, given_up: threading.Event) -> None:
        self.run = run
        self._calls, self._given_up = calls, given_up
        self._nodes: list[Receive] = []
        self._asked: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        """Calls with which the nodes were given each part but the last."""
        own = Descriptors.duplicates(fds)
        threading.Thread(target=self._put, args=(own,), name="jupyter_distrib-put", daemon=True).start()

    def add(self, receive: Receive) -> None:
        """Add a node; only in the turn of the loop in which this was made."""
        self._nodes.append(receive)

    def _put(self, descriptors: Descriptors) -> None:
        """Put the content into the store, in a thread of its own. Owns the descriptors."""
        try:
            with (
                shared_memory.Arriving(descriptors) as arriving,
                arriving.mapped() as content,
                memoryview(content) as view,
            ):
                size, taking = arriving.size_bytes, deque[list[Any]]()
                for start in range(0, size, PART_BYTES):
                    arriving.wait(start + PART_BYTES)
                    with view[start : start + PART_BYTES] as buffer:
                        last = start + PART_BYTES >= size
                        part = ContentPart(_into_store(buffer, taking), start, size, last)
                    self._calls.put(lambda part=part: self._hand_over(part))  # type: ignore[misc]
                    if part.last:
                        return
                    del part
                    taking.append(self._asked.get())
                    if not taking[-1] or self._given_up.is_set():
                        return
                    if len(taking) > AHEAD:
                        _wait(taking.popleft())
        except shared_memory.GivenUp as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds
            self._fail(PoolError(f"the values for this cell could not be put into Ray's object store: {cause(error)}"))

    def _fail(self, error: Exception) -> None:
        self._calls.put(lambda: self._hand_over(error))

    def _hand_over(self, part: ContentPart | Exception) -> None:
        asked = [receive(part) for receive in self._nodes]
        self._asked.put([one for one in asked if one is not None])


def _into_store(buffer: memoryview, taking: deque[list[Any]]) -> Any:
    """Put a part into the store; if store and disk are full, wait until earlier parts have been taken."""
    import ray

    until_s = 0.0
    while True:
        try:
            return ray.put(pickle.PickleBuffer(buffer))
        except ray.exceptions.RayError:
            until_s = until_s or time.monotonic() + ROOM_S
            if not taking and time.monotonic() > until_s:
                raise
        if taking:
            _wait(taking.popleft())
        else:
            time.sleep(AGAIN_S)


def _wait(asked: list[Any]) -> None:
    import ray

    ray.wait(asked, num_returns=len(asked), timeout=None)
