"""The doctor's lines on where kernel, agent and ranks are: container, job and control group, with their limits. Kernel
side."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.session.pools.connection import Connection, WorkerGroup
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.system.confinement_report import ConfinementReport
from jupyter_distrib.system.formatting import rank_list

ASK = "from jupyter_distrib.system import confinement_report\nconfinement_report.told()"
"""The source with which ranks of other machines tell where they are."""
AGENT = -1
"""The agent, in a list of ranks."""
Line = tuple[str, str]
"""A text, and the recommended action; empty if all is well."""


def of_kernel() -> str:
    """Return the line on this process."""
    return f"kernel {os.getpid()}: {ConfinementReport.of()}"


def of_pools(session: Session) -> Iterator[Line]:
    """Yield the lines on the processes that serve this notebook, and on its ranks."""
    for connection in session.pools.connections:
        groups = list(connection.groups.values())
        processes = [(AGENT, connection.pid)]
        if not connection.facts.remote:
            processes += [(worker.rank, worker.pid) for group in groups for worker in group.workers]
        yield from _compared(connection.facts.pool, processes)
        for group in groups if connection.facts.remote else ():
            yield from _asked(session, connection, group)


def _compared(pool: str, processes: Iterable[tuple[int, int]]) -> Iterator[Line]:
    """Yield a line for each place that processes of this machine are in, given as rank and pid."""
    own = ConfinementReport.of()
    places: dict[tuple[str, ...], list[int]] = {}
    for rank, pid in processes:
        with suppress(OSError):  # it has just ended, or is about to start
            report = ConfinementReport.of(pid)
            places.setdefault((str(report), *own.differences(report)), []).append(rank)
    for (text, *differences), ranks in places.items():
        told = text if differences or text != str(own) else "as the kernel"
        yield f"{_names(ranks)} of {pool}: {told}", _advice(differences) if differences else ""


def _names(ranks: Sequence[int]) -> str:
    named = sorted(set(ranks) - {AGENT})
    return " and ".join([*["agent"] * (AGENT in ranks), *[rank_list(named)] * bool(named)])


def _advice(differences: Sequence[str]) -> str:
    return (
        f"they do not share the kernel's {', '.join(differences)}, so other limits hold for them, or they end with "
        "another job. Restart the kernel in the container, job or control group in which its ranks must be"
    )


def _asked(session: Session, connection: Connection, group: WorkerGroup) -> Iterator[Line]:
    """Yield what ranks of a pool of several machines tell, where they are idle."""
    if group.busy:
        yield f"of the ranks of {connection.facts.pool} is not known: they are busy", ""
        return
    try:
        results = session.queries.ask_ranks(group, ASK, "the place of the ranks")
    except DistributedError as error:
        yield f"of the ranks of {connection.facts.pool} is not known", str(error)
        return
    places: dict[str, list[int]] = {}
    for rank, told in results.items() if results is not None else ():
        places.setdefault(str(told), []).append(rank)
    for told, ranks in places.items():
        yield f"{rank_list(ranks)} of {connection.facts.pool}: {told}", ""
