"""Ranks on hosts that ssh reaches, built on `pools/command`."""

from collections.abc import Mapping


def usable(options: Mapping[str, str]) -> bool:
    """Return whether a pool with these options can be reached at all."""
    return bool({"hosts", "hosts_from"} & options.keys())
