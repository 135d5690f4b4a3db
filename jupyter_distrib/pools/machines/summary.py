"""The words for machines that are started on demand. Pure."""

from __future__ import annotations

import time

from jupyter_distrib.pools.machines.record import ENDED, Record
from jupyter_distrib.system.formatting import duration


def end_of(record: Record | None, life: str) -> str:
    """Return how the machines of this life have ended."""
    if record is None or record.life != life or not record.reason:
        return "the machines were ended"
    return f"the machines were ended, since {record.reason}"


def next_rank(record: Record | None) -> str:
    """Return the end of a sentence that begins with `next rank`."""
    match record.state if record is not None else ENDED:
        case "starting":
            return "when the machines are up, which `up` starts now"
        case "up":
            return "at once, on the machines that are up"
        case "ending":
            return "on new machines, when the last ones have ended"
        case _:
            return "a cell starts the machines by `up`"


def state(record: Record, now_s: float) -> str:
    """Describe the machines: `up for 2 h 5 min`."""
    elapsed = duration(record.elapsed_s(now_s))
    match record.state:
        case "starting":
            return f"starting for {elapsed}{f': {record.line}' if record.line else ''}"
        case "up":
            return f"up for {elapsed}"
        case "ending" if record.failures:
            return f"STILL RUNNING? for {elapsed}: {record.failure}"
        case "ending":
            return f"ending after {elapsed}, since {record.reason}"
        case _:
            return f"ended after {elapsed}, since {record.reason}"


def cost(record: Record, now_s: float) -> str:
    """Return what the machines have cost; empty if the price is unknown."""
    return f"{record.cost(now_s):.2f}" if record.price else ""


def limit(record: Record, now_s: float) -> str:
    """Return until when the machines stay at most; empty without a limit."""
    if not record.ends_at_s or not record.alive:
        return ""
    return time.strftime(
        "%H:%M" if record.ends_at_s - now_s < 86_400 else "%Y-%m-%d %H:%M", time.localtime(record.ends_at_s)
    )
