"""The inputs of a cell on their way to its ranks: their parcel, and the descriptors of the shared memory that goes with
it. Kernel side, in the thread that starts the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from jupyter_distrib.serialization import payload, shared_memory
from jupyter_distrib.serialization.value_cache import Layout, ValueCache
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


class Outgoing:
    """Inputs that are sent once. Leaving it as a context frees what was not sent.

    Args:
        packed: The pickled inputs.
        cache: The large values that were sent before; takes the new ones.
        limit_bytes: The most memory that the cache may use, see `ValueCache.lay_out`.

    Raises:
        PayloadError: There is not enough memory.
    """

    def __init__(self, packed: payload.Packed, cache: ValueCache, limit_bytes: int | None) -> None:
        self._cache = cache
        parcel, views = payload.laid_out(packed)
        self._layout = cache.lay_out(parcel, views, limit_bytes) if views else Layout(parcel=parcel, new=())
        self._memory = -1
        """The descriptor of the new memory when it is complete."""
        self._content: shared_memory.Content | None = None
        """The new memory until then."""
        if self._layout.new:
            try:
                self._content = shared_memory.Content(self._layout.new)
            except BaseException:
                self._layout.reused.close()
                raise

    @property
    def parcel(self) -> m.Parcel:
        return self._layout.parcel

    @property
    def in_parcel(self) -> bool:
        """Return whether the parcel itself holds everything."""
        return self._content is None and self._memory < 0 and not len(self._layout.reused)

    def fill(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Copy the values into shared memory until `given_up` returns True; later changes of them have no effect."""
        content = self._content
        if content is None or not content.fill(given_up):
            return
        self._memory, self._content = content.finish(), None
        content.close()
        self._layout = replace(self._layout, new=())  # the values themselves are no longer needed
        if self._layout.pieces:
            with suppress(OSError):  # this process can open nothing more: the values are sent again
                self._cache.keep(self._layout, os.dup(self._memory))

    def descriptors(self) -> Descriptors:
        """Return the descriptors, to be sent once, before or after `fill`; the caller owns them."""
        reused = self._layout.reused.take()
        if self._content is not None:
            memory, telling = self._content.early().take()
            return Descriptors((memory, *reused, telling))
        new = () if self._memory < 0 else (self._memory,)
        self._memory = -1
        return Descriptors((*new, *reused))

    def close(self) -> None:
        self._layout.reused.close()
        if self._content is not None:
            self._content.close()
        Descriptors((self._memory,) if self._memory >= 0 else ()).close()
        self._memory = -1

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
