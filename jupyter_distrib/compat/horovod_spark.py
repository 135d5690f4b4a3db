"""The stand-in for `horovod.spark`: `run` and `run_elastic` on a pool of kind `spark`. Kernel side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jupyter_distrib.compat import launching, on_ranks
from jupyter_distrib.kernel.session import session

__all__ = ["run", "run_elastic"]

KIND = "spark"
_START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"
_DEFAULT_TIMEOUT_S = 600
_RESETS = 100


def run(  # noqa: PLR0917 - Horovod's own signature
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Run a function on `num_proc` ranks in the executors of a Spark cluster and return the value of each, by rank.

    Without `num_proc` there is one for each GPU of the executors, or for each core where they have none. Arguments for
    MPI and Horovod's own launcher are ignored.

    Raises:
        PoolError: There is no Spark, or it has no such ranks within `start_timeout` seconds.
        RuntimeError: It failed on a rank; the rank's own exception is the cause.
    """
    _check(use_mpi=use_mpi, use_gloo=use_gloo, stdout=stdout, stderr=stderr)
    return _launch((fn, tuple(args), dict(kwargs or {})), num_proc, start_timeout, env)


def run_elastic(  # noqa: PLR0917 - Horovod's own signature
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: int | None = None,
    elastic_timeout: int | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run a function as `run` does; it is restarted when a rank is lost, and continues with as few as `min_num_proc`.

    Raises:
        ValueError: `max_num_proc` is more than `num_proc`.
    """
    _check(stdout=stdout, stderr=stderr)
    least, most = min_np or min_num_proc, max_np or max_num_proc
    if most is not None and most != num_proc:
        raise ValueError("max_num_proc has no counterpart: no ranks are added while it runs, give num_proc alone")
    elastic = {"max_restarts": reset_limit or _RESETS, **({"min_ranks": least} if least else {})}
    return _launch((fn, tuple(args), dict(kwargs or {})), num_proc, start_timeout, env, **elastic)


def _check(**given: Any) -> None:
    if given.get("use_mpi") and given.get("use_gloo"):
        raise ValueError("use_gloo and use_mpi exclude each other: leave both out, the pool says where ranks are")
    for name in ("stdout", "stderr"):
        if given.get(name) is not None:
            raise ValueError(f"{name} has no counterpart: the output of ranks is in the cell and in %distributed_logs")


def _launch(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    num_proc: int | None,
    start_timeout: int | None,
    env: Mapping[str, str] | None,
    **options: Any,
) -> list[Any]:
    current = session.current()
    pool = current.settings.pool_of_kind(KIND)
    if num_proc is not None:
        launching.check_whole("num_proc", num_proc)
    room = current.pools.capacity(pool.name, pool.options)
    # GPUs are not asked for where there are none: an autoscaler could bring some, and the run would wait for it.
    size = {"gpus": num_proc or room.gpus} if room.gpus else {"ranks": num_proc or room.cpus}
    wait_s = start_timeout or int(os.environ.get(_START_TIMEOUT, _DEFAULT_TIMEOUT_S))
    options |= {"pool": pool.name, **size, "wait_s": float(wait_s), "env": dict(env or {})}
    return launching.launch("horovod.spark.run", on_ranks.with_variables, call, {}, subject=call[0], **options).values()
