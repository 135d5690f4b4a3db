"""The debugger of a rank: pdb, whose prompt is answered in the notebook. Loaded in a rank at its first use; runs in the
thread that it has stopped.

It shows the cells' sources, hides the frames around the cell, and steps neither into the code of this package nor
beyond the end of the cell.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import pdb  # noqa: T100 - this is the debugger
import sys
import types
from collections.abc import Callable
from typing import IO, Any, cast

from jupyter_distrib.interfaces import framework
from jupyter_distrib.system import file_owner
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.worker.debugging.debugger_channel import DebuggerChannel
from jupyter_distrib.worker.interrupts import CellStage

MAX_TEXT = 100_000
"""Maximum number of characters sent in one answer."""


class _Text(io.StringIO):
    """Collects the debugger's output until it is sent."""

    def drain(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        left_out = len(text) - MAX_TEXT
        return text if left_out <= 0 else f"... {left_out} characters are left out ...\n{text[-MAX_TEXT:]}"


class _Lines(io.TextIOBase):
    """The user's input, line by line."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return self._ask()


class RankPdb(pdb.Pdb):
    """The debugger of one cell on this rank, or of a failure."""

    def __init__(self, channel: DebuggerChannel) -> None:
        self._channel, self._text = channel, _Text()
        super().__init__(
            stdin=cast("IO[str]", _Lines(self._read)),
            stdout=self._text,
            skip=["jupyter_distrib.*"],
            nosigint=True,
            readrc=False,
        )
        self._traced: list[types.FrameType] = []
        """Frames with a trace function of the debugger."""

    def stop_at(self, frame: types.FrameType) -> None:
        outer: types.FrameType | None = frame
        self._traced = []
        while outer is not None:
            self._traced.append(outer)
            outer = outer.f_back
        groups = None if framework.current is None or self._channel.expected else framework.current.groups
        if groups is not None and (limit_s := groups.timeout_s()) is not None:
            self.message(f"Other ranks give up waiting for this one in a collective after {duration(limit_s)}, because")
            self.message("the breakpoint is not in the cell: write a breakpoint() into the cell to lift that limit.")
        self.set_trace(frame)

    def detach(self) -> None:
        sys.settrace(None)
        self.clear_all_breaks()
        for frame in self._traced:
            frame.f_trace = None
        self._traced.clear()
        self.reset()

    def examine(self, traceback: types.TracebackType | None, *, freed: int = 0) -> None:
        """Examine the frames of an exception until the user leaves the debugger.

        Args:
            traceback: The frames.
            freed: Number of their variables whose values were freed.
        """
        self.reset()
        if freed:
            values = "1 variable" if freed == 1 else f"{freed} variables"
            self.message(f"The GPU's memory of {values} was freed after the failure: to stop with all values, run the")
            self.message("cell with --debug.")
        self.interaction(None, traceback)

    # ------------------------------------------------------------------------------------------------ pdb's own parts

    def interaction(self, *args: Any) -> None:
        try:
            super().interaction(*args)
        finally:
            self._channel.leave(self._text.drain())

    def _cmdloop(self) -> None:
        """Read commands; an interrupt ends the loop, since it stops the run."""
        self.cmdloop()

    def onecmd(self, line: str) -> Any:
        """Execute a command; its output becomes part of the answer."""
        interrupts = self._channel.interrupts
        before, interrupts.stage = interrupts.stage, CellStage.DEBUGGING
        try:
            with contextlib.redirect_stdout(self._text):
                return super().onecmd(line)
        except KeyboardInterrupt:
            if not self._channel.examining:
                raise
            return self.message("--KeyboardInterrupt--")
        finally:
            interrupts.stage = before

    def canonic(self, filename: str) -> str:
        """Return the canonical name of a file; a cell's name is left as it is, since its source is found under it."""
        return filename if filename in linecache.cache else super().canonic(filename)

    def get_stack(self, f: Any, t: Any) -> tuple[list[tuple[types.FrameType, int]], int]:
        """Return the stack from the cell on, without the program around it."""
        stack, index = super().get_stack(f, t)
        begin = _beginning([frame.f_code.co_filename for frame, _ in stack], self._channel.filename)
        return stack[begin:], max(0, index - begin)

    def do_quit(self, arg: str) -> bool | None:
        """q(uit) | exit
        Stop the run; after a failure, leave the debugger.
        """
        if not self._channel.examining:
            self._channel.quit(self._text.drain())
        return super().do_quit(arg)

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool | None:  # noqa: N802 - pdb's name
        """Do the same as quit."""
        return self.do_quit(arg)

    def do_interact(self, arg: str) -> None:
        """Not available on a rank: type Python at the prompt."""
        self.message("interact is not available on a rank: type Python at the prompt.")

    def do_run(self, arg: str) -> None:
        """Not available on a rank: run the cell again."""
        self.message("A rank cannot start the cell again: quit, and run the cell again.")

    do_restart = do_run

    # ------------------------------------------------------------------------------------------------

    def _read(self) -> str:
        text, newline, prompt = self._text.drain().rpartition("\n")
        return self._channel.ask(text + newline, prompt, self._line())

    def _line(self) -> int | None:
        """Return the line of the cell in which, or in a call from which, the rank is stopped."""
        cell = [line for frame, line in self.stack if frame.f_code.co_filename == self._channel.filename]
        return cell[-1] if cell else None


def _beginning(files: list[str], cell: str) -> int:
    """Return the index of the first frame of the cell, or of the first frame called by this package."""
    if cell in files:
        return files.index(cell)
    own = [file_owner.is_own(file) for file in files]
    called = (index for index, is_own in enumerate(own) if not is_own and any(own[:index]))
    return next(called, 0)
