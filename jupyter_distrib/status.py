"""`%distributed_status` and `%distributed_pool list`: what is going on, as a value that shows itself as text and as
HTML. Kernel side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from jupyter_distrib.events import WorkerInfo
from jupyter_distrib.session import Session
from jupyter_distrib.words import duration, size

_RANKS = ("rank", "state", "device", "pid", "memory", "pool")
_RUNS = ("run", "cell", "state", "time", "ranks")
_POOLS = ("pool", "in use", "ranks", "keeps")
Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Pools, ranks and runs at one moment."""

    pool: str
    strategy: str
    ranks: tuple[dict[str, Any], ...]
    """For each rank: `rank`, `state`, `device`, `pid`, `rss_bytes`, `pool`."""
    gpus: tuple[dict[str, Any], ...]
    """For each GPU of the node: `index`, `name`, `memory_bytes`, `used_bytes`, `holder`."""
    kept: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]
    """The last runs, oldest first: `run`, `cell`, `state`, `elapsed_s`, `ranks`."""
    others: tuple[dict[str, Any], ...]
    """Crews of other notebooks on this node: `holder`, `ranks`, `running`, `kept`."""
    agent: str

    @classmethod
    def of(cls, session: Session) -> Status:
        """Ask every pool that was used. Raises `PoolError` if one does not answer."""
        answer = session.connect("local").ask()
        mine = [crew for crew in answer["crews"] if crew["session"] == session.name]
        return cls(
            pool=session.pool,
            strategy=session.strategy,
            ranks=tuple(_rank(info, "local") for crew in mine for info in crew["workers"]),
            gpus=tuple(answer["gpus"]),
            kept=tuple(repr(handle) for crew in session.crews() for handle in crew.kept),
            runs=tuple(
                {
                    "run": run.id,
                    "cell": run.record.label,
                    "state": _state(run),
                    "elapsed_s": run.elapsed_s,
                    "ranks": len(run.record.ranks),
                }
                for run in session.history
            ),
            others=tuple(
                {
                    "holder": crew["holder"],
                    "ranks": len(crew["workers"]),
                    "running": crew["label"],
                    "kept": tuple(key.partition("/")[2] for key in crew["kept"]),
                }
                for crew in answer["crews"]
                if crew["session"] != session.name
            ),
            agent=f"agent {answer['pid']}, up {duration(answer['up_s'])}, template {answer['template']}",
        )

    def _tables(self) -> list[Table]:
        ranks = [
            (str(r["rank"]), r["state"], r["device"], str(r["pid"]), size(r["rss_bytes"]), r["pool"])
            for r in self.ranks
        ]
        runs = [
            (r["run"], r["cell"], r["state"], duration(r["elapsed_s"]), str(r["ranks"])) for r in reversed(self.runs)
        ]
        gpus = [
            (str(g["index"]), g["name"], f"{size(g['used_bytes'])} of {size(g['memory_bytes'])}", g["holder"] or "free")
            for g in self.gpus
        ]
        others = [(o["holder"], str(o["ranks"]), o["running"] or "idle", ", ".join(o["kept"])) for o in self.others]
        return [
            (_RANKS, ranks),
            (("GPU", "name", "memory", "held by"), gpus),
            (("other notebook", "ranks", "runs", "keeps"), others),
            (_RUNS, runs),
        ]

    def _head(self) -> list[str]:
        head = [f"pool {self.pool}, strategy {self.strategy}; {self.agent}"]
        if not self.ranks:
            head.append("No ranks are up; the next %%distributed cell starts them.")
        return [*head, *self.kept]

    def __repr__(self) -> str:
        return "\n\n".join(["\n".join(self._head()), *(_text(table) for table in self._tables() if table[1])])

    def _repr_html_(self) -> str:
        head = "".join(f"<div>{escape(line)}</div>" for line in self._head())
        return head + "".join(_html(table) for table in self._tables() if table[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """The pools a cell can name, and what this notebook has of each."""

    rows: tuple[tuple[str, str, str, str], ...]

    @classmethod
    def of(cls, session: Session) -> PoolTable:
        from jupyter_distrib.strategies import POOLS

        rows = []
        for name in POOLS:
            crews = [crew for crew in session.crews() if crew.connection.pool == name]
            ranks = ", ".join(f"{crew.size} {'GPU' if crew.gpus else 'CPU'}" for crew in crews if crew.size)
            kept = ", ".join(handle.name for crew in crews for handle in crew.kept)
            rows.append((name, "yes" if name == session.pool else "", ranks or "none up", kept))
        return cls(rows=tuple(rows))

    def __repr__(self) -> str:
        return _text((_POOLS, list(self.rows)))

    def _repr_html_(self) -> str:
        return _html((_POOLS, list(self.rows)))


def _rank(info: WorkerInfo, pool: str) -> dict[str, Any]:
    return {
        "rank": info.rank,
        "state": info.state,
        "device": info.device_name or info.device,
        "pid": info.pid,
        "rss_bytes": info.rss_bytes,
        "pool": pool,
    }


def _state(run: Any) -> str:
    if not run.done():
        return "running"
    states = {rank.state for rank in run.record.ranks.values()}
    return next((state for state in ("lost", "failed", "interrupted") if state in states), "done")


def _text(table: Table) -> str:
    head, rows = table
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _html(table: Table) -> str:
    head, rows = table
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
