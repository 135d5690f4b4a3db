"""The progress of this rank's process groups, from torch's own counters and flight recorder. Runs in the rank's control
thread, except `begin`.

Torch keeps counting collectives across the runs of a kept group, so the counts at the start of the cell are subtracted.
"""

from __future__ import annotations

import os
import time
from typing import Any

from jupyter_distrib.system.private_torch import COLLECTIVES
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import private


class GroupSightings:
    """The collectives in each group since the cell began."""

    communication = tuple(
        os.path.join("torch", "distributed", name)
        for name in ("distributed_c10d.py", "c10d_logger.py", "rendezvous.py", COLLECTIVES)
    )

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._bases: dict[str, tuple[int, dict[str, int]]] = {}
        """Each group's id, and each backend's number of collectives when the cell began, by the group's name."""

    def begin(self) -> None:
        """Count collectives from now on. Called in the main thread."""
        self._began_ns = time.time_ns()
        self._bases = {name: (id(group), _counts(group)) for name, group, _ in private.known_groups()}

    def counts(self) -> list[int]:
        # No tuple: `gc.get_objects` in another thread could get it half-made, and Python could not complete it.
        return [count for _, group, _ in private.known_groups() for count in _counts(group).values()]

    def inspect_groups(self) -> tuple[m.GroupSighting, ...]:
        entries = [entry for entry in private.recorded_collectives() if not entry["is_p2p"]]
        seen = []
        for name, group, ranks in private.known_groups():
            backends = _counts(group)
            for backend in backends:
                label = name if len(backends) == 1 else f"{name} {backend}"
                of_backend = [entry for entry in entries if _is_of(entry, name, backend)]
                seen.append(self._inspect_group(label, ranks, of_backend, self._base(name, group, backend)))
        return tuple(seen)

    def _base(self, name: str, group: Any, backend: str) -> int:
        group_id, counts = self._bases.get(name, (0, {}))
        return counts.get(backend, 0) if group_id == id(group) else 0

    def _inspect_group(
        self, label: str, ranks: tuple[int, ...], entries: list[dict[str, Any]], base: int
    ) -> m.GroupSighting:
        newest = max((entry["pg_id"] for entry in entries), default=0)  # an earlier group may have had the same name
        newest_entries = [
            entry for entry in entries if entry["pg_id"] == newest and (base or self._is_of_this_run(entry))
        ]
        waiting = next((entry for entry in newest_entries if not entry["retired"]), None)
        entered = max((int(entry["collective_seq_id"]) for entry in newest_entries), default=0)
        if waiting is None:
            return m.GroupSighting(name=label, ranks=ranks, entered=max(0, entered - base))
        library, _, op = waiting["profiling_name"].partition(":")
        return m.GroupSighting(
            name=label,
            ranks=ranks,
            entered=max(0, entered - base),
            number=max(1, int(waiting["collective_seq_id"]) - base),
            op=op,
            tensors=_tensors(waiting),
            spins=library == "nccl",
        )

    def _is_of_this_run(self, entry: dict[str, Any]) -> bool:
        return int(entry["time_created_ns"]) >= self._began_ns


def _counts(group: Any) -> dict[str, int]:
    try:
        return private.counts(group)
    except RuntimeError:  # a backend that does not count, or a group that is going away
        return {"": 0}


def _is_of(entry: dict[str, Any], name: str, backend: str) -> bool:
    """Return whether a collective was called in this group and backend; in any backend, if this one keeps no count."""
    return entry["process_group"][0] == name and backend in ("", entry["profiling_name"].partition(":")[0])


def _tensors(entry: dict[str, Any]) -> str:
    sizes, types = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    return ", ".join(f"{list(size)} {kind}" for size, kind in zip(sizes, types, strict=False))
