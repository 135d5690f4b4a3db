"""The observer that writes the trace of a run (`--profile`) into a file beside the notebook, in a thread of its own.

runs/4f2a-7/trace.json.gz                  all ranks, as soon as each has sent its part
runs/4f2a-7/memory-rank0.pickle            the history of a GPU's memory, for pytorch.org/memory_viz

Files of an earlier run with this id are replaced; an attached run sends its parts again.
"""

from __future__ import annotations

import gzip
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from jupyter_distrib.kernel.analysis import trace_parts
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m

FOLDER = "runs"
TRACE = "trace.json.gz"


def follow(run: ObservedRun) -> Observer | None:
    """Return an observer of a run that is profiled, or may be: the options of an attached one are not known."""
    return TraceWriter(run, Path.cwd()) if "profile" in run.options or run.attached else None


class TraceWriter(Observer):
    """The writer of one run's trace."""

    ends_in_background = True

    def __init__(self, run: ObservedRun, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._parts: dict[int, m.Profiled] = {}
        self._written = False

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        match event:
            case m.Profiled():
                self._parts[event.rank] = event
            case m.Restarted():
                self._parts, self._written = {}, False
            case _:
                pass
        over = isinstance(event, m.Ended) or self._parts.keys() == record.ranks.keys()
        if over and self._parts and not self._written:
            self._written = True
            self._write(tuple(record.ranks))

    def _write(self, ranks: tuple[int, ...]) -> None:
        """Write the files, and say so before the work: nobody waits long for the end of it."""
        folder = f"{FOLDER}/{self._run.id}"
        try:
            if not any(part.trace for part in self._parts.values()):
                self._run.note(trace_parts.sentence(self._parts, ranks, ""))
                return
            (self._directory / folder).mkdir(parents=True, exist_ok=True)
            with (
                _new(self._directory / folder / TRACE) as new,
                gzip.open(new, "wt", compresslevel=4, encoding="utf-8") as file,
            ):
                self._run.note(trace_parts.sentence(self._parts, ranks, f"{folder}/{TRACE}"))
                file.writelines(trace_parts.merged(self._parts))
            self._write_memory(folder)
        except OSError as error:
            self._run.note(f"The trace could not be written into {folder}: {error}")

    def _write_memory(self, folder: str) -> None:
        for rank, part in self._parts.items():
            if part.memory:
                path = f"{folder}/memory-rank{rank}.pickle"
                with _new(self._directory / path) as file:
                    file.write(zlib.decompress(part.memory))
                if rank == min(self._parts):
                    self._run.note(f"{path} is the history of its GPU's memory, for https://pytorch.org/memory_viz")


def _new(path: Path) -> IO[bytes]:
    """Return a new file in place of an earlier one. The notebook's folder may be a team's, and the run's folder was
    there before it: a link that a colleague has put there is not written through. Raises `OSError`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(path.name, flags, 0o666, dir_fd=folder), "wb")
    finally:
        os.close(folder)
