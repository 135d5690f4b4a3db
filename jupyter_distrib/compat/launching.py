"""Launches a function or a script on ranks, and reports failures like a process launcher.

Kernel side, in the thread that calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jupyter_distrib.errors import DistributedError, RankLost, RemoteError, RunTimeout
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.analysis.traceback_text import Rendering
from jupyter_distrib.kernel.notebook.decorator import distributed
from jupyter_distrib.kernel.notebook.live_view import LiveView
from jupyter_distrib.kernel.notebook.script import run_script
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs.results import Results
from jupyter_distrib.kernel.session.runs.run import Run, View
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL
from jupyter_distrib.pools.base import capabilities_of

LAST_LINES = 100
"""Number of output lines in the error of a failed launch."""


def launch(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    view: Callable[[Run], View] = LiveView,
    *,
    names: Mapping[str, str] | None = None,
    subject: Callable[..., Any] | str | None = None,
    **options: Any,
) -> Results:
    """Run a function on every rank of a pool, and return the value of each. `names` are the caller's names for
    options, for advice; `subject` is the user's function, or the name of their script, that the function calls.

    Raises:
        RuntimeError: It failed on a rank: exit code and last lines, with the rank's own exception as the cause.
        DistributedError: Nothing was started.
    """
    launched = distributed(**options)(partial(function) if isinstance(function, type) else function)
    launched.names = dict(names or {})
    if isinstance(subject, str):
        launched.label = subject
    elif subject is not None:
        launched.subject = subject
    with _failing_as(name):
        run = launched.start(tuple(args), dict(keywords))
        results: Results = run.wait(view(run))
    return results


def launch_script(name: str, path: str, arguments: Sequence[Any], **options: Any) -> None:
    """Run a script on every rank of a pool. Raises the same as `launch`."""
    with _failing_as(name):
        run_script(path, *arguments, **options)


@contextmanager
def _failing_as(name: str) -> Iterator[None]:
    """Raise a launcher's error for a run that fails; errors that prevent its start are raised unchanged."""
    before = session.current().history[-1:]
    try:
        yield
    except Exception as error:
        last = session.current().history[-1:]
        if last == before or _is_ours(error):
            raise
        run, cause = last[0], error
    else:
        return
    raise failure(name, run, cause) from cause


def failure(name: str, run: Run, cause: BaseException) -> RuntimeError:
    """Return the error of a failed launch, like that of a process launcher."""
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
    error = RuntimeError("\n".join([text, *notes, *output]))
    if callable(rendering := getattr(cause, "_render_traceback_", None)):
        # A notebook shows the rank's own lines, which no frame of this process has; the output is shown there already.
        error.__dict__["_render_traceback_"] = Rendering(lines=(*rendering(), "", f"RuntimeError: {text}"))
    return error


def _is_ours(error: Exception) -> bool:
    """Return whether an error says that nothing ran, and not that a rank failed."""
    return isinstance(error, DistributedError) and not isinstance(error, RankLost | RemoteError | RunTimeout)


def _exit_code(run: Run, number: int) -> int:
    rank = run.record.ranks[number]
    if rank.failure is not None:
        return rank.failure.code or 1
    return 1 if rank.exit is None or rank.exit.exit_code is None else rank.exit.exit_code


def pool_of(*, local: bool) -> dict[str, Any]:
    """Return the option for the pool: this machine, or the pool named `remote`, else the one in use."""
    pool = DEFAULT_POOL if local else session.current().settings.remote_pool()
    return {} if pool is None else {"pool": pool}


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise `ValueError` for an argument that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of {least} or more; got {value!r}")


def check_script(name: str, path: object, keywords: Mapping[str, Any]) -> str:
    """Return the absolute path of a script.

    Raises:
        ValueError: There are keyword arguments, which a script cannot take.
        FileNotFoundError: There is no such file.
    """
    if keywords:
        texts = ", ".join(repr(f"--{key}={value}") for key, value in keywords.items())
        raise ValueError(f"{name}.run() takes keyword arguments for a function only; give the script strings: {texts}")
    if not os.path.isfile(found := os.path.abspath(str(path))):
        raise FileNotFoundError(f"{name}.run() takes a function or the path of a script; there is no file {found}")
    return found


def check_gpus(keyword: str, *, local: bool, otherwise: str = "") -> int | None:
    """Return the number of GPUs of this machine, if the pool of a launch is on it; None for another pool, which
    knows its own GPUs.

    Args:
        keyword: The caller's keyword for ranks with GPUs.
        local: Whether the launch is to run on this machine.
        otherwise: Advice on another pool.

    Raises:
        RuntimeError: This machine has no GPU.
    """
    pool = session.current().settings.pools[pool_of(local=local).get("pool") or session.current().settings.pool]
    if capabilities_of(pool.kind).remote:
        return None
    there = gpu_count(pool.name)
    if not there:
        raise RuntimeError(f"{keyword}=True needs GPUs, and this machine has none: give {keyword}=False{otherwise}.")
    return there


def gpu_count(pool: str = DEFAULT_POOL) -> int:
    """Return the number of GPUs that this machine can use for a pool on it."""
    status = session.current().pools.connect(pool).ask()
    return 0 if status.gpu_problem else len(status.gpus)


def names_for(launcher: str, number: str) -> dict[str, str]:
    """Return the caller's names for options of a launcher; `number` is its keyword for the number of ranks."""
    return {"gpus": number, "ranks": number, "backend_fallback": f"{launcher}.backend_fallback = True"}
