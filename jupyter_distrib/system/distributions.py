"""Lists the distributions of a Python by the names of their `*.dist-info` folders, which takes a few milliseconds.
Standard library only; used by the kernel, and under the interpreter of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from jupyter_distrib.system import record_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A distribution that is installed."""

    name: str
    """Normalized name: `my-package` for `My_Package`."""
    version: str
    folder: str
    """Its `*.dist-info` folder."""

    def read(self, file: str) -> str:
        """Return one of the files of its folder; empty if there is none."""
        with suppress(OSError):
            return record_file.beginning_of(os.path.join(self.folder, file))
        return ""


def normalized(name: str) -> str:
    """Return the normalized form of a name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(path: Iterable[str]) -> Mapping[str, Distribution]:
    """Return the distributions on a path by their names; the first of each name, as Python's imports choose."""
    found: dict[str, Distribution] = {}
    for folder in dict.fromkeys(path):
        for each in _in(folder):
            found.setdefault(each.name, each)
    return found


def _in(folder: str) -> Iterator[Distribution]:
    try:
        entries = sorted(os.listdir(folder or "."))
    except OSError:
        return
    for entry in entries:
        name, dash, version = entry.removesuffix(".dist-info").partition("-")
        if entry.endswith(".dist-info") and dash:
            yield Distribution(name=normalized(name), version=version, folder=os.path.join(folder, entry))


def public(version: str) -> str:
    """Return a version without its build label, which no index has: `2.13.0` for `2.13.0+cpu`."""
    return version.partition("+")[0]
