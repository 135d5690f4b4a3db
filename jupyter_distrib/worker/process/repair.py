"""Repairs what a cell has damaged in its own process and every later cell needs. What cannot be repaired ends the rank,
with the reason in the notes that the agent reads. Rank's main thread, right after the cell's own code.

    descriptors 0 to 2, Python's streams    opened again
    functions of Python's modules           put back if something stands there that cannot be called
    imported libraries                      put back if many are gone, or one that ranks need
    trace and profile functions             taken away, unless there was one before the cell
    soft limits, signal mask, recursion     as before the cell, where the cell has lowered or blocked something

A function that the cell has replaced by another one stays, as do its other changes to modules.
"""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import Any, NoReturn

from jupyter_distrib.system import file_owner, open_files, process
from jupyter_distrib.system.crash_notes import Notes

_NEEDED = builtins, json, os, pickle, socket, sys, threading, time
_VITAL = frozenset({"builtins", "jupyter_distrib", "json", "os", "sys", "torch"})
"""Some modules whose absence shows that a cell has removed modules."""
_LIMITS = [
    getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
    if hasattr(resource, f"RLIMIT_{name}")
]
_FEW_FILES = 8
"""Number of files that a rank must be able to open to get a next cell."""
_OBSERVERS: tuple[tuple[Callable[[], object], Callable[[Any], None]], ...] = (
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (threading.gettrace, threading.settrace),
    (threading.getprofile, threading.setprofile),
)
_KeyError, _callable = KeyError, callable
_STREAMS = "standard input", "standard output", "standard error"


class Repair:
    """The repair of one rank's process.

    Args:
        link_fd: The link to the agent.
        notes_fd: The memory shared with the agent.
    """

    def __init__(self, link_fd: int, notes_fd: int) -> None:
        self.notes = Notes(notes_fd)
        self._own = {fd: process.identity(fd) for fd in (link_fd, notes_fd)}
        self._functions = [_functions_of(module) for module in _NEEDED]
        self.begin_cell()

    def begin_cell(self) -> None:
        """Take the state before the cell's own code for the one to be restored."""
        self._modules = sys.modules.copy()
        self._modules.pop("__main__", None)  # of the cell
        self._vital = _VITAL & self._modules.keys()
        self._limits = [resource.getrlimit(number) for number in _LIMITS]
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._recursion = sys.getrecursionlimit()
        self._observed = [get() is not None for get, _ in _OBSERVERS]

    def after_cell(self, renew_streams: Callable[[], None]) -> None:
        """Repair the rest of the process, or end it.

        `renew_streams` replaces standard output and error by new pipes, and tells the agent.
        """
        self._modules.clear()  # they hold what the cell has unloaded
        self._own_files(renew_streams)
        for number, before in zip(_LIMITS, self._limits, strict=True):
            if (now := resource.getrlimit(number)) != before and _is_less(now[0], before[0]):
                self._restore_limit(number, before, now)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for (get, put), was_set in zip(_OBSERVERS, self._observed, strict=True):
            if not was_set and get() is not None:
                put(None)
        faulthandler.cancel_dump_traceback_later()
        if not faulthandler.is_enabled():
            process.report_crashes()

    def python(self) -> None:
        """Repair Python's modules, which all that follows uses, also in a process that the cell has forked."""
        for namespace, names, values, get in self._functions:
            try:
                whole = get(namespace) == values
            except _KeyError:
                whole = False
            if not whole:
                _restore_functions(namespace, names, values)
        if sys.getrecursionlimit() < self._recursion:
            sys.setrecursionlimit(self._recursion)
        if len(sys.modules) < len(self._modules) or not self._vital <= sys.modules.keys():
            self._restore_modules()

    def _own_files(self, renew_streams: Callable[[], None]) -> None:
        if any(process.identity(fd) != opened for fd, opened in self._own.items()):
            self.leave(
                "the cell closed files that it had not opened (os.close or os.closerange), among them this rank's "
                "connection: close only the cell's own"
            )
        if lost := process.lost_descriptors():
            self._restore(lost, renew_streams)
        for fd in (1, 2):
            if not os.get_blocking(fd):
                os.set_blocking(fd, True)
        process.restore_python_streams()

    def _restore_modules(self) -> None:
        """Put libraries back: most can be imported once in a process. The user's own modules are imported again."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module and _is_library(module):
                sys.modules[name] = module

    def _restore_limit(self, number: int, before: tuple[int, int], now: tuple[int, int]) -> None:
        for limits in (before, (before[0], now[1]), (now[1], now[1])):
            with suppress(OSError, ValueError):
                resource.setrlimit(number, limits)
                break
        limit, _ = resource.getrlimit(number)
        too_few_files = number == resource.RLIMIT_NOFILE and not open_files.has_room(_FEW_FILES)
        if too_few_files or (number == resource.RLIMIT_AS and _is_less(limit, process.address_space_bytes())):
            what, name = ("open files", "NOFILE") if too_few_files else ("memory", "AS")
            self.leave(
                f"the cell lowered the limit of {what} for good, to {limit} (RLIMIT_{name}): lower the soft limit "
                f"only, resource.setrlimit(resource.RLIMIT_{name}, (soft, hard))"
            )

    def _restore(self, lost: list[int], renew_streams: Callable[[], None]) -> None:
        for fd in filter(process.is_socket, lost):
            self.leave(
                f"the cell closed its {_STREAMS[fd]} (file descriptor {fd}), whose number a connection has now: to "
                "silence output, use contextlib.redirect_stdout(None)"
            )
        process.restore_input()
        if lost != [0]:
            renew_streams()

    def leave_after(self, error: Exception) -> NoReturn:
        """End this process after an error in this package's own code."""
        traceback.print_exc()
        process.flush_streams()
        self.leave(
            f"{type(error).__name__}: {error} was raised outside of the cell's own code, as when a cell has replaced "
            "functions of Python's modules"
        )

    def leave(self, cause: str) -> NoReturn:
        """End this process at once: its exit handlers may need what is damaged."""
        self.notes.cause(cause)
        os._exit(1)


def _functions_of(
    module: types.ModuleType,
) -> tuple[dict[str, object], tuple[str, ...], tuple[object, ...], Callable[[dict[str, object]], object]]:
    """Return a module's names, those of functions and classes, these, and what gets them in ten nanoseconds each."""
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    return vars(module), (*functions,), (*functions.values(),), itemgetter(*functions)


def _restore_functions(namespace: dict[str, object], names: tuple[str, ...], values: tuple[object, ...]) -> None:
    at = -1
    for name in names:
        at += 1
        if not _callable(namespace.get(name)):
            namespace[name] = values[at]


def _is_less(limit: int, other: int) -> bool:
    return limit != resource.RLIM_INFINITY and (other == resource.RLIM_INFINITY or limit < other)


def _is_library(module: types.ModuleType) -> bool:
    """Return whether a module was imported, and is not the user's own."""
    has_spec = getattr(module, "__spec__", None) is not None
    return has_spec and not file_owner.is_users(getattr(module, "__file__", None) or "<")
