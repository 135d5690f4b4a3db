"""The words for machines that are started on demand. Pure."""

from __future__ import annotations

import time

from jupyter_distrib.pools.machines.record import ENDED, STARTING, UP, Place, Record
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
            return "on new machines, once the last ones have ended"
        case _:
            return "a cell starts the machines with `up`"


def state(record: Record, *, is_held: bool) -> str:
    """Describe the machines: `up for 2 h 5 min`."""
    for_s = f"for {duration(record.elapsed_s(time.time()))}"
    if record.alive and not is_held:
        return f"LEFT BEHIND {for_s}: the next notebook that is opened ends them"
    match record.state:
        case "starting":
            return f"starting {for_s}{f': {record.line}' if record.line else ''}"
        case "up":
            return f"up {for_s}"
        case "ending" if record.failures:
            return f"STILL RUNNING {for_s}"
        case "ending":
            return f"ending {for_s}, since {record.reason}"
        case _:
            return f"ended, after {for_s[4:]}, since {record.reason}"


def cost(record: Record) -> str:
    """Return what the machines have cost; empty if the price is unknown."""
    return f"{record.cost(time.time()):.2f}" if record.price else ""


def end(record: Record) -> str:
    """Return when the machines end: `20 min after the last use, at 17:30 at the latest`."""
    if record.state not in (STARTING, UP):
        return ""
    after = f"{duration(record.seconds('down_after'))} after the last use"
    if not record.ends_at_s:
        return after
    is_soon = record.ends_at_s - time.time() < 86_400
    at = time.strftime("%H:%M" if is_soon else "%Y-%m-%d %H:%M", time.localtime(record.ends_at_s))
    return f"{after}, at {at} at the latest"


def stuck(record: Record, place: Place) -> str:
    """Return a sentence on machines that cannot be ended."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.began_at_s))
    costs = f" and have cost {cost(record)}" if record.price else ""
    return (
        f"{record.failure}, so the machines may still be running: they have existed since {since}{costs}. `down` is "
        "tried "
        f"again and again; run `{record.plan['down']}` by hand, and see {place.log}. If they are gone, remove "
        f"{place.folder / 'record'}."
    )
