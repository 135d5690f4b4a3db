"""Keeps, at each end of a connection, the messages that a new connection needs to continue where the old one broke.
Pure.

Messages are numbered in their order, without a number in them: both ends count. Keep-alives and `RelayResumed` are not
counted. Each end tells the other how many have come; messages that are not known to have come are sent again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from jupyter_distrib.wire import messages as m

ACKNOWLEDGE_BYTES = 1 << 20
"""Number of bytes after which an end confirms messages at once, so that the other end need not keep them."""


def is_counted(message: m.Message) -> bool:
    return not isinstance(message, m.RelayAlive | m.RelayResumed)


class SentMessages:
    """The messages that were sent and may not have come; `count` messages had come before."""

    def __init__(self, count: int = 0) -> None:
        self._kept: deque[Sequence[bytes]] = deque()
        self._come = count
        self.size_bytes = 0
        """Size of all kept messages."""

    def add(self, pieces: Sequence[bytes]) -> None:
        """Keep the frame of the next message, given in pieces."""
        self._kept.append(pieces)
        self.size_bytes += sum(map(len, pieces))

    def confirm(self, count: int) -> None:
        """Forget the first messages: this many have come. Ignores a number that cannot be right."""
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
    """The messages that have come; `count` messages had come before."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._unconfirmed_bytes = 0

    def add(self, size_bytes: int) -> bool:
        """Count one message; return whether it is time to tell the other end."""
        self.count += 1
        self._unconfirmed_bytes += size_bytes
        if self._unconfirmed_bytes < ACKNOWLEDGE_BYTES:
            return False
        self._unconfirmed_bytes = 0
        return True
