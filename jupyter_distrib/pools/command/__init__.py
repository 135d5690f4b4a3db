"""Ranks on hosts that a command reaches by its standard input and output."""

from collections.abc import Mapping


def usable(options: Mapping[str, str]) -> bool:
    """Return whether a pool with these options can be reached at all."""
    return "start" in options and bool({"hosts", "hosts_from"} & options.keys())
