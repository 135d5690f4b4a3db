"""How far the process groups of this rank are, by torch's own counters and flight recorder. Runs in the rank's control
thread, except `begin`.

Torch's numbers of collectives go on over the runs of a kept group, so they are counted from the start of the cell.
"""

from __future__ import annotations

import os
import time
from typing import Any

from jupyter_distrib.wire.messages import GroupSighting
from jupyter_distrib.worker.pytorch import private


class GroupSightings:
    """Tells what has happened in the groups since the cell began."""

    communication = tuple(
        os.path.join("torch", "distributed", name)
        for name in ("distributed_c10d.py", "c10d_logger.py", "rendezvous.py", "_functional_collectives.py")
    )

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._bases: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Count collectives from here. Called in the main thread."""
        self._began_ns = time.time_ns()
        self._bases = {name: (id(group), _sequence(group)) for name, group, _ in private.known_groups()}

    def counts(self) -> tuple[int, ...]:
        return tuple(_sequence(group) for _, group, _ in private.known_groups())

    def look(self) -> tuple[GroupSighting, ...]:
        entries = [entry for entry in private.recorded_collectives() if not entry["is_p2p"]]
        return tuple(self._look_into(name, group, ranks, entries) for name, group, ranks in private.known_groups())

    def _look_into(self, name: str, group: Any, ranks: tuple[int, ...], entries: list[dict[str, Any]]) -> GroupSighting:
        kept, base = self._bases.get(name, (0, 0))
        if kept != id(group):
            base = 0
        mine = [entry for entry in entries if entry["process_group"][0] == name]
        newest = max((entry["pg_id"] for entry in mine), default=0)  # an earlier group may have had this name
        mine = [entry for entry in mine if entry["pg_id"] == newest and (base or self._is_of_this_run(entry))]
        waiting = next((entry for entry in mine if not entry["retired"]), None)
        entered = max((int(entry["collective_seq_id"]) for entry in mine), default=0)
        if waiting is None:
            return GroupSighting(name=name, ranks=ranks, entered=max(0, entered - base))
        library, _, op = waiting["profiling_name"].partition(":")
        return GroupSighting(
            name=name,
            ranks=ranks,
            entered=max(0, entered - base),
            number=max(1, int(waiting["collective_seq_id"]) - base),
            op=op,
            tensors=_tensors(waiting),
            spins=library == "nccl",
        )

    def _is_of_this_run(self, entry: dict[str, Any]) -> bool:
        return int(entry["time_created_ns"]) >= self._began_ns


def _sequence(group: Any) -> int:
    try:
        return private.sequence(group)
    except RuntimeError:  # a backend that does not count, or a group that is going away
        return 0


def _tensors(entry: dict[str, Any]) -> str:
    sizes, types = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    return ", ".join(f"{list(size)} {kind}" for size, kind in zip(sizes, types, strict=False))
