"""The state of asyncio on a rank: each cell begins without an event loop, as a new program does, and warnings about
coroutines and tasks that nobody awaits name the user's line. Rank's main thread."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
import warnings
from typing import Any

from jupyter_distrib.system import file_owner


def install() -> None:
    """Let warnings about coroutines that were never awaited name the line that drops them. Where this package drops
    them after the cell, they name the line of the function."""
    if not hasattr(warnings, "_warn_unawaited_coroutine"):
        return

    def warn(coroutine: types.CoroutineType[Any, Any, Any]) -> None:
        if id(coroutine) in _warned:
            _warned.remove(id(coroutine))
            return
        frame = sys._getframe(1)  # noqa: SLF001 - where it is dropped
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file_owner.is_own(file) and (code := getattr(coroutine, "cr_code", None)) is not None:
            file, line = code.co_filename, code.co_firstlineno
        text = f"coroutine '{coroutine.__qualname__}' was never awaited"
        warnings.warn_explicit(text, RuntimeWarning, file, line)

    warnings._warn_unawaited_coroutine = warn  # noqa: SLF001 - what Python calls


_warned: set[int] = set()
"""The ids of coroutines that a cell was warned of; they are dropped without having begun, and later."""


def warn_of_pending(loop: asyncio.AbstractEventLoop | None) -> None:
    """Warn of tasks that have not ended when their loop ends with the cell. In a notebook's kernel they would go on.

    Args:
        loop: The loop; None for the loop to which `asyncio.ensure_future` adds tasks where none runs, if there is one.
    """
    if loop is None:
        # The only public function for it would make a loop.
        policy = asyncio.get_event_loop_policy() if sys.version_info < (3, 14) else None
        loop = getattr(getattr(policy, "_local", None), "_loop", None)
    if loop is None or loop.is_running():  # the kernel's own, of an inline pool
        return
    for task in asyncio.all_tasks(loop):
        coroutine = task.get_coro()
        code = getattr(coroutine, "cr_code", None)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - else asyncio would warn once more, later
        if code is None:
            continue
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:  # type: ignore[arg-type]
            _warned.add(id(coroutine))
        text = (
            f"task '{code.co_qualname}' had not ended when the cell did, and does not go on: "
            "`await` it in the cell, or use asyncio.run()"
        )
        warnings.warn_explicit(text, RuntimeWarning, code.co_filename, code.co_firstlineno)


def begin_cell() -> None:
    """Forget the event loop of the previous cell, which `asyncio.get_event_loop` would neither find nor replace;
    a policy that the user has set stays. One that it has left as running would keep `asyncio.run` from working."""
    asyncio._set_running_loop(None)  # noqa: SLF001 - asyncio has no public way to step out of a loop
    if sys.version_info < (3, 14) and type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy:
        asyncio.set_event_loop_policy(None)
