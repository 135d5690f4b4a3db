"""Carries the parts of large values through Ray's object store; see `coordinator/part_transfer.py`.

A node copies one part while the next is put, and the one after that is on its way. The store holds a few parts at a
time, however large the whole is.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from jupyter_distrib.coordinator.part_transfer import Taking
from jupyter_distrib.pools.ray.cluster import cause

ROOM_S = 3.0
"""Seconds to wait for room: Ray frees it some time after it could (`free_objects_period_milliseconds`)."""
AGAIN_S = 0.1


class ObjectStore:
    """Ray's object store: a part is a reference, which each node fetches."""

    part_bytes = 64 << 20
    ahead = 3
    """Two that some node has not taken yet, and the one that is being put."""

    def packed(self, buffer: memoryview, taking: Taking, *, last: bool) -> Any:
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
                self.wait(taking.popleft())
            else:
                time.sleep(AGAIN_S)

    def wait(self, calls: list[Any]) -> None:
        import ray

        ray.wait(calls, num_returns=len(calls), timeout=None)

    def close(self) -> None:
        """Do nothing: Ray removes what nobody refers to."""

    def failure(self, error: Exception) -> str:
        return f"the values for this cell could not be put into Ray's object store: {cause(error)}"
