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
    """Let warnings about coroutines that were never awaited name the user's code instead of this package's, in which
    they are dropped after the cell."""
    original = getattr(warnings, "_warn_unawaited_coroutine", None)
    if original is None:
        return

    def warn(coroutine: types.CoroutineType[Any, Any, Any]) -> None:
        frame = sys._getframe(1)  # noqa: SLF001 - where it is dropped
        code = getattr(coroutine, "cr_code", None)
        if code is None or not file_owner.is_own(frame.f_code.co_filename):
            original(coroutine)
            return
        text = f"coroutine '{coroutine.__qualname__}' was never awaited"
        warnings.warn_explicit(text, RuntimeWarning, code.co_filename, code.co_firstlineno)

    warnings._warn_unawaited_coroutine = warn  # type: ignore[attr-defined]  # noqa: SLF001 - what Python calls


def begin_cell() -> None:
    """Forget the event loop of the previous cell, after which `asyncio.get_event_loop` would find none and make none;
    a policy that the user has set stays."""
    if sys.version_info < (3, 14) and type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy:
        asyncio.set_event_loop_policy(None)
