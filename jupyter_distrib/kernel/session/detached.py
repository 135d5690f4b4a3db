"""The user's detached runs on this machine, in whatever pool, and the choice of one. Kernel side."""

from __future__ import annotations

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.system import confinement_report, paths, run_list
from jupyter_distrib.system.run_list import ListedRun
from jupyter_distrib.wire import messages as m


def runs() -> list[ListedRun]:
    """Return all detached runs, oldest first. Raises `PoolError` if their folder cannot be used."""
    return run_list.listed(paths.runtime_directory())


def damage() -> str:
    """Return a sentence on unreadable entries of detached runs; empty if there are none. Raises `PoolError`."""
    damaged = run_list.scan(paths.runtime_directory())[1]
    if not damaged:
        return ""
    number, verb = ("one entry", "is") if len(damaged) == 1 else (f"{len(damaged)} entries", "are")
    return f"Of detached runs, {number} {verb} damaged and left out: {damaged[0]}"


def elsewhere(run: ListedRun) -> str:
    """Return the place of a run in another container, job or control group than this kernel's; else an empty text."""
    return run.where if run.where != confinement_report.where() else ""


def choose(name: str | None, identity: KernelIdentity) -> ListedRun | None:
    """Return the run with this name, or the newest one; None if there is none.

    Args:
        name: A run's id or number; None for the newest run of this notebook, else of any notebook.
        identity: This kernel.

    Raises:
        PoolError: Several runs have this number, or a process of another version holds the run.
    """
    listed, notebook = runs(), identity.notebook
    matching = [run for run in listed if name is None or run.run == name or run.run.endswith(f"-{name}")]
    own = [run for run in matching if notebook and run.notebook == notebook]
    if name is not None and len(matching) > 1 and len(own) != 1:
        raise PoolError(f"several detached runs end in {name}: name one of {', '.join(run.run for run in matching)}.")
    run = next(reversed(own or matching), None)
    if run is not None and run.protocol != m.PROTOCOL:
        raise PoolError(
            f"run {run.run} ({run.label} of {run.holder}) is held by another version of jupyter_distrib: "
            "attach to it in a kernel that has that version."
        )
    return run
