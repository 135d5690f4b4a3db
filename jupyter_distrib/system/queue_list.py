"""The list of this user's runs on this machine that wait in the queue of their kernel, or are starting: one small file
for each kernel, in the folder of sockets. The kernel writes it, and the shell's command reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from jupyter_distrib.system import confinement, paths, record_file
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.launch import began, own_mark
from jupyter_distrib.system.record_file import DamagedFile

_SUFFIX = ".queued"


@data_class
class QueuedRun:
    """One run of a queue. Fields may be added but never removed: other versions read them."""

    run: str
    label: str
    holder: str
    """Notebook and kernel of the queue, as other notebooks name them."""
    pool: str
    place: int
    """Its place in the queue of its pool, from 1; 0 if it is starting."""
    ranks: int
    """The number of its ranks; 0 for as many as the pool has."""
    queued_at_s: float
    """Time of its submission, in seconds since 1970."""


def write(directory: Path, kernel: str, runs: Sequence[QueuedRun]) -> None:
    """Replace the list of a kernel, which is this process; on a full disk only the list is lost."""
    path = directory / f"{kernel}{_SUFFIX}"
    with suppress(OSError):
        if not runs:
            path.unlink(missing_ok=True)
            return
        holder = {"process": own_mark(), "pid_namespace": confinement.pid_namespace()}
        paths.write_whole(path, json.dumps({**holder, "runs": [asdict(run) for run in runs]}))


def listed(directory: Path) -> list[QueuedRun]:
    """Return the runs of all queues, in their order; the lists of dead kernels are removed. Raises `OSError`."""
    found: list[QueuedRun] = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        with suppress(OSError, DamagedFile):
            content = record_file.json_of(record_file.text_of(path))
            if not isinstance(content, dict) or content.get("pid_namespace") != confinement.pid_namespace():
                continue  # each container numbers its own processes
            runs = content.get("runs")
            records = [record_file.record_of(QueuedRun, run) for run in runs] if isinstance(runs, list) else []
            if _is_alive(str(content.get("process"))):
                found += records
            else:
                path.unlink(missing_ok=True)
    return found


def _is_alive(mark: str) -> bool:
    pid, _, ticks = mark.partition(".")
    return pid.isdecimal() and bool(ticks) and began(int(pid)) == ticks
