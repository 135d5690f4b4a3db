"""The names and source lines of cells in the tracebacks of one run. Called in the pool's own thread and in the thread
that waits for the run."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jupyter_distrib.wire import messages as m

MOST_CAUSES = 20
"""Number of causes to keep of one failure; ranks send fewer."""
_CELL_FILE = re.compile(r"/\S*/ipykernel_\d+/\d+\.py")
"""The file name under which ipykernel compiles a cell."""


class CellSources:
    """The source lines that the tracebacks of one run show.

    Args:
        cell: Source lines of its cell, by file name.
    """

    def __init__(self, cell: Mapping[str, Sequence[str]]) -> None:
        self._cell = cell
        self._files: dict[str, str] = {}
        """Shown name -> the file name under which `linecache` has the lines."""

    def named(self, event: m.RunEvent) -> m.RunEvent:
        """Return the event with the front end's names of cells, such as `Cell In[2]`: functions of plain cells have
        file names that only ipykernel knows."""
        if isinstance(event, m.Failed):
            return replace(event, failure=self._failure(event.failure))
        if isinstance(event, (m.Interrupted, m.Exited, m.StackSeen)) and event.frames:
            return replace(event, frames=self._frames(event.frames))
        if isinstance(event, m.Noted):
            return replace(event, text=_CELL_FILE.sub(lambda file: cell_name(file[0]), event.text))
        return event

    def source_of(self, filename: str) -> Sequence[str] | None:
        """Return the lines of the file or cell that tracebacks call `filename`; None if they cannot be found."""
        return self._cell.get(filename) or _lines(self._files.get(filename, filename)) or None

    def _failure(self, failure: m.Failure, depth: int = 0) -> m.Failure:
        cause = self._failure(failure.cause, depth + 1) if failure.cause and depth < MOST_CAUSES else None
        return replace(failure, frames=self._frames(failure.frames), cause=cause)

    def _frames(self, frames: Sequence[m.Frame]) -> tuple[m.Frame, ...]:
        named = []
        for frame in frames:
            name = cell_name(frame.filename)
            self._files[name] = frame.filename
            named.append(replace(frame, filename=name, text=frame.text or _line(frame)))
        return tuple(named)


def _line(frame: m.Frame) -> str:
    lines = _lines(frame.filename)
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def _lines(filename: str) -> list[str]:
    """Return the lines of a cell, or of a module of this machine. The name has come from a rank: a host must not have
    other files quoted in the notebook, nor a device read to its end."""
    is_source = filename in linecache.cache or (filename.endswith(".py") and os.path.isfile(filename))
    return linecache.getlines(filename) if is_source else []


def cell_name(filename: str) -> str:
    """Return `Cell In[2]` for the file name under which the kernel compiled that cell, and any other name unchanged."""
    # Called in the node's thread, maybe while another one imports IPython, whose modules may be loaded only in part.
    shells = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    shell = shells.instance() if shells is not None and shells.initialized() else None
    name = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(name) if name else filename
