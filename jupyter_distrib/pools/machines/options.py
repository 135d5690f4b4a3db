"""The options of pools whose machines are started on demand. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import MOST_CHARS, Option, duration, shown

LARGEST_PRICE = 1e6


def command(name: str, text: str) -> str:
    """Read a command line for `sh`; the reader of the option."""
    lines = text.split("\n")
    if not text.strip() or text.startswith("-") or len(text) > MOST_CHARS or not all(map(str.isprintable, lines)):
        raise OptionsError(f"{name} must be a command for sh; got {shown(text)}")
    return text


def price(name: str, text: str) -> str:
    """Read a price per hour, in any currency; the reader of the option."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= LARGEST_PRICE:
        raise OptionsError(f"{name} must be the price of an hour, a number such as 24.5; got {shown(text)}")
    return text


UP = Option(flag="--up", metavar="COMMAND", meaning="the command that starts the machines for a cell", read=command)
MACHINES = (
    UP,
    Option(
        flag="--down", metavar="COMMAND", meaning="the command that ends the machines that up has started", read=command
    ),
    Option(
        flag="--status", metavar="COMMAND", meaning="the command with status 0 while the machines are up", read=command
    ),
    Option(
        flag="--hosts-from",
        metavar="COMMAND",
        meaning="the command that prints the hosts after up, one a line",
        read=command,
        default="hosts",
    ),
    Option(
        flag="--down-after",
        metavar="TIME",
        meaning="end machines that no cell uses and that keep no values for this time",
        read=duration,
        default="20m",
    ),
    Option(
        flag="--at-most",
        metavar="TIME",
        meaning="end them after this time in any case",
        read=duration,
        default="no limit",
    ),
    Option(flag="--up-within", metavar="TIME", meaning="give up if up takes longer", read=duration, default="30m"),
    Option(flag="--price", metavar="NUMBER", meaning="the price of an hour; it is only shown", read=price),
)
NAMES = tuple(option.name for option in MACHINES)


def check(given: Mapping[str, str]) -> None:
    """Raise `PoolError` for options that make no sense together."""
    others = [name for name in NAMES if name in given]
    if others and "up" not in given:
        raise PoolError(f"{others[0]} is for machines that are started on demand: set up as well, or leave it out.")
    if "hosts" in given and "hosts_from" in given:
        raise PoolError("hosts and hosts_from exclude each other: leave one out.")
    if "up" in given and "down" not in given:
        raise PoolError("up needs down, the command that ends what it starts: nothing would end the machines.")
    if "up" in given and not {"hosts", "hosts_from"} & given.keys():
        raise PoolError("up needs the hosts that it starts: set hosts, or hosts_from to a command that prints them.")
