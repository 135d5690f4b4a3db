"""Reads the list of hosts of a pool, and plans how many ranks go to each. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import MOST_CHARS, shown

MAX_RANKS = 1000
"""Maximum number of ranks that an agent starts on one machine."""
RECONNECT_S = 60.0
"""Seconds in which a broken connection is taken up again, unless the pool says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of the pool."""

    name: str
    """Name by which the command reaches it."""
    slots: int | None = None
    """Maximum number of ranks per worker group there; None: one for each GPU, or each core if the ranks have no
    GPUs."""


def read_hosts(name: str, text: str) -> tuple[Host, ...]:
    """Read hosts such as `a,b:2`."""
    hosts = tuple(_host(name, part.strip()) for part in text.split(","))
    names = [host.name for host in hosts]
    if twice := next((each for each in names if names.count(each) > 1), ""):
        raise OptionsError(f"{name} names {twice} twice: write {twice}:N for N ranks there")
    return hosts


def checked_hosts(name: str, text: str) -> str:
    """Return the text if `read_hosts` can read it; the reader of the option, whose value the pool gets as text."""
    read_hosts(name, text)
    return text


def _host(name: str, text: str) -> Host:
    match = re.fullmatch(r"(\[[^\]\s]+\]|[^:\s\[\]-][^:\s]*)(?::([0-9]{1,4}))?", text)
    if match is None or match[2] == "0" or not text.isprintable() or len(text) > MOST_CHARS:
        raise OptionsError(
            f"{name} must be hosts such as a,b:2, where :2 limits the ranks on a host; got {shown(text)}"
        )
    return Host(name=match[1].strip("[]"), slots=int(match[2]) if match[2] else None)


def reconnect_s(given: Mapping[str, str]) -> float:
    """Return the seconds in which a broken connection is taken up again, by a pool's options."""
    return float(given.get("reconnect", RECONNECT_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Maximum number of ranks that one host takes."""

    host: str
    ranks: int
    elastic: bool = False
    """Whether it takes more ranks if all hosts together are too small."""


def plan(size: int, rooms: Sequence[Room], nodes: int = 0) -> list[int]:
    """Return the number of ranks for each host: on as few hosts as possible, evenly spread, starting with the first
    hosts.

    Args:
        size: Number of ranks.
        rooms: The hosts, in the pool's order.
        nodes: Number of hosts to use; 0: as few as possible.

    Raises:
        PoolError: The hosts have no room for them; the message says what room they have.
    """
    counts = (min(nodes, size),) if nodes else range(1, len(rooms) + 1)
    for count in counts if size > 0 else ():
        if shape := _even(size, count, [room.ranks for room in rooms]):
            return shape
    elastic = [room.elastic for room in rooms]
    count = min(nodes or sum(elastic), size)
    if 0 < count <= sum(elastic) and -(-size // count) <= MAX_RANKS:
        return _even(size, count, [MAX_RANKS if each else 0 for each in elastic])
    if not nodes and 0 < size <= sum(room.ranks for room in rooms):
        return _filled(size, [room.ranks for room in rooms])
    raise PoolError(_too_few(size, rooms, nodes))


def _even(size: int, count: int, rooms: Sequence[int]) -> list[int]:
    """Spread ranks evenly over `count` hosts with enough room; empty if there are too few."""
    low, more = divmod(size, max(1, count))
    large = [number for number, room in enumerate(rooms) if room > low][:more]
    small = [number for number, room in enumerate(rooms) if room >= low > 0 and number not in large][: count - more]
    if len(large) < more or len(small) < count - more:
        return []
    return [low + (number in large) if number in (*large, *small) else 0 for number in range(len(rooms))]


def _filled(size: int, rooms: Sequence[int]) -> list[int]:
    """Fill one host after another."""
    shape = []
    for room in rooms:
        shape.append(min(room, size))
        size -= shape[-1]
    return shape


def _too_few(size: int, rooms: Sequence[Room], nodes: int) -> str:
    has = ", ".join(f"{room.host}: {room.ranks}" for room in rooms)
    total = sum(room.ranks for room in rooms)
    on = f" on {nodes} hosts" if nodes else ""
    if len(rooms) < min(nodes, size):
        usable = ", ".join(room.host for room in rooms)
        return f"{size} ranks{on} are asked for, and only {usable} can be used: leave nodes out, or add hosts."
    advice = f"ask for at most {total}" if not nodes else "ask for fewer, or leave nodes out"
    return f"{size} ranks{on} are asked for, but the hosts have room for {total} ({has}): {advice}, or add hosts."
