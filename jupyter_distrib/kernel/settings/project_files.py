"""Accepts from a project's settings file what it may set before the user has trusted it.

That file comes with the folder. Without trust it may choose the number of ranks of pools on this machine, up to as
many as the machine has room for, and a strategy, and keep its runs out of the history. Everything else waits: `KEYS`
says so for each key, `Option.unasked` for each option of a pool, and `Capabilities.unasked` for each kind; all
default to False. A cell that needs none of what waits runs with the user's own settings. Kernel side, no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib.kernel.settings.settings import BUILT_IN, NamedPool, ProjectFile
from jupyter_distrib.options import Option
from jupyter_distrib.pools.base import capabilities_of
from jupyter_distrib.system import control_groups
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import clipped, printable
from jupyter_distrib.wire.messages import number_of_ranks

Pools = Mapping[str, NamedPool]
VALUE_CHARACTERS = 120
DEVICES = Path("/dev")


def _never(value: object, pools: Pools) -> bool:
    return False


def _always(value: object, pools: Pools) -> bool:
    return True


def _names_ranks_of_this_machine(value: object, pools: Pools) -> bool:
    pool = pools.get(value) if isinstance(value, str) else None
    return pool is not None and pool.project_file is None and not pool.fallback and capabilities_of(pool.kind).unasked


def _saves_nothing(value: object, pools: Pools) -> bool:
    return value == 0 and not isinstance(value, bool)


@data_class
class Key:
    """One key at the top of a settings file."""

    name: str
    unasked: Callable[[object, Pools], bool] = _never
    """Whether a project's file may set this value before it is trusted; `pools` are the existing ones."""


KEYS = (
    Key(name="pool", unasked=_names_ranks_of_this_machine),
    Key(name="remote", unasked=_names_ranks_of_this_machine),
    Key(name="reserved", unasked=_names_ranks_of_this_machine),
    Key(name="strategy", unasked=_always),
    Key(name="track"),
    Key(name="compat"),
    Key(name="history", unasked=_saves_nothing),
    Key(name="history_days"),
    Key(name="notify"),
    Key(name="notify_after"),
    Key(name="pools", unasked=_always),  # each pool by itself
)
OF_USER = ("notify", "notify_after")
"""The keys that a project's file never sets, trusted or not."""


@data_class
class Accepted:
    """The accepted part of a project's file."""

    pools: dict[str, NamedPool]
    """All pools with the file's; one that waits for trust has its `project_file`."""
    content: dict[str, Any]
    """The accepted keys."""
    waiting: ProjectFile | None = None
    """The file, if part of it waits for trust."""
    sentence: str = ""
    """A sentence on what is not accepted; empty if that only concerns cells that name it."""


def without_trust(
    content: Mapping[str, Any],
    defined: Pools,
    *,
    known: Pools,
    present: Mapping[str, object],
    options_of: Callable[[str], tuple[Option, ...]],
    source: ProjectFile,
) -> Accepted:
    """Return the accepted part of a file that the user has not trusted.

    Args:
        content: The content of the file.
        defined: The pools that it defines.
        known: The pools that there are without it.
        present: The values that keys have without it.
        options_of: Returns the options of a kind.
        source: The file.
    """
    pools, left, asked = dict(known), [], []
    for name, pool in defined.items():
        own = known.get(name)
        if own is not None and _same(own, pool):
            continue
        if not (asks := _asks(pool, content["pools"][name], own, options_of(pool.kind))):
            pools[name] = pool
        elif own is None:
            pools[name] = replace(pool, project_file=replace(source, sets=" and ".join(asks)))
            asked.append(f"[pools.{name}] with {' and '.join(asks)}")
        else:
            left.append(f"[pools.{name}] with {' and '.join(asks)}")
    taken = {}
    for key in KEYS:
        if key.name in content:
            if key.unasked(value := content[key.name], pools):
                taken[key.name] = value
            elif (tuple(value) if isinstance(value, list) else value) != present.get(key.name):
                left.append(f"{key.name} = {_printable(repr(value))}")
    if not (left or asked):
        return Accepted(pools=pools, content=taken)
    waiting = replace(source, sets=", ".join((*left, *asked)))
    return Accepted(
        pools=pools, content=taken, waiting=waiting, sentence=_ignored_sentence(waiting, left) if left else ""
    )


def _ignored_sentence(file: ProjectFile, left: list[str]) -> str:
    return (
        f"{file.shown} is not trusted, so this is not taken from it: {', '.join(left)}. "
        "If you trust this file, run %distributed_pool trust."
    )


def _same(own: NamedPool, other: NamedPool) -> bool:
    return replace(other, origin=own.origin, project_file=own.project_file) == own


def _asks(pool: NamedPool, table: Mapping[str, Any], own: NamedPool | None, options: tuple[Option, ...]) -> list[str]:
    """Return the parts of a definition that need trust, as texts; all of it, if it redefines the user's own pool or is
    of a kind that needs trust."""
    of_user = own is not None and own.origin != BUILT_IN
    every = of_user or not capabilities_of(pool.kind).unasked
    unasked = set() if every else {"kind", *(option.name for option in options if option.unasked)}
    is_more = not every and (pool.size.count or 0) > _most_ranks(gpus=pool.size.gpus)
    too_many = {"ranks", "gpus"} if is_more else set()
    asks = {key: pool.options.get(key, value) for key, value in table.items() if key not in unasked - too_many}
    lines = {
        key: _printable(str(value)) if value is not True else "" for key, value in asks.items() if value is not False
    }
    more = dict.fromkeys(too_many, " (more than this machine has)")
    return [f"{key} = {value}{more.get(key, '')}" if value else key for key, value in lines.items()]


def _most_ranks(*, gpus: bool) -> int:
    """Return the number of ranks for which this machine has cores or, for ranks with one each, GPUs; at least the
    number for a cell that gives none. Ranks with GPUs are CPU ranks where there are none."""
    devices = len([*DEVICES.glob("nvidia[0-9]*")]) if gpus else 0
    return max(number_of_ranks(0, 0), control_groups.cores(), devices)


def _printable(text: str) -> str:
    """Return a text without control characters for the terminal, and at most one line long."""
    return clipped(printable(text), VALUE_CHARACTERS)
