"""The facts and numbers of a run in the form that experiment trackers record. Kernel side, in an observer's thread;
standard library only, no state."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Literal

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.analysis.lost_peers import reports_lost_peer
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system import process_environment
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

_MB = 1_000_000


def parameters(run: ObservedRun) -> dict[str, str]:
    """Return how a run was set up, for a tracker. The names of its strategy, pool and ranks have a prefix, since a cell
    may log a `strategy` of its own, and trackers refuse a second value."""
    return {name if "." in name else f"run.{name}": value for name, value in setting(run).items()}


def setting(run: ObservedRun) -> dict[str, str]:
    """Return how a run was set up: strategy, pool, ranks, the options that were given, and versions."""
    options = {f"option.{name}": _text(value) for name, value in run.options.items() if name != "track"}
    facts = {
        "strategy": run.strategy,
        "pool": run.pool,
        "ranks": rank_list(run.ranks),
        "world_size": str(run.world_size),
        "device": "gpu" if run.gpus else "cpu",
    }
    return facts | options | versions()


def arguments(run: ObservedRun) -> dict[str, str]:
    """Return the values of the function's call or of the sweep."""
    return {name: _text(value) for name, value in run.arguments.items()}


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, torch and this package, without an import of torch."""
    found = {"version.python": platform.python_version()}
    for name in ("torch", "jupyter_distrib"):
        if version := process_environment.version(name):
            found[f"version.{name}"] = version
    return found


class Series:
    """The numbers of a run, as points of named series.

    The first rank's reports have their own names, those of other ranks begin with `rank_1/`. Samples of memory,
    processor and GPU begin with `system/rank_1/`, and their steps are counted.
    """

    def __init__(self, run: ObservedRun) -> None:
        self._first = run.ranks[0]
        self._samples: Counter[int] = Counter()
        """Number of samples so far, by rank."""

    def points(self, event: m.RunEvent) -> Mapping[str, tuple[float, int]]:
        """Return the numbers in an event, each with its step; empty if it has none."""
        match event:
            case m.Measured():
                prefix = "" if event.rank == self._first else f"rank_{event.rank}/"
                return {prefix + name: (value, event.step) for name, value in event.values.items()}
            case m.Sampled():
                step = self._samples[event.rank]
                self._samples[event.rank] += 1
                return {f"system/rank_{event.rank}/{name}": (value, step) for name, value in _sample(event).items()}
            case _:
                return {}


def _sample(event: m.Sampled) -> dict[str, float]:
    measured = {
        "cpu_percent": event.cpu_percent,
        "memory_mb": event.rss_bytes / _MB,
        "gpu_percent": event.gpu_percent,
        "gpu_memory_mb": None if event.gpu_memory_bytes is None else event.gpu_memory_bytes / _MB,
    }
    return {name: float(value) for name, value in measured.items() if value is not None}


def end_state(record: RunRecord) -> Literal["FINISHED", "FAILED", "KILLED"]:
    """Return the final state of a run: KILLED if a user or a time limit stopped it."""
    if record.ok:
        return "FINISHED"
    number = failures.cause(record)
    stopped = any(rank.state == "interrupted" for rank in record.ranks.values())
    cut_off = number is None or reports_lost_peer(record.ranks[number].failure)
    if record.limit_s is not None or (stopped and cut_off):
        return "KILLED"
    return "FAILED"


def _text(value: object) -> str:
    if isinstance(value, (bool, int, float)):
        return str(value)
    return without_secrets(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
