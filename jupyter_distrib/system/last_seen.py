"""Remembers this user's detached runs in case their process dies: one small file per run, in a folder that survives a
reboot. The agent or coordinator of the run writes it, and touches it while the run goes on; kernels read it. The folder
may be shared by several machines and containers."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import confinement, paths, record_file
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.launch import began
from jupyter_distrib.system.record_file import DamagedFile
from jupyter_distrib.system.run_list import ListedRun

EVERY_S = 30.0
"""Seconds between touches."""
SILENT_S = 300.0
"""Seconds without a touch after which a run counts as lost if its process is not visible from here."""
KEPT_S = 30 * 24 * 3600.0
"""Seconds for which a lost run is remembered."""
_SUFFIX = ".json"


@data_class
class ProcessHost:
    """Host, boot and PID namespace of a process."""

    host: str
    boot: str
    """The machine's current boot id; empty where the system has none."""
    namespace: str
    """The namespace of process ids; empty where the system has none."""

    @classmethod
    def here(cls) -> ProcessHost:
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return cls(host=socket.gethostname(), boot=boot, namespace=confinement.pid_namespace())


@data_class
class SeenRun:
    """One detached run, as its process has last written it."""

    run: str
    label: str
    """The name of the cell."""
    holder: str
    """Notebook and kernel that began the run, as other notebooks name them."""
    notebook: str
    began_at_s: float
    ended: bool = False
    saved: bool = False
    """Whether the history lists it as lost."""
    logs: str = ""
    """The folder of what its ranks print."""
    checkpoints: list[str]
    """The folders into which it has saved."""
    host: str
    boot: str
    namespace: str
    pid: int
    """The process that holds the run."""
    process_began: str
    seen_at_s: float = 0.0
    """Last time at which it was alive: the file's modification time."""

    def cause_of_loss(self) -> str:
        """Return why the run is lost; empty if its process may still exist."""
        here = ProcessHost.here()
        if self.host != here.host:
            return ""
        if self.boot != here.boot:
            return "the machine has been rebooted since then"
        if self.namespace != here.namespace:
            return "nothing has been heard of it since" if time.time() - self.seen_at_s > SILENT_S else ""
        return "" if began(self.pid) == self.process_began else "the process that looked after it was killed"


def of(run: ListedRun, directory: Path) -> SeenRun:
    """Return the entry for a run of this process; its logs are in `directory` if there is no other folder for them."""
    place, logs = ProcessHost.here(), ""
    with suppress(PoolError):
        logs = str(paths.log_directory(otherwise=directory) / run.run)
    return SeenRun(
        run=run.run,
        label=run.label,
        holder=run.holder,
        notebook=run.notebook,
        began_at_s=run.began_at_s,
        logs=logs,
        checkpoints=[],
        host=place.host,
        boot=place.boot,
        namespace=place.namespace,
        pid=run.pid,
        process_began=began(run.pid),
    )


def write(run: SeenRun) -> None:
    """Save a run, replacing its earlier state; on a full disk it is just not remembered."""
    with suppress(OSError, PoolError):
        path = _path(run.run)
        paths.write_whole(path, json.dumps({**asdict(run), "seen_at_s": 0.0}))
        if run.seen_at_s:
            os.utime(path, (run.seen_at_s, run.seen_at_s))


def touch(run: str) -> None:
    """Record that a run is still alive."""
    with suppress(OSError, PoolError):
        os.utime(_path(run), follow_symlinks=False)


def remove(run: str) -> None:
    """Forget a run."""
    with suppress(OSError, PoolError):
        _path(run).unlink(missing_ok=True)


def runs() -> list[SeenRun]:
    """Return the remembered runs, most recently seen last; damaged files are skipped, and files of runs lost long ago
    are removed."""
    found = []
    with suppress(OSError, PoolError):
        for path in _folder().glob(f"*{_SUFFIX}"):
            with suppress(OSError, DamagedFile):
                seen_at_s = path.lstat().st_mtime
                run = record_file.record_of(SeenRun, record_file.json_of(record_file.text_of(path)))
                if time.time() - seen_at_s > KEPT_S:
                    path.unlink()
                elif path.name == f"{run.run}{_SUFFIX}":
                    found.append(replace(run, seen_at_s=seen_at_s))
    return sorted(found, key=lambda run: run.seen_at_s)


def _folder() -> Path:
    folder = paths.state_directory() / "detached"
    with suppress(OSError):
        paths.clear(folder, stat.S_IFDIR)
    return paths.private(folder, "XDG_STATE_HOME")


def _path(run: str) -> Path:
    return _folder() / f"{run}{_SUFFIX}"
