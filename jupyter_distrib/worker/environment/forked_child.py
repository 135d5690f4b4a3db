"""The end of a process that a cell has forked, where it comes to the end of the cell: it is no rank, and leaves as it
would leave a script. In such a child's main thread.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from jupyter_distrib.system import process


def leave(rank_pid: int, error: BaseException | None = None) -> None:
    """End this process if it is not the rank but a child that user code has forked.

    Args:
        rank_pid: The rank's process.
        error: What user code has raised, if it did.
    """
    if os.getpid() != rank_pid:
        _end(error)


def _end(error: BaseException | None) -> NoReturn:
    """End this process at once: exit handlers, locks and threads belong to the rank."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        status = 1
        traceback.print_exception(error)
    process.flush_streams()
    os._exit(status & 0xFF)
