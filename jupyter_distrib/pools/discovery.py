"""Looks on this machine for possible pools, to offer them. Reads files and variables only: connects to nothing, and
starts no program.

A kind that can be found has a module `discovery` in its folder, with a function `found`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from contextlib import suppress

from jupyter_distrib.pools import base
from jupyter_distrib.system import other_users, record_file
from jupyter_distrib.system.data_class import data_class

LARGEST_BYTES = 1_000_000


@data_class
class Found:
    """Something that could be a pool."""

    kind: str
    name: str
    """A name for the pool."""
    text: str
    """A phrase that describes the pool and says where it was found."""
    options: Mapping[str, str]
    """The options of the pool, by `Option.name`."""


def found() -> list[Found]:
    """Return all possible pools, kind by kind."""
    every: list[Found] = []
    for folder in base.built_in_folders():
        if importlib.util.find_spec(f"{folder}.discovery") is not None:
            every += importlib.import_module(f"{folder}.discovery").found()
    return every


def pool_name(text: str, kind: str) -> str:
    """Return a name for a pool, made from the name of what it consists of."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    return name if re.match(r"[A-Za-z_]", name) and name not in base.kinds() else f"{kind}-{name}".rstrip("-")


def text_of(path: str) -> str:
    """Return the text of a file; empty if it cannot be read, or if another user than root may have written it, as ssh
    demands of its own."""
    with suppress(OSError, ValueError), record_file.opened(path, through_links=True) as file:
        number = file.fileno()
        if os.fstat(number).st_uid in (0, os.getuid()) and not other_users.writers(number):
            content = file.read(LARGEST_BYTES + 1)
            return content.decode() if len(content) <= LARGEST_BYTES else ""
    return ""
