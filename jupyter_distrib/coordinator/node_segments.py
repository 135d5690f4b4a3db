"""The segments of shared memory that a node holds, so that values which the notebook sent before are not sent again.

    HeldSegments      the coordinator's list of them, for one node
    StoredSegments    the memory itself, in the relay on the node

The coordinator decides which segments the node drops; a node that lacks an expected segment fails the cell, after
which the coordinator sends everything anew.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence

from jupyter_distrib.wire import messages as m


class HeldSegments:
    """A node's segments, the last used last. Used in the coordinator's loop.

    Args:
        limit_bytes: The maximum memory of the node for segments, if the user has not set a limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, segment: str) -> bool:
        return segment in self._sizes

    def use(self, parcel: m.Parcel, sizes: Sequence[int]) -> list[str]:
        """Record that the node has the segments of a parcel, with these sizes; return the segments that it drops
        after the parcel has reached its ranks."""
        for segment, size_bytes in zip(parcel.segments, sizes, strict=True):
            self._sizes[segment] = size_bytes
            self._sizes.move_to_end(segment)
        limit = self._limit_bytes if parcel.cache_bytes is None else parcel.cache_bytes
        dropped = [segment for segment in self._sizes if segment not in parcel.kept]
        for segment in dropped:
            del self._sizes[segment]
        while sum(self._sizes.values()) > limit:
            dropped.append(self._sizes.popitem(last=False)[0])
        return dropped

    def forget(self) -> None:
        """Assume that the node has none."""
        self._sizes.clear()


class StoredSegments:
    """The descriptors of the segments on a node. Used in one thread at a time."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def add(self, segment: str, fd: int) -> None:
        """Store a segment; takes over the descriptor."""
        self.drop([segment])
        self._fds[segment] = fd

    def of(self, segments: Sequence[str]) -> list[int] | None:
        """Return the descriptors of these segments, which stay stored; None if one of them is missing."""
        return [self._fds[each] for each in segments] if self._fds.keys() >= set(segments) else None

    def drop(self, segments: Collection[str]) -> None:
        for segment in segments:
            if (fd := self._fds.pop(segment, None)) is not None:
                os.close(fd)

    def drop_all(self) -> None:
        self.drop([*self._fds])
