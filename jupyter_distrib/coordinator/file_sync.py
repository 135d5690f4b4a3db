"""Collects the notebook's own files for nodes that do not share its folders. Runs in the coordinator, on the kernel's
machine.

The folder of the notebook is copied to `0/` and the other folders of its path to `1/`, `2/`, ...: what is small, and
has changed since the last run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jupyter_distrib.wire.messages import Hello

FILE_LIMIT_BYTES = 1 << 20
"""Size above which a file is data, which nodes read from where it is stored."""
TOTAL_LIMIT_BYTES = 100 << 20
COUNT_LIMIT = 5000
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})

Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Found:
    """Files of the folders by their names on nodes: path on this machine, and stamp."""

    files: Mapping[str, tuple[str, Stamp]]
    left_out: str
    """Sentence about what was left out; empty if nothing was."""


class FileSync:
    """The files that one node has already."""

    def __init__(self) -> None:
        self._known: dict[str, Stamp] = {}

    def changes(self, folder: Found) -> tuple[list[tuple[str, int, bytes]], list[str]]:
        """Return files that are new or changed, and names of those that are gone."""
        files, unread = [], []
        for name, (full, stamp) in folder.files.items():
            if self._known.get(name) != stamp:
                try:
                    with open(full, "rb") as file:
                        files.append((name, stamp[0], file.read()))
                except OSError:  # gone or not readable: the rank will say so if it needs it
                    unread.append(name)
        gone = [name for name in self._known if name not in folder.files]
        self._known = {name: stamp for name, (_, stamp) in folder.files.items()}
        self.forget(unread)
        return files, gone

    def forget(self, names: Sequence[str]) -> None:
        """Forget files that did not arrive on the node, so that they are sent again the next time."""
        for name in names:
            self._known.pop(name, None)


def directory(hello: Hello) -> str:
    """Return the notebook's folder: its kernel's working directory, as far as the system tells."""
    try:
        return os.readlink(f"/proc/{hello.pid}/cwd")
    except OSError:
        return os.getcwd()


def is_shared(on_node: Sequence[int] | None, before: tuple[int, int] | None, after: tuple[int, int] | None) -> bool:
    """Return whether a node's folder is the notebook's, by its `stamp` on the node and its stamps on this machine
    before and after that: something, if only the notebook, may have been written into it meanwhile."""
    if on_node is None or before is None or after is None:
        return False
    return on_node[0] == before[0] == after[0] and before[1] <= on_node[1] <= after[1]


def look(directory: str, path: Sequence[str]) -> Found:
    """Look through the notebook's folder and the folders of its path."""
    files: dict[str, tuple[str, Stamp]] = {}
    total, largest = 0, (FILE_LIMIT_BYTES, "")
    for number, folder in enumerate(dict.fromkeys((directory, *path))):
        for name, full in _files(folder):
            try:
                info = os.stat(full)
            except OSError:
                continue
            if info.st_size > FILE_LIMIT_BYTES:
                largest = max(largest, (info.st_size, full))
                continue
            total += info.st_size
            if len(files) == COUNT_LIMIT or total > TOTAL_LIMIT_BYTES:
                return Found(files, f"{_too_many(folder)} {_too_large(*largest)}".rstrip())
            files[f"{number}/{name}"] = (full, (info.st_mtime_ns, info.st_size))
    return Found(files, _too_large(*largest))


def _too_many(folder: str) -> str:
    return (
        f"{folder} has more than {COUNT_LIMIT} files or {TOTAL_LIMIT_BYTES >> 20} MB: not all of it is on the nodes; "
        "start the notebook in a folder of its own."
    )


def _too_large(size_bytes: int, path: str) -> str:
    if not path:
        return ""
    return (
        f"{path} ({size_bytes >> 20} MB) is not on the nodes, nor is any other file over {FILE_LIMIT_BYTES >> 20} MB: "
        "have the ranks read such data from where all nodes reach it."
    )


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """Yield relative and full names; without hidden files, files made by Python or npm, and environments."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and name not in _LEFT_OUT
            and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
        ]
        inside = "" if parent == folder else f"{os.path.relpath(parent, folder)}/"
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith((".ipynb", ".pyc")):
                yield f"{inside}{name}", os.path.join(parent, name)
