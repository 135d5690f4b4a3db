"""Which of the ranks that are up a cell can have. In the thread that runs the cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jupyter_distrib.connection import Connection, Crew
from jupyter_distrib.errors import CaptureError, PoolError
from jupyter_distrib.results import RankValue
from jupyter_distrib.words import duration, rank_list


def fits(crew: Crew, size: int, gpus: bool, load_env: dict[str, str], gpu_type: str | None) -> bool:
    if crew.state == "closed" or crew.load_env != load_env:
        return False
    if gpu_type and gpu_type.lower() != crew.gpu_type.lower():
        return False
    if crew.state == "opening":
        return crew.asked_gpus == gpus
    wanted = size or (crew.size if crew.gpus == gpus and gpus else 2)
    return crew.size == wanted and crew.gpus == gpus


def wait_or_refuse(crew: Crew, wait_s: float | None) -> None:
    """Another cell of this notebook has the ranks."""
    assert crew.run is not None
    if wait_s is None:
        raise busy(crew)
    print(f"Waiting up to {duration(wait_s)} for {crew.run.record.label}, which runs on these ranks.")
    if not crew.run.wait_ended(wait_s) or crew.state == "closed":
        raise busy(crew)


def of_handles(handles: Sequence[RankValue], connection: Connection, size: int, on: Iterable[int] | None) -> Crew:
    """The crew on which the kept values live that the cell reads."""
    first = handles[0]
    for handle in handles:
        if lost := handle.lost.intersection(handle.ranks if on is None else on):
            handle[min(lost)]  # raises the error that says so
        if handle.crew != first.crew:
            raise CaptureError(
                f"`{first.name}` and `{handle.name}` were kept on different ranks; one cell cannot read both."
            )
    crew = connection.crews.get(first.crew)
    if crew is None:
        raise CaptureError(
            f"`{first.name}` is not kept on the {connection.pool} pool: leave out --pool, or name its own."
        )
    if size not in (0, crew.size):
        raise CaptureError(
            f"`{first.name}` is kept on {crew.size} ranks: run this cell with --ranks {crew.size}, "
            "or --on some of them."
        )
    for handle in handles:
        if set(range(crew.size)).intersection(range(crew.size) if on is None else on) - set(handle.ranks):
            there = rank_list(handle.ranks)
            these = there.partition(" ")[2].replace(" ", "")
            raise CaptureError(f"`{handle.name}` was kept on {there} only: run this cell with --on {these}.")
    if crew.run is not None and not crew.run.done():
        raise busy(crew)
    return crew


def newest(connection: Connection) -> Crew:
    crews = [crew for crew in connection.crews.values() if crew.run is None or crew.run.done()]
    if not crews:
        raise PoolError("--on needs ranks that are up, and there are none: run a cell without --on first.")
    return crews[-1]


def busy(crew: Crew) -> PoolError:
    assert crew.run is not None
    return PoolError(
        f"{crew.run.record.label} is still running on these ranks (run {crew.run.id}): wait for it, or stop it first."
    )
