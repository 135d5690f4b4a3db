"""The shell's command `jupyter distrib`. `run` does what `%distributed_run` does, without
a notebook; `status`, `logs`, `stop` and `attach` are in `shell_runs.py`. docs/command-line.md has the exit statuses.

The agent and its forkserver stay for a while, so the ranks of the next script start at once.
"""

from __future__ import annotations

import importlib
import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.notebook import script, shell_runs
from jupyter_distrib.kernel.record.terminal_stream import for_terminal, without_codes
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.help import help_text
from jupyter_distrib.system import interrupts

USAGE = "usage: jupyter distrib run [OPTION]... SCRIPT|-m MODULE|RUN.toml [ARGUMENT]..."
OTHERS = "".join(f"\n       {usage}" for usage in shell_runs.USAGE.values())
DOES_NOT_FIT, WRONG_USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
HELP = {"--help", "-h"}
PACKAGE = str(Path(__file__).parents[2])


def main(words: Sequence[str] | None = None) -> None:
    """Run the command, and exit with its status."""
    sys.exit(status_of(sys.argv[1:] if words is None else list(words)))


def status_of(words: list[str]) -> int:
    """Run the command. Return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it: logs may hold any characters
    name = next(iter(words), "")
    if name not in ("run", *shell_runs.USAGE, *HELP):
        print(USAGE + OTHERS, file=sys.stderr)
        return WRONG_USAGE
    try:
        if HELP.intersection((name, *words[1:2])):
            print(_help(name), flush=True)
            return 0
        return _run(words[1:]) if name == "run" else shell_runs.command(name, words[1:], session.current())
    except (OptionsError, PoolError) as error:
        print(f"jupyter distrib: {error}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt as error:
        print(f"jupyter distrib: {error}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except BaseException as error:  # noqa: BLE001 - the script's own
        _print(error)
        return _status(error)
    finally:
        session.close()


def _run(words: list[str]) -> int:
    """Run a script, a module or a declared run, and print why it has not been saved, if it has not. Return its exit
    status: 0, or that of a dry run. Raises what the script raises."""
    try:
        return _run_named(words)
    finally:
        history = session.current().history_writer
        history.flush()
        if sentence := history.unreported():
            print(f"jupyter distrib: {sentence}", file=sys.stderr)


def _run_named(words: list[str]) -> int:
    options, (path, *arguments) = session.current().settings.command(words)
    if path.endswith(".toml"):
        from jupyter_distrib.kernel.notebook import declared_run

        done = declared_run.run(path, arguments, options)
    else:
        given = shlex.join(words[: len(words) - len(arguments) - 1])
        done = script.run(path, arguments, options, command="jupyter distrib run", given=given)
    if isinstance(done, Run):
        _leave(done)
    elif done is not None:
        print(done)
        return 0 if done.fits else DOES_NOT_FIT
    return 0


def _leave(run: Run) -> None:
    """Wait until a detached run has its ranks, since this process must start them, and print how to attach to it."""
    while run.state in ("queued", "starting"):
        run.wait_ended(interrupts.HEAR_S)
    if run.refusal is not None:
        raise run.refusal
    print(f"run {run.id} goes on: `jupyter distrib attach {run.id}` shows it.")


def _help(name: str) -> str:
    if name in shell_runs.USAGE:
        options = "".join(f"\n  {option.flag:<12}{option.meaning}" for option in shell_runs.OPTIONS[name])
        return f"usage: {shell_runs.USAGE[name]}\n{options}"
    return f"{USAGE}{'' if name == 'run' else OTHERS}\n{_options_help()}"


def _options_help() -> str:
    return help_text(strategies=STRATEGIES, pools=POOLS).partition("\n")[2]


def _print(error: BaseException) -> None:
    """Print an exception as a notebook shows it: the script's frames only."""
    render = getattr(error, "_render_traceback_", None)
    if render is None and "_render_traceback_" in vars(error):
        render = vars(error)["_render_traceback_"]
    lines = render() if callable(render) else traceback.format_exception(None, error, _outside(error.__traceback__))
    text = "\n".join(line.rstrip("\n") for line in lines)
    print(for_terminal(text, sys.stderr) if sys.stderr.isatty() else without_codes(text), file=sys.stderr)


def _outside(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame outside this package and the import system; the whole of it if there is
    none."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(
        (PACKAGE, "<frozen ", importlib.__path__[0])
    ):
        rest = rest.tb_next
    return rest or frames


def _status(error: BaseException) -> int:
    """Return the status of a script that failed: its own status, 128 plus the signal's number if a signal killed it,
    else 1."""
    failures, rank = getattr(error, "failures", None), getattr(error, "rank", None)
    failure = failures.get(rank) if isinstance(failures, dict) and isinstance(rank, int) else None
    if (code := getattr(failure, "code", None)) is not None:
        return int(code)
    if (code := getattr(failure, "exit_code", None)) is not None:
        return 128 - int(code) if int(code) < 0 else int(code) or 1
    return 1
