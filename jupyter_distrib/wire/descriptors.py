"""Owns file descriptors until they are passed on, and closes the rest. Any process.

A function that gets `Descriptors` owns them: it takes them out, passes them on, or closes them. A function that gets a
plain sequence of numbers borrows them for the call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from jupyter_distrib.system import open_files


class Descriptors:
    """Open file descriptors with one owner."""

    __slots__ = ("_fds",)

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds = tuple(fds)

    def __iter__(self) -> Iterator[int]:
        return iter(self._fds)

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def duplicates(cls, fds: Iterable[int]) -> Descriptors:
        """Return an owner of duplicates of borrowed descriptors. Raises `OSError`, also if one of them has not
        arrived."""
        owned = cls()
        try:
            for fd in fds:
                if fd == open_files.LOST:
                    raise open_files.error()
                owned._fds += (os.dup(fd),)
        except OSError:
            owned.close()
            raise
        return owned

    @property
    def complete(self) -> bool:
        """Return whether all have arrived, so that this process could open them."""
        return open_files.LOST not in self._fds

    def take(self) -> tuple[int, ...]:
        """Return the descriptors, which the caller then owns."""
        fds, self._fds = self._fds, ()
        return fds

    def take_one(self) -> int | None:
        """Return the only descriptor, which the caller then owns; None if there is none."""
        fds = self.take()
        return fds[0] if fds else None

    def close(self) -> None:
        """Close the remaining descriptors; a second call does nothing."""
        for fd in self.take():
            if fd != open_files.LOST:
                os.close(fd)


NO_DESCRIPTORS = Descriptors()
