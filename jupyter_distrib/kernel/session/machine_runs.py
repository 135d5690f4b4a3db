"""Lists and stops the runs of this user on this machine, of every notebook and script. Kernel side; for the shell's
command. Agents and coordinators report the runs that go on, kernels the runs in their queues; the history has the ended
ones.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.session import detached
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.system import log_folder, paths, queue_list
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.queue_list import QueuedRun
from jupyter_distrib.system.run_list import ListedRun
from jupyter_distrib.wire import messages as m

_GOING_ON = ("queued", "starting", "running")
ENDED_SHOWN = 20
"""Number of ended runs that are listed."""
ENDED = "ended"
"""The state of a finished run whose outcome is unknown."""
STOP_S = 15.0
"""Seconds to wait for the end of a run that was asked to stop."""
ASK_EVERY_S = 0.2
SAVED_S = 3.0
"""Seconds until a run that has ended is in the history: its notebook saves it a moment later."""


@data_class
class MachineRun:
    """One run of this user on this machine."""

    run: str
    label: str
    """Name of what it runs: `Cell In[5]`, `train.py`."""
    state: str
    """`queued`, `starting`, `running`, or the way in which it ended; `ended` if that is not known."""
    holder: str
    """The notebook or script that began it."""
    ranks: int
    """The number of its ranks; 0 if unknown."""
    detached: bool
    """Whether it can be attached."""
    began_at_s: float
    """Start in seconds since 1970; 0 if unknown."""
    elapsed_s: float
    server: str = ""
    """The process that serves it, by the name of its socket; empty before it runs, and once it has ended."""
    place: int = 0
    """Its place in the queue of its notebook; 0 if it is not queued."""

    @property
    def active(self) -> bool:
        return self.state in _GOING_ON

    @property
    def folder(self) -> Path:
        """The folder of its logs."""
        return paths.log_directory() / self.run

    def log_file(self, rank: int) -> Path:
        """Return the path of a rank's log. Raises `PoolError` if the logs were removed to free space."""
        log_folder.check(self.folder)
        return self.folder / f"rank{rank}.log"

    def logged_ranks(self) -> list[int]:
        """Return the ranks that have written something."""
        names = [path.stem.removeprefix("rank") for path in self.folder.glob("rank*.log")]
        return sorted(int(name) for name in names if name.isdecimal())

    def as_values(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        values = {name: value for name, value in m.fields_of(self).items() if name != "server"}
        return {**values, "files": {str(rank): str(self.log_file(rank)) for rank in self.logged_ranks()}}


@data_class
class Listing:
    """The runs of this user on this machine."""

    runs: tuple[MachineRun, ...]
    """The runs, oldest first: the ended ones, then all that go on, then the queued ones."""
    notes: tuple[str, ...] = ()
    """Sentences on what could not be listed."""

    def find(self, name: str | None, *, active: bool = False) -> MachineRun:
        """Return the run with this id or number; for None the newest one that runs, else the newest.

        Args:
            name: A run's id, or the number at its end.
            active: Whether only runs that go on are meant, of which None stands for the only one.

        Raises:
            PoolError: There is no such run, or several.
        """
        runs = [run for run in self.runs if run.active or not active]
        if name is None:
            runs = [run for run in runs if run.state == "running"] or runs
        found = [run for run in runs if name is None or name == run.run or run.run.endswith(f"-{name}")]
        going_on = "is in progress" if active else "is known"
        known = ", ".join(f"{run.run} ({run.label})" for run in runs[-ENDED_SHOWN:])
        if not found:
            what = f"no run {name} {going_on}" if name else f"no run {going_on}"
            raise PoolError(f"{what} on this machine{f'; there are {known}' if known else ''}.")
        if len(found) > 1 and (name is not None or active):
            raise PoolError(f"several runs are meant: name one of {', '.join(run.run for run in found)}.")
        return found[-1]


def listing(session: Session) -> Listing:
    """Return all runs of this user on this machine, as far as they can be known. Raises `PoolError`."""
    going_on, notes = _going_on(session)
    saved = run_files.load_with_note()
    ended = {run.run: _ended(run) for run in saved.runs[-ENDED_SHOWN:] if run.run not in going_on}
    for run in detached.runs():
        if run.ended:  # its record is still there, also if the history has it
            known = ended.get(run.run)
            ended[run.run] = _listed(run, run.state or ENDED) if known is None else replace(known, detached=True)
    order = sorted(ended.values(), key=lambda run: run.began_at_s)
    active = sorted(going_on.values(), key=lambda run: (run.state != "running", run.began_at_s))
    return Listing(runs=(*order, *active), notes=tuple(filter(None, [*notes, saved.note, detached.damage()])))


def _going_on(session: Session) -> tuple[dict[str, MachineRun], list[str]]:
    found: dict[str, MachineRun] = {}
    notes = []
    kept = {run.run for run in detached.runs()}
    for server in _servers():
        try:
            status = session.pools.connections.reach_server(server).ask()
        except PoolError:
            notes.append(f"The runs of {server} are not listed: it does not answer, or is of another version.")
            continue
        for group in status.groups:
            if group.run and len(group.workers) > (found[group.run].ranks if group.run in found else 0):
                began_at_s = group.began_at_s
                found[group.run] = MachineRun(
                    run=group.run,
                    label=group.label,
                    state="running",
                    holder=group.holder,
                    ranks=len(group.workers),
                    detached=group.run in kept,
                    began_at_s=began_at_s,
                    elapsed_s=round(time.time() - began_at_s, 3) if began_at_s else 0.0,
                    server=server,
                )
    for run in detached.runs():
        if not run.ended and run.run not in found:  # its kernel has gone
            found[run.run] = _listed(run, "running", run.server)
    for waiting in queue_list.listed(paths.runtime_directory()):
        found.setdefault(waiting.run, _queued(waiting))
    return found, notes


def _servers() -> Iterator[str]:
    """Yield the names of the sockets of this user's agents and coordinators."""
    for path in sorted(paths.runtime_directory().glob("*.sock")):
        with suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                yield path.stem


def _listed(run: ListedRun, state: str, server: str = "") -> MachineRun:
    return MachineRun(
        run=run.run,
        label=run.label,
        state=state,
        holder=run.holder,
        ranks=0,
        detached=True,
        began_at_s=run.began_at_s,
        elapsed_s=round(time.time() - run.began_at_s, 3) if server else 0.0,
        server=server,
    )


def _queued(run: QueuedRun) -> MachineRun:
    return MachineRun(
        run=run.run,
        label=run.label,
        state="queued" if run.place else "starting",
        holder=run.holder,
        ranks=run.ranks,
        detached=False,
        began_at_s=run.queued_at_s,
        elapsed_s=round(time.time() - run.queued_at_s, 3),
        place=run.place,
    )


def _ended(run: SavedRun) -> MachineRun:
    return MachineRun(
        run=run.run,
        label=run.label,
        state=run.state,
        holder=run.notebook.rpartition("/")[2],
        ranks=int(run.facts.get("world_size", "") or 0),
        detached=False,
        began_at_s=run.began_at_s,
        elapsed_s=round(run.elapsed_s, 3),
    )


def state_after(run: MachineRun, session: Session) -> str:
    """Return the way in which a run that has just ended did so; `ended` if nothing has saved it."""
    until_s = time.monotonic() + SAVED_S
    while True:
        with suppress(PoolError):
            state = listing(session).find(run.run).state
            if state not in (ENDED, *_GOING_ON):
                return state
        if time.monotonic() > until_s:
            return ENDED
        time.sleep(ASK_EVERY_S)


def goes_on(run: MachineRun, session: Session) -> bool:
    """Return whether a run that went on still does."""
    return run.run in _going_on(session)[0]


def stop(run: MachineRun, session: Session, *, force: bool = False) -> bool:
    """Stop a run, or kill its ranks. Return whether it has ended. Raises `PoolError`, also for a run that has no ranks
    yet."""
    if run.state != "running":
        raise PoolError(
            f"run {run.run} ({run.label}) is {run.state} in {run.holder}, and has no ranks to stop: there, "
            "`run.cancel()` takes it from the queue."
        )
    session.pools.connections.reach_server(run.server).node.send(m.Stop(run=run.run, force=force))
    until_s = time.monotonic() + STOP_S
    while goes_on(run, session):
        if time.monotonic() > until_s:
            return False
        time.sleep(ASK_EVERY_S)
    return True
