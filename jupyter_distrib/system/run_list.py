"""The list of this user's detached runs on this machine: one small file per run, in the folder of sockets. The agent or
coordinator that holds the record of a run writes it; every kernel reads it, also one of another version."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from jupyter_distrib.system import confinement, paths, record_file
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.launch import began
from jupyter_distrib.system.record_file import DamagedFile

_SUFFIX = ".detached"
_SERVER = re.compile(r"[\w.-]{1,100}", re.ASCII)


@data_class
class ListedRun:
    """One detached run. Fields may be added but never removed: other versions read them."""

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
    """Name of the process that holds the record, and of its socket."""
    pid: int
    protocol: int
    """Protocol that this process speaks."""
    pid_namespace: str = ""
    """The PID namespace of the process; empty if unknown."""
    state: str = ""
    """The way in which it ended: `done`, `failed`, `lost` or `interrupted`; empty before."""
    where: str = ""
    """Place of the run, in words: `n1, Slurm job 17`; empty if it is not known."""

    @property
    def pid_is_known_here(self) -> bool:
        """Return whether the pid is valid here too: each container numbers its own processes."""
        return self.pid_namespace in ("", confinement.pid_namespace())


def write(directory: Path, run: ListedRun) -> None:
    """Add a run to the list, replacing an earlier entry; on a full disk only the entry is lost."""
    with suppress(OSError):
        text = json.dumps({**asdict(run), "process_began": began(run.pid)})
        paths.write_whole(directory / f"{run.run}{_SUFFIX}", text)


def remove(directory: Path, run: str) -> None:
    with suppress(OSError):
        (directory / f"{run}{_SUFFIX}").unlink(missing_ok=True)


def listed(directory: Path) -> list[ListedRun]:
    """Return the runs whose holder is alive, oldest first; entries of dead holders are removed."""
    return scan(directory)[0]


def scan(directory: Path) -> tuple[list[ListedRun], list[Path]]:
    """Return the runs whose holder is alive, oldest first, and the entries that are damaged; those of dead holders are
    removed. Raises `OSError`."""
    runs, damaged = [], []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            content = record_file.json_of(record_file.text_of(path))
            run = record_file.record_of(ListedRun, content)
            if not _SERVER.fullmatch(run.server):
                raise DamagedFile("its server is not the name of a socket")
        except (OSError, DamagedFile):
            if os.path.lexists(path):
                damaged.append(path)
            continue
        if _is_held(run, content.get("process_began"), directory):
            runs.append(run)
        else:
            remove(directory, run.run)
    return sorted(runs, key=lambda run: run.began_at_s), damaged


def _is_held(run: ListedRun, process_began: object, directory: Path) -> bool:
    """Return whether the holder of a run is alive; whether it listens, if its process cannot be seen from here."""
    if run.pid_is_known_here:
        return began(run.pid) == process_began
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):  # the path may be too long
        sock.setblocking(False)
        return sock.connect_ex(str(directory / f"{run.server}.sock")) in (0, errno.EAGAIN)  # EAGAIN: the server is busy
    return False
