"""The values that the ranks of one run return: received in the pool's own thread, and unpacked by the thread that
wants them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jupyter_distrib.kernel.session.runs.results import Results
from jupyter_distrib.serialization import exceptions, payload
from jupyter_distrib.system import interrupts
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


class ReturnedValues:
    """The values that the ranks of one run returned. Owns the descriptors that came with them."""

    def __init__(self) -> None:
        self.held: object = ()
        """The kernel's classes and functions that were sent, kept alive until the values have come."""
        self._parcels: dict[int, tuple[m.Parcel, Descriptors]] = {}
        self._results: Results | None = None

    @property
    def are_none(self) -> bool:
        """Return whether no value is left to be unpacked."""
        return not self._parcels

    def taken(self, event: m.RunEvent, descriptors: Descriptors) -> m.RunEvent:
        """Keep the event's value and return the event without it. Owns the descriptors."""
        if isinstance(event, m.Returned) and event.value is not None:
            self._parcels[event.rank] = event.value, descriptors
            return replace(event, value=None)
        if isinstance(event, m.Restarted):
            self._close_parcels()
        descriptors.close()
        return event

    def unpacked(self, returned: Iterable[int], *, keep: bool) -> Results:
        """Unpack and return the values of the ranks that have returned, once. Raises `OSError` if too many files are
        open.

        Args:
            returned: The ranks that have returned.
            keep: Whether to keep the results for further calls.
        """
        if self._results is not None:
            return self._results
        values: dict[int, Any] = dict.fromkeys(returned)
        for rank, (parcel, descriptors) in self._parcels.items():
            copy = Descriptors.duplicates(descriptors).take_one()  # a call that is interrupted can be made again
            values[rank] = payload.unpack_value(*payload.from_parcel(parcel, copy))
        self._close_parcels()
        results = Results(values)
        self._results = results if keep else None
        return results

    def _close_parcels(self) -> None:
        while self._parcels:
            _, (_, descriptors) = self._parcels.popitem()
            descriptors.close()

    def __del__(self) -> None:
        try:
            with interrupts.Uninterrupted(instead=interrupts.come_again):
                self._close_parcels()
        except KeyboardInterrupt:  # in the steps before the block
            interrupts.come_again()


def unpack_exception(parcel: m.Parcel) -> BaseException | None:
    return exceptions.unpack_exception(*payload.from_parcel(parcel, None))
