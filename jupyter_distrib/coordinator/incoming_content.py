"""Receives in parts the content of the next cell's shared memory. Runs in the threads in which the engine calls the
relay."""

from __future__ import annotations

from typing import Any

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import shared_memory


class IncomingContent:
    """The content of one cell at a time, as far as it has arrived."""

    def __init__(self) -> None:
        self._unfinished: shared_memory.Unfinished | None = None
        self._refusal: Exception = PayloadError("an earlier part of this content has not arrived.")
        """Reason why the content is missing."""

    def add(self, part: Any, start: int, size_bytes: int) -> None:
        """Add a part of a content of this size, in order from its beginning: bytes, or the path of their file.

        Raises:
            PayloadError: There is no room for it, or no such file here.
        """
        try:
            if start == 0:
                self.discard()
                self._unfinished = shared_memory.Unfinished(size_bytes)
            if self._unfinished is None:
                raise self._refusal
            self._unfinished.add(memoryview(_read(part) if isinstance(part, str) else part).cast("B"), start)
        except Exception as error:
            self.discard()
            self._refusal = error
            raise

    def finish(self) -> int:
        """Return the descriptor of the whole content, which the caller then owns."""
        assert self._unfinished is not None
        fd, self._unfinished = self._unfinished.finish(), None
        return fd

    def discard(self) -> None:
        """Discard a content that is not complete."""
        if self._unfinished is not None:
            self._unfinished.close()
            self._unfinished = None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise PayloadError(
            f"{path}, in a folder that this node shares with the notebook, cannot be read here ({error.strerror}): set "
            "copy_files = true, so that values go through the connection."
        ) from None
