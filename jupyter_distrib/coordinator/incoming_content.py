"""The content of the next cell's shared memory, which comes to a node in parts. Runs in the threads in which the engine
calls the relay."""

from __future__ import annotations

from typing import Any

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import shared_memory


class IncomingContent:
    """The content of one cell at a time, as far as it is here."""

    def __init__(self) -> None:
        self._unfinished: shared_memory.Unfinished | None = None
        self._refusal: Exception = PayloadError("the parts before this one have not come.")
        """Why it is not here."""

    def add(self, part: Any, start: int, size_bytes: int) -> None:
        """Add a part of a content of this size; from its begin to its end. Raises `PayloadError` if there is no room
        for it."""
        try:
            if start == 0:
                self.discard()
                self._unfinished = shared_memory.Unfinished(size_bytes)
            if self._unfinished is None:
                raise self._refusal
            self._unfinished.add(memoryview(part).cast("B"), start)
        except Exception as error:
            self.discard()
            self._refusal = error
            raise

    def finish(self) -> int:
        """Return the descriptor of the whole content, which is the caller's."""
        assert self._unfinished is not None
        fd, self._unfinished = self._unfinished.finish(), None
        return fd

    def discard(self) -> None:
        """Forget a content that is not complete."""
        if self._unfinished is not None:
            self._unfinished.close()
            self._unfinished = None
