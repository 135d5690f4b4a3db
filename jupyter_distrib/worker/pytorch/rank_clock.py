"""The difference between the clocks of ranks on several nodes, measured through the store in which they meet. Rank's
main thread.

    rank 3   asks, at its time 10.0000 ---> rank 0 answers with its time 712.3004 ---> rank 3   reads it, at 10.0006

The answer came from the middle of the round trip, so rank 3 is 702.3001 s behind; the shortest of some trips counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TRIPS = 8


def offset_s(store: Any, rank: int, world_size: int, now_s: Callable[[], float] = time.monotonic) -> float:
    """Return the seconds to add to a time of this rank for the time of rank 0. All ranks call it, with a store that
    they share and nobody else uses."""
    if rank == 0:
        for other in range(1, world_size):
            for trip in range(TRIPS):
                store.get(f"{other}/{trip}/asked")
                store.set(f"{other}/{trip}/answered", repr(now_s()))
        return 0.0
    found = []
    for trip in range(TRIPS):
        asked_s = now_s()
        store.set(f"{rank}/{trip}/asked", "")
        answer_s = float(store.get(f"{rank}/{trip}/answered").decode())
        read_s = now_s()
        found.append((read_s - asked_s, answer_s - (asked_s + read_s) / 2))
    return min(found)[1]
