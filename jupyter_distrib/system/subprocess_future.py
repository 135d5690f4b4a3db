"""Runs a function in a separate process while this one imports Ray, which a thread would slow down.

This saves 0.3 s in the benchmark row `ray-first` (a cell right after `%load_ext`).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def subprocess_future(make: Callable[[], T], *fds: int) -> Future[T]:
    """Return a future for the result or exception of `make`. Must be called before any thread is started; `fds` are
    closed in that process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for fd in (reading, *fds):
                os.close(fd)
            with open(writing, "wb") as file:
                file.write(pickle.dumps(_outcome(make)))
        finally:
            os._exit(0)
    os.close(writing)
    made: Future[T] = Future()
    threading.Thread(
        target=_receive_outcome, args=(reading, pid, make, made), name="jupyter_distrib-make", daemon=True
    ).start()
    return made


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - raised where the future is waited for
        return None, error


def _receive_outcome(fd: int, pid: int, make: Callable[[], T], made: Future[T]) -> None:
    with open(fd, "rb") as file:
        content = file.read()
    os.waitpid(pid, 0)
    try:
        value, error = pickle.loads(content)
    except Exception:  # noqa: BLE001 - that process did not come to its end
        value, error = _outcome(make)
    if error is None:
        made.set_result(value)
    else:
        made.set_exception(error)
