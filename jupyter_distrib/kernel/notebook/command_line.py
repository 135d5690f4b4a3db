"""The shell's command `jupyter distrib run [OPTION]... train.py [ARGUMENT]...`: what `%distributed_run` does, without a
notebook. Its exit status is the script's.

The agent and its forkserver stay for a while, so the ranks of the next script start at once.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.notebook import script
from jupyter_distrib.kernel.record.terminal_stream import without_codes
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.help import help_text

USAGE = "usage: jupyter distrib run [OPTION]... SCRIPT|-m MODULE [ARGUMENT]..."
WRONG_USAGE, INTERRUPTED = 2, 130


def main(words: Sequence[str] | None = None) -> None:
    """Run the command, and exit with its status."""
    sys.exit(status_of(sys.argv[1:] if words is None else list(words)))


def status_of(words: list[str]) -> int:
    """Run the command. Return its exit status."""
    if not words or words[0] != "run" or "--help" in words[:2] or "-h" in words[:2]:
        known = bool(words) and words[0] in ("run", "--help", "-h")
        print(USAGE, _options_help() if known else "", sep="\n", file=sys.stdout if known else sys.stderr)
        return 0 if known else WRONG_USAGE
    try:
        options, (path, *arguments) = session.current().settings.command(words[1:])
        if options.detach:
            raise OptionsError("--detach needs a notebook, which can attach the run: leave it out")
        given = shlex.join(words[1 : len(words) - len(arguments) - 1])
        script.run(path, arguments, options, command="jupyter distrib run", given=given)
    except (OptionsError, PoolError) as error:
        print(f"jupyter distrib: {error}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt as error:
        print(f"jupyter distrib: {error}", file=sys.stderr)
        return INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - the script's own
        _print(error)
        return _status(error)
    finally:
        session.close()
    return 0


def _options_help() -> str:
    return help_text(strategies=STRATEGIES, pools=POOLS).partition("\n")[2]


def _print(error: BaseException) -> None:
    """Print an exception as a notebook shows it: the script's frames only."""
    render = getattr(error, "_render_traceback_", None)
    if render is None and "_render_traceback_" in vars(error):
        render = vars(error)["_render_traceback_"]
    lines = render() if callable(render) else traceback.format_exception(error)
    text = "\n".join(line.rstrip("\n") for line in lines)
    print(text if sys.stderr.isatty() else without_codes(text), file=sys.stderr)


def _status(error: BaseException) -> int:
    """Return the status of a script that failed: its own, 128 and the signal's number if one killed it, else 1."""
    failure = getattr(error, "failures", {}).get(getattr(error, "rank", None))
    if (code := getattr(failure, "code", None)) is not None:
        return int(code)
    if (code := getattr(failure, "exit_code", None)) is not None:
        return 128 - int(code) if int(code) < 0 else int(code) or 1
    return 1
