"""The facts about torchmetrics. Its metrics add up over the ranks, which counts samples several times if every rank has
read all of them, as ranks do for an evaluation under a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jupyter_distrib.libraries.library import Library

_COMPLETE = "_jupyter_distrib_complete"
"""The attribute of a metric that has seen the same samples on every rank."""


def _never() -> bool:
    return False


reads_all: Callable[[], bool] = _never
"""Returns whether every rank reads all of the loader that was last begun; a strategy that divides loaders sets it."""


def follow(reading: Callable[[], bool] = _never) -> None:
    """Use this function as `reads_all` until the next call."""
    global reads_all
    reads_all = reading


def is_followed() -> bool:
    """Return whether a strategy that divides loaders is active."""
    return reads_all is not _never


def _count_once(module: Any) -> None:
    wrap, synchronize = module.Metric._wrap_update, module.Metric.sync  # noqa: SLF001 - updates have no public hook

    @functools.wraps(wrap)
    def wrap_update(metric: Any, update: Any) -> Any:
        wrapped = wrap(metric, update)

        @functools.wraps(wrapped)
        def noting(*arguments: Any, **keywords: Any) -> None:
            state = metric.__dict__
            state[_COMPLETE] = (not metric.update_count or state.get(_COMPLETE, False)) and reads_all()
            wrapped(*arguments, **keywords)

        return noting

    @functools.wraps(synchronize)
    def sync(metric: Any, *arguments: Any, **keywords: Any) -> None:
        if not metric.__dict__.get(_COMPLETE):
            synchronize(metric, *arguments, **keywords)

    module.Metric._wrap_update, module.Metric.sync = wrap_update, sync  # noqa: SLF001


TORCHMETRICS = Library(modules=("torchmetrics",), mend={"torchmetrics.metric": _count_once})
