"""Keeps at each end of a connection what another one needs to go on where it broke. Pure.

Messages are numbered in their order, without a number in them: both ends count. Keep-alives and `RelayResumed` are not
counted. Each end tells the other how many have come; what was sent and is not yet known to have come is sent again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from jupyter_distrib.wire import messages as m

ACKNOWLEDGE_BYTES = 1 << 20
"""Number of bytes after which the other end is told at once, so that it need not keep them."""


def is_counted(message: m.Message) -> bool:
    return not isinstance(message, m.RelayAlive | m.RelayResumed)


class SentMessages:
    """The messages that were sent and may not have come; `count` had come before."""

    def __init__(self, count: int = 0) -> None:
        self._kept: deque[Sequence[bytes]] = deque()
        self._come = count
        self.size_bytes = 0
        """Size of all that is kept."""

    def add(self, pieces: Sequence[bytes]) -> None:
        """Keep the frame of the next message, given in pieces."""
        self._kept.append(pieces)
        self.size_bytes += sum(map(len, pieces))

    def confirm(self, count: int) -> None:
        """Forget the first messages, since so many have come. Ignores a number that cannot be right."""
        while self.knows(count) and self._come < count:
            self._come += 1
            self.size_bytes -= sum(map(len, self._kept.popleft()))

    def knows(self, count: int) -> bool:
        """Return whether all messages after the first `count` are here."""
        return self._come <= count <= self._come + len(self._kept)

    def after(self, count: int) -> list[bytes]:
        """Return the pieces of all messages after the first `count`, which must be here."""
        self.confirm(count)
        return list(itertools.chain.from_iterable(self._kept))


class HeardMessages:
    """The messages that have come; `count` had come before."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._untold_bytes = 0

    def add(self, size_bytes: int) -> bool:
        """Count one; return whether it is time to tell the other end."""
        self.count += 1
        self._untold_bytes += size_bytes
        if self._untold_bytes < ACKNOWLEDGE_BYTES:
            return False
        self._untold_bytes = 0
        return True
