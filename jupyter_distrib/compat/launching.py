"""The launch of a function or a script on ranks, and its failure in the form that launchers of processes have.

Kernel side, in the thread that calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jupyter_distrib.errors import DistributedError, RankLost, RemoteError, RunTimeout
from jupyter_distrib.kernel.notebook.decorator import distributed
from jupyter_distrib.kernel.record import failures
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.results import Results
from jupyter_distrib.kernel.session.run import Run

LAST_LINES = 100
"""The number of lines of output that the error of a failed launch has."""


def launch(
    name: str, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], **options: Any
) -> Results:
    """Run a function on every rank of a pool, and return the value of each.

    Raises:
        RuntimeError: It failed on a rank: exit code and last lines, with the rank's own exception as the cause.
        DistributedError: Nothing was started.
    """
    launched = distributed(**options)(function)
    before = session.current().history[-1:]
    try:
        return launched.distributed(*args, **dict(keywords))
    except Exception as error:
        failed = session.current().history[-1:]
        if failed == before or _is_ours(error):
            raise
        cause = error
    raise failure(name, failed[0], cause) from cause


def failure(name: str, run: Run, cause: BaseException) -> RuntimeError:
    """Return the error of a launch that failed, as launchers of processes give it."""
    number = failures.cause(run.record)
    lines = [
        f"[rank {line.rank}] {line.text}" if not line.skipped else f"... {line.skipped} lines ..."
        for line in run.record.lines_since()
    ]
    place = "" if number is None else f"rank {number} ended with exit code {_exit_code(run, number)}; "
    text = f"{name} failed: {place}{type(cause).__name__}: {cause}"
    rank = None if number is None else run.record.ranks[number]
    notes = rank.failure.notes if rank is not None and rank.failure is not None else ()
    shown = lines[-LAST_LINES:]
    output = [f"The last {len(shown)} lines of output:", *shown] if shown else []
    return RuntimeError("\n".join([text, *notes, *output]))


def _is_ours(error: Exception) -> bool:
    """Return whether an error says that nothing ran, and not that a rank failed."""
    return isinstance(error, DistributedError) and not isinstance(error, RankLost | RemoteError | RunTimeout)


def _exit_code(run: Run, number: int) -> int:
    rank = run.record.ranks[number]
    if rank.failure is not None:
        return rank.failure.code or 1
    return 1 if rank.exit is None or rank.exit.exit_code is None else rank.exit.exit_code


def pool_of(*, local: bool) -> dict[str, object]:
    """Return the option for the pool: this machine, or the pool named `remote`, else the one in use."""
    if local:
        return {"remote": False}
    return {"remote": True} if session.current().settings.remote_pool() is not None else {}


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise `ValueError` for an argument that is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} has to be a whole number of {least} or more; got {value!r}")


def check_script(name: str, path: object, keywords: Mapping[str, Any]) -> str:
    """Return the absolute path of a script.

    Raises:
        ValueError: There are keyword arguments, which a script cannot take.
        FileNotFoundError: There is no such file.
    """
    if keywords:
        texts = ", ".join(repr(f"--{key}={value}") for key, value in keywords.items())
        raise ValueError(f"{name}.run() takes keyword arguments for a function only; give the script texts: {texts}")
    if not os.path.isfile(found := os.path.abspath(str(path))):
        raise FileNotFoundError(f"{name}.run() wants a function or the path of a script; there is no file {found}")
    return found


def gpu_count() -> int:
    """Return the number of GPUs that this machine can use."""
    status = session.current().pools.connect("local").ask()
    return 0 if status.gpu_problem else len(status.gpus)
