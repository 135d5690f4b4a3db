"""The stand-in for `horovod`: `horovod.run` over our pools. Kernel side; `horovod/torch.py` is what ranks import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyter_distrib.compat import launching, on_ranks
from jupyter_distrib.kernel.session import session

__all__ = ["run"]

_RESETS = 100
"""Number of restarts of an elastic run that specifies none."""


def run(  # noqa: PLR0917 - Horovod's own signature
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: Any = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function on `num_proc` ranks (`np` is the same) and return the value of each, by rank.

    `output_filename` is a folder, in which each rank's output is written: `rank.0/stdout`, `rank.0/stderr`. With
    `min_num_proc` or `reset_limit` the run is elastic: it is restarted when a rank is lost, and continues with as few
    as `min_num_proc`. Arguments for Horovod's own launcher are ignored; hosts are refused.

    Raises:
        ValueError: Arguments exclude each other, or have no counterpart.
        RuntimeError: It failed on a rank; the rank's own exception is the cause.
    """
    _check({name: value for name, value in locals().items() if value is not None})
    count = np or num_proc
    options = _options(count, min_np or min_num_proc, reset_limit)
    given = func, tuple(args), dict(kwargs or {})
    try:
        return launching.launch("horovod.run", on_ranks.with_variables, given, {}, subject=func, **options).values()
    finally:
        if output_filename is not None:
            _write_output(Path(output_filename), count)


def _check(given: Mapping[str, Any]) -> None:
    for one, other in (("hosts", "hostfile"), ("use_gloo", "use_mpi")):
        if given.get(one) and given.get(other):
            raise ValueError(f"{one} and {other} exclude each other: leave both out, the pool says where ranks are")
    if host := given.keys() & {"hosts", "hostfile"}:
        raise ValueError(f"{min(host)} has no counterpart: choose a pool on these machines, %distributed_pool use NAME")
    if "host_discovery_script" in given:
        raise ValueError("host_discovery_script has no counterpart: the pool finds hosts, leave it out")
    most = given.get("max_np") or given.get("max_num_proc")
    if most is not None and most != (given.get("np") or given["num_proc"]):
        raise ValueError("max_num_proc has no counterpart: no ranks are added while it runs, give num_proc alone")


def _options(count: int, least: int | None, reset_limit: int | None) -> dict[str, Any]:
    launching.check_whole("num_proc", count)
    options: dict[str, Any] = {**launching.pool_of(local=False), "gpus": count}
    if least or reset_limit:
        options |= {"max_restarts": reset_limit or _RESETS, "min_ranks": least}
    return options


def _write_output(folder: Path, count: int) -> None:
    """Write the output of the last run into a folder for each rank."""
    record = session.current().history[-1].record
    digits = len(str(count - 1))
    for rank in record.ranks:
        own = folder / f"rank.{rank:0{digits}}"
        own.mkdir(parents=True, exist_ok=True)
        for stream in ("stdout", "stderr"):
            lines = [line.text for line in record.lines_since() if (line.rank, line.stream) == (rank, stream)]
            (own / stream).write_text("".join(f"{text}\n" for text in lines), "utf-8")
