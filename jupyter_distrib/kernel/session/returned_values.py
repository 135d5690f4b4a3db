"""The values that the ranks of one run return: received in the pool's own thread, and unpacked by the thread that
wants them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jupyter_distrib.kernel.session.results import Results
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire.messages import Parcel, Returned, RunEvent


class ReturnedValues:
    """The values that the ranks of one run returned. Owns the descriptors that came with them."""

    def __init__(self) -> None:
        self.held: object = ()
        """The kernel's classes and functions that were sent, kept alive until the values have come."""
        self._parcels: dict[int, tuple[Parcel, int | None]] = {}
        self._results: Results | None = None

    def taken(self, event: RunEvent, fds: Sequence[int]) -> RunEvent:
        """Keep the event's value and return the event without it. Takes the descriptors."""
        if isinstance(event, Returned) and event.value is not None:
            self._parcels[event.rank] = (event.value, fds[0] if fds else None)
            return replace(event, value=None)
        for fd in fds:
            os.close(fd)
        return event

    def unpacked(self, returned: Iterable[int], *, keep: bool) -> Results:
        """Unpack and return the values of the ranks that have returned, once.

        Args:
            returned: The ranks that have returned.
            keep: Whether to keep the results for further calls.
        """
        if self._results is not None:
            return self._results
        values: dict[int, Any] = dict.fromkeys(returned)
        for rank, (parcel, fd) in self._parcels.items():
            copy = None if fd is None else os.dup(fd)  # a call that is interrupted can be made again
            values[rank] = payload.unpack_value(*payload.from_parcel(parcel, copy))
        self._close_parcels()
        results = Results(values)
        self._results = results if keep else None
        return results

    def _close_parcels(self) -> None:
        while self._parcels:
            _, (_, fd) = self._parcels.popitem()
            if fd is not None:
                os.close(fd)

    def __del__(self) -> None:
        self._close_parcels()


def unpack_exception(parcel: Parcel) -> BaseException | None:
    return payload.unpack_exception(*payload.from_parcel(parcel, None))
