"""The conversation between the debugger of this rank and the user: the debugger sends text with a prompt, and waits for
the line that answers it.

    pdb, main thread --ask--> DebuggerPrompted --> agent --> kernel, where the user is asked
                     <--line-- control thread  <-- Debug <--

The debugger itself is `worker/debugging/debugger.py`. Functions are called in the
thread that the debugger has stopped, usually the main thread, unless they say otherwise.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import queue
import sys
import time
import types
from collections.abc import Callable
from typing import Protocol

from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.interrupts import Interrupts

QUIT_S = 5.0
"""Seconds to wait for the run to be stopped after the user has quit the debugger."""
_CALLS = ("breakpoint(", "set_trace(")
BETWEEN_CELLS = "no cell runs"


class Debugger(Protocol):
    """The debugger of one cell."""

    def stop_at(self, frame: types.FrameType) -> None:
        """Stop the rank in this frame."""

    def detach(self) -> None:
        """Stop following the execution: the cell has ended."""


class DebuggerChannel:
    """The channel of one rank.

    Args:
        rank: The number of the rank.
        send: Sends an event, from any thread.
        make_debugger: Makes the debugger of one cell, when one is used.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[m.Event], None],
        interrupts: Interrupts,
        make_debugger: Callable[[DebuggerChannel], Debugger],
    ) -> None:
        self._pid, self._rank, self._send, self.interrupts = os.getpid(), rank, send, interrupts
        self._make_debugger = make_debugger
        self._run, self.filename, self._unanswered = "", "", BETWEEN_CELLS
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._skipped: set[tuple[str, int]] = set()
        """Locations of the breakpoints that were skipped in this cell."""
        self._debugger: Debugger | None = None
        self.stopped = False
        """Whether the rank is stopped, from the first prompt until it goes on."""
        self.expected = True
        """Whether the other ranks wait without a limit while this one is stopped."""
        self.examining = False
        """Whether the failure of a cell is being examined."""

    def begin(
        self, run: str, filename: str, *, unanswered: str = "", examining: bool = False, expected: bool = True
    ) -> None:
        """Begin a cell, or the examination of one.

        Args:
            run: The run.
            filename: The name of the cell.
            unanswered: The reason why nobody can answer a prompt; empty if somebody can.
            examining: Whether the cell has failed, and its failure is examined.
            expected: Whether the cell holds breakpoints, so that the other ranks wait for it without a limit.
        """
        self.expected = expected
        self._run, self.filename, self._unanswered, self.examining = run, filename, unanswered, examining
        self._lines = queue.SimpleQueue()
        self._skipped.clear()

    def finish(self) -> None:
        """End the cell, or the examination, and the debugger with it."""
        self._unanswered, self.examining, self.stopped = BETWEEN_CELLS, False, False
        debugger, self._debugger = self._debugger, None
        if debugger is not None:
            debugger.detach()

    def stop_at(self, frame: types.FrameType) -> None:
        """Stop the rank at a breakpoint in this frame; continue if nobody can answer a prompt."""
        child = "it is in a process that the cell has started" if os.getpid() != self._pid else ""
        busy = "another thread is stopped in the debugger" if self.stopped else ""
        if reason := child or self._unanswered or busy:
            return self._skip(frame, reason)
        if self._debugger is None:
            self._debugger = self._make_debugger(self)
        return self._debugger.stop_at(frame)

    def _skip(self, frame: types.FrameType, reason: str) -> None:
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in self._skipped:
            self._skipped.add(place)
            print(f"{place[0]}, line {place[1]}: the breakpoint is skipped, because {reason}.", file=sys.stderr)

    def ask(self, text: str, prompt: str, line: int | None) -> str:
        """Send a prompt with the text above it. Return the line that answers it, or an empty text at the end of input.

        Raises:
            KeyboardInterrupt: The run is being stopped.
        """
        self.stopped, answer = True, ""
        if not self.interrupts.stopping or self.examining:
            at_s = time.monotonic()
            self._send(
                m.DebuggerPrompted(run=self._run, rank=self._rank, text=text, prompt=prompt, line=line, at_s=at_s)
            )
            answer = self._lines.get()
        if self.interrupts.stopping and not self.examining:
            raise KeyboardInterrupt
        return answer

    def leave(self, text: str) -> None:
        """Send the last output, and tell the user that the rank continues."""
        self.stopped = False
        self._send(m.DebuggerLeft(run=self._run, rank=self._rank, text=text, at_s=time.monotonic()))

    def quit(self, text: str) -> None:
        """Ask for the run to be stopped, and wait for that. Raises KeyboardInterrupt unless the stop does not come."""
        self._send(m.DebuggerLeft(run=self._run, rank=self._rank, text=text, quit=True, at_s=time.monotonic()))
        deadline_s = time.monotonic() + QUIT_S
        while not self.interrupts.stopping and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                self._lines.get(timeout=left_s)
            except queue.Empty:
                return
        raise KeyboardInterrupt

    # ------------------------------------------------------------------------------------------------ control thread

    def answer(self, line: str) -> None:
        """Pass on the line that answers the prompt."""
        self._lines.put(f"{line}\n")

    def end(self) -> None:
        """End the input: the waiting or next prompt gets an empty text."""
        self._lines.put("")

    def end_examination(self) -> None:
        """End the examination of a failure, if any, because the rank has something else to do."""
        if self.examining:
            self.end()


def is_expected(cell: m.Cell) -> bool:
    """Return whether a cell, or a function of the notebook that it uses, contains a breakpoint."""
    return any(call in text for text in (cell.source, *cell.sources.values()) for call in _CALLS)


current: DebuggerChannel | None = None
"""The channel of this rank; None in a process that is not a rank."""


class _PdbFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads pdb, and replaces its `set_trace` at the first import, so that a rank without a debugger does not
    load it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name) if name == "pdb" else None
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        module.__dict__["set_trace"] = _set_trace


def install(channel: DebuggerChannel) -> None:
    """Make `breakpoint()` and `pdb.set_trace()` stop this rank in our debugger."""
    global current
    current = channel
    sys.breakpointhook = _breakpoint
    if (pdb := sys.modules.get("pdb")) is not None:
        pdb.__dict__["set_trace"] = _set_trace
    else:
        sys.meta_path.insert(0, _PdbFinder())


def _breakpoint(*_: object, **__: object) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        stop(sys._getframe(1))  # noqa: SLF001 - the caller's frame, as pdb itself gets it


def _set_trace(*_: object, **__: object) -> None:
    stop(sys._getframe(1))  # noqa: SLF001 - as above


def stop(frame: types.FrameType) -> None:
    """Stop this rank at a breakpoint in this frame."""
    if current is not None:
        current.stop_at(frame)
