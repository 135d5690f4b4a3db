"""Ends a script as Python ends a program, but on a rank that stays: waits for the script's threads and processes, calls
its exit handlers, and writes what is still in the buffers of its files. Rank's main thread.

    with script_end.ScriptEnd() as ending: `atexit.register` notes the script's handlers
        ...                                the script
        ending.wait()                      if it has ended well
    script_end.flush_files()               in any case

What a library registers while it is imported belongs to the rank, whose later cells may use that library.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from jupyter_distrib.system import file_owner

_OWN_ACTIVITIES = "threading", "multiprocessing.context", "multiprocessing.process"
"""The modules of the classes with which a script itself starts threads and processes."""
_FILES = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom


_register, _unregister, _begin_pool = atexit.register, atexit.unregister, ThreadPoolExecutor.__init__


class ScriptEnd:
    """The threads and exit handlers of one script: a context manager that notes what its block starts and registers."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())
        self.pools: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()
        """Pools of threads that the script itself has made."""
        self._handlers: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []

    def __enter__(self) -> ScriptEnd:
        replaced: Any = atexit
        pools: Any = ThreadPoolExecutor

        def begin_pool(pool: ThreadPoolExecutor, *arguments: Any, **keywords: Any) -> None:
            _begin_pool(pool, *arguments, **keywords)
            if file_owner.is_users(sys._getframe(1).f_code.co_filename):  # noqa: SLF001 - as in `register`
                self.pools.add(pool)

        replaced.register, replaced.unregister = self.register, self.unregister
        pools.__init__ = begin_pool
        return self

    def __exit__(self, *_: object) -> None:
        replaced: Any = atexit
        pools: Any = ThreadPoolExecutor
        replaced.register, replaced.unregister = _register, _unregister
        pools.__init__ = _begin_pool
        self.hand_over()

    def register(self, function: Callable[..., object], /, *arguments: Any, **keywords: Any) -> Callable[..., object]:
        """Register an exit handler, as `atexit.register` does."""
        if file_owner.importing_library(sys._getframe(1)):  # noqa: SLF001 - the public way reads source files
            return _register(function, *arguments, **keywords)
        self._handlers.append((function, arguments, keywords))
        return function

    def unregister(self, function: Callable[..., object]) -> None:
        """Drop an exit handler, as `atexit.unregister` does."""
        self._handlers = [each for each in self._handlers if each[0] != function]
        _unregister(function)

    def wait(self) -> None:
        """Wait for threads and processes of the script, then call its exit handlers, the last one first."""
        for pool in list(self.pools):
            pool.shutdown()  # its threads never end by themselves
        # A pool of a library, such as that of a compiler, serves later cells too.
        others = {thread for pool in _objects(ThreadPoolExecutor) for thread in pool._threads}  # noqa: SLF001
        for thread in set(threading.enumerate()) - self._before - others:
            if not thread.daemon and not _is_of_library(thread):
                thread.join()
        in_pools = {id(child) for pool in _objects(ProcessPoolExecutor) for child in (pool._processes or {}).values()}  # noqa: SLF001
        for child in multiprocessing.active_children():
            if not child.daemon and id(child) not in in_pools and not _is_of_library(child):
                child.join()
        while self._handlers:
            function, arguments, keywords = self._handlers.pop()
            try:
                function(*arguments, **keywords)
            except Exception:  # noqa: BLE001 - foreign code; as Python does it, the others are called too
                traceback.print_exc()

    def hand_over(self) -> None:
        """Leave the handlers that have not been called to the end of the rank."""
        for function, arguments, keywords in self._handlers:
            _register(function, *arguments, **keywords)


def flush_files() -> None:
    """Write what is in the buffers of open files, which Python writes when it frees them."""
    for file in _objects(*_FILES):
        with contextlib.suppress(OSError, ValueError):  # closed, or not to be written to
            file.flush()


def _objects(*kinds: type) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]


def _is_of_library(activity: object) -> bool:
    """Return whether a thread or process is of a library's own class, as in pools of processes, which end with the
    rank."""
    name = type(activity).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and file_owner.is_library(file) and name not in _OWN_ACTIVITIES
