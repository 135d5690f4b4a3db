"""Carries the parts of large values through the pipes to the hosts; see `coordinator/part_transfer.py`."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from jupyter_distrib.coordinator.part_transfer import Taking


class Pipes:
    """The pipes of one worker group: a part is the bytes themselves."""

    part_bytes = 4 << 20
    ahead = 3

    def packed(self, buffer: memoryview, taking: Taking) -> bytes:
        return bytes(buffer)

    def wait(self, calls: list[Future[Any]]) -> None:
        wait(calls)

    def failure(self, error: Exception) -> str:
        return f"the values for this cell cannot be read ({getattr(error, 'strerror', None) or error})."
