"""The end of a process that a cell has forked, where it comes to the end of the cell: it is no rank, and leaves as it
would leave a script. In such a child's main thread.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from jupyter_distrib.system import process


@contextmanager
def children_leave(rank_pid: int) -> Iterator[None]:
    """Run user code, from which only the process of the rank comes back."""
    try:
        yield
    except BaseException as error:
        if os.getpid() != rank_pid:
            _leave(error)
        raise
    if os.getpid() != rank_pid:
        _leave(None)


def _leave(error: BaseException | None) -> None:
    """End at once: exit handlers, locks and threads are those of the rank."""
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
