"""The shell's commands on existing runs: `jupyter distrib status`, `logs`, `stop` and `attach`. They see all runs of
this user on this machine, in every notebook and script.

Text for a person, and with `--json` one line of JSON for each run or event, with the keys of docs/headless.md. Each
command returns its exit status.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.record.terminal_stream import for_terminal, without_codes
from jupyter_distrib.kernel.session import machine_runs
from jupyter_distrib.kernel.session.machine_runs import MachineRun
from jupyter_distrib.kernel.session.runs import json_lines
from jupyter_distrib.kernel.session.runs.following import LogTail
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.views.table import TextTable
from jupyter_distrib.options import Arguments, Option, parse_arguments, rank, switch
from jupyter_distrib.system import record_file
from jupyter_distrib.system.formatting import duration, rank_list

DONE, FAILED, NOT_KNOWN, INTERRUPTED = 0, 1, 3, 130
LOOK_EVERY_S = 0.2
ASK_EVERY_S = 0.5
_JSON = Option(flag="--json", meaning="one line of JSON for each run or event", read=switch)
_FOLLOW = Option(flag="--follow", meaning="go on until the run has ended, and exit with its status; or -f", read=switch)
_RANK = Option(flag="--rank", metavar="R", read=rank, meaning="what this rank wrote", default="all ranks")
_KILL = Option(flag="--kill", meaning="kill its ranks at once, without their exit handlers", read=switch)
USAGE = {
    "status": "jupyter distrib status [--json] [RUN]",
    "logs": "jupyter distrib logs [-f] [--rank R] [--json] [RUN]",
    "stop": "jupyter distrib stop [--kill] [RUN]",
    "attach": "jupyter distrib attach [--json] [RUN]",
}
OPTIONS = {"status": (_JSON,), "logs": (_FOLLOW, _RANK, _JSON), "stop": (_KILL,), "attach": (_JSON,)}


def command(name: str, words: Sequence[str], session: Session) -> int:
    """Execute one of the commands. Return its exit status.

    Raises:
        OptionsError, PoolError: There is no such option or run.
    """
    line = shlex.join("--follow" if word == "-f" else word for word in words)
    arguments = parse_arguments(line, OPTIONS[name])
    if len(arguments.positionals) > 1:
        raise OptionsError(f"{arguments.positionals[1]!r} is one word too many: usage: {USAGE[name]}")
    run = next(iter(arguments.positionals), None)
    commands: dict[str, Callable[[str | None, Arguments, Session], int]] = {
        "status": _status,
        "logs": _logs,
        "stop": _stop,
        "attach": _attach,
    }
    return commands[name](run, arguments, session)


def _status(name: str | None, arguments: Arguments, session: Session) -> int:
    listing = machine_runs.listing(session)
    runs = listing.runs if name is None else (listing.find(name),)
    if arguments.values.get("json"):
        _print(json_lines.line(run.as_values()) for run in runs)
        return DONE
    rows = [
        (run.run, run.label, run.holder, _began(run), str(run.ranks or ""), _state(run), duration(run.elapsed_s))
        for run in runs
    ]
    head = ("run", "what", "where", "began", "ranks", "state", "time")
    _print([TextTable(head=head, rows=rows).as_text() if rows else "no run is known on this machine.", *listing.notes])
    return DONE


def _began(run: MachineRun) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(run.began_at_s)) if run.began_at_s else ""


def _state(run: MachineRun) -> str:
    return f"{run.state}, place {run.place}" if run.place else run.state


def _logs(name: str | None, arguments: Arguments, session: Session) -> int:
    run = machine_runs.listing(session).find(name)
    only: int | None = arguments.values.get("rank")
    as_json = bool(arguments.values.get("json"))
    if arguments.values.get("follow"):
        return _followed(run, session, only, as_json=as_json)
    texts = {number: _text(run, number) for number in ([only] if only is not None else run.logged_ranks())}
    if as_json:
        logs = {str(number): without_codes(text) for number, text in texts.items()}
        _print([json_lines.line({"run": run.run, "state": run.state, "logs": logs})])
    elif not any(texts.values()):
        print(_why_nothing(run, only), file=sys.stderr)
    elif only is not None:
        print(for_terminal(texts[only], sys.stdout), end="")
    else:
        whole = "".join(f"--- rank {number}\n{text}" for number, text in texts.items())
        print(for_terminal(whole, sys.stdout), end="")
    return DONE


def _why_nothing(run: MachineRun, only: int | None) -> str:
    so_far = " so far" if run.active else ""
    if only is None:
        return f"run {run.run} ({run.label}) has printed nothing{so_far}."
    others = [number for number in run.logged_ranks() if number != only]
    there = f"; there is output of {rank_list(others)}" if others else ""
    return f"rank {only} of run {run.run} ({run.label}) has printed nothing{so_far}{there}."


def _text(run: MachineRun, number: int) -> str:
    path = run.log_file(number)
    try:
        with record_file.opened(path) as file:
            return file.read().decode("utf-8", "backslashreplace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise PoolError(f"the log {path} cannot be read: {error.strerror}.") from None


def _followed(run: MachineRun, session: Session, only: int | None, *, as_json: bool) -> int:
    """Print what a run writes until it has ended. Return its status."""
    if run.detached and run.server:
        attached = session.attach(run.run)
        if as_json:
            events = (each for each in attached.events() if only is None or each.get("rank", only) == only)
            _print(json_lines.line(event) for event in events)
        else:
            _print(for_terminal(line, sys.stdout) for line in attached.logs(only, follow=True))
        return _status_of(attached.state)
    if run.active and run.state != "running":
        print(f"run {run.run} ({run.label}) is {_state(run)}, in {run.holder}.", file=sys.stderr, flush=True)
    for number, text in _lines(run, session, only):
        event = {"run": run.run, "event": "output", "rank": number, "text": text}
        shown = text if only is not None else f"[{number}] {text}"
        _print([json_lines.line(event) if as_json else for_terminal(shown, sys.stdout)])
    state = machine_runs.state_after(run, session) if run.active else run.state
    if as_json:
        _print([json_lines.line({"run": run.run, "event": "ended", "label": run.label, "state": state})])
    return _status_of(state)


def _lines(run: MachineRun, session: Session, only: int | None) -> Iterator[tuple[int, str]]:
    """Yield each line of a run of another kernel, with its rank, until the run has ended."""
    tails: dict[int, LogTail] = {}
    active, asked_s = run.active, time.monotonic()
    while True:
        final = not active
        for number in [only] if only is not None else run.logged_ranks():
            tail = tails.setdefault(number, LogTail(lambda number=number: run.log_file(number)))  # type: ignore[misc]
            for line in tail.lines(final=final):
                yield number, line
        if final:
            return
        time.sleep(LOOK_EVERY_S)
        if time.monotonic() - asked_s > ASK_EVERY_S:
            active, asked_s = machine_runs.goes_on(run, session), time.monotonic()


def _stop(name: str | None, arguments: Arguments, session: Session) -> int:
    run = machine_runs.listing(session).find(name, active=True)
    if machine_runs.stop(run, session, force=bool(arguments.values.get("kill"))):
        print(f"run {run.run} ({run.label}) is stopped.")
        return DONE
    print(f"run {run.run} ({run.label}) has not stopped yet: jupyter distrib stop --kill {run.run} kills its ranks.")
    return FAILED


def _attach(name: str | None, arguments: Arguments, session: Session) -> int:
    from jupyter_distrib.kernel.notebook.live_view import LiveView

    run = machine_runs.listing(session).find(name)
    if run.active and run.state != "running":
        raise PoolError(f"run {run.run} ({run.label}) is {_state(run)}, in {run.holder}: it has no ranks yet.")
    if not run.detached:
        raise PoolError(
            f"run {run.run} ({run.label}) was not started with --detach, so it is shown where it was started: "
            f"`jupyter distrib logs -f {run.run}` follows its output."
        )
    attached = session.attach(run.run)
    if arguments.values.get("json"):
        _print(json_lines.line(event) for event in attached.events())
        return _status_of(attached.state)
    print(f"run {run.run} ({run.label} of {run.holder})")
    try:
        attached.show(LiveView(attached))
    except KeyboardInterrupt:
        print(
            f"run {run.run} goes on: `jupyter distrib attach {run.run}` shows it again, `... stop {run.run}` ends it."
        )
        return INTERRUPTED
    _conclude(attached)
    return DONE


def _conclude(run: Run) -> None:
    """Print the values of the ranks, or raise the exception of the first rank that failed."""
    if (results := run.result()) is not None:
        print(results)


def _status_of(state: str) -> int:
    return {"done": DONE, "interrupted": INTERRUPTED, machine_runs.ENDED: NOT_KNOWN}.get(state, FAILED)


def _print(lines: Iterator[str] | Sequence[Any]) -> None:
    for line in lines:
        print(line, flush=True)
