"""The state of asyncio on a rank: each cell begins without an event loop, as a new program does, and warnings about
coroutines that nobody awaits name the user's line. Rank's main thread."""

from __future__ import annotations

import asyncio
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
        frame = sys._getframe(1)  # noqa: SLF001 - where it is dropped
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file_owner.is_own(file) and (code := getattr(coroutine, "cr_code", None)) is not None:
            file, line = code.co_filename, code.co_firstlineno
        text = f"coroutine '{coroutine.__qualname__}' was never awaited"
        warnings.warn_explicit(text, RuntimeWarning, file, line)

    warnings._warn_unawaited_coroutine = warn  # noqa: SLF001 - what Python calls


def begin_cell() -> None:
    """Forget the event loop of the previous cell, after which `asyncio.get_event_loop` would find none and make none;
    a policy that the user has set stays."""
    if sys.version_info < (3, 14) and type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy:
        asyncio.set_event_loop_policy(None)
