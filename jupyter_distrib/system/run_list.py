"""The list of this user's detached runs on this machine: one small file a run, in the folder of sockets. The agent or
coordinator that holds the record of a run writes it; every kernel reads it, also one of another version."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.launch import began

_SUFFIX = ".detached"


@data_class
class ListedRun:
    """One detached run. Fields may be added, and none taken away: other versions read them."""

    run: str
    label: str
    """Name of the cell."""
    holder: str
    """Notebook and kernel that began the run, as other notebooks name them."""
    notebook: str
    """Path of the notebook; empty if the front end does not report it."""
    began_at_s: float
    """Start of the run, in seconds since 1970."""
    ended: bool
    server: str
    """Name of the process that holds the record, as of its socket."""
    pid: int
    protocol: int
    """Protocol that this process speaks."""


def write(directory: Path, run: ListedRun) -> None:
    """Put a run into the list, in place of an earlier entry; a full disk costs the entry only."""
    with suppress(OSError):
        path = directory / f"{run.run}{_SUFFIX}"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({**asdict(run), "process_began": began(run.pid)}), "utf-8")
        temporary.replace(path)


def remove(directory: Path, run: str) -> None:
    with suppress(OSError):
        (directory / f"{run}{_SUFFIX}").unlink(missing_ok=True)


def listed(directory: Path) -> list[ListedRun]:
    """Return the runs whose holder is alive, oldest first; entries of dead holders are removed."""
    runs = []
    for path in directory.glob(f"*{_SUFFIX}"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(path.read_text("utf-8"))
            if began(content["pid"]) != content["process_began"]:
                path.unlink(missing_ok=True)
                continue
            runs.append(ListedRun(**{name: content[name] for name in ListedRun.__dataclass_fields__}))
    return sorted(runs, key=lambda run: run.began_at_s)
