"""The line magics: scripts, status, logs, saved runs, pools and more. Runs in the kernel's main thread."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class

from jupyter_distrib.errors import PoolError
from jupyter_distrib.interfaces import stand_ins
from jupyter_distrib.kernel.notebook.live_view import show_detached
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs.interrupt_presses import early_interrupt
from jupyter_distrib.kernel.session.runs.run import Run

if TYPE_CHECKING:  # each magic imports what it needs
    from jupyter_distrib.kernel.history.listing import Comparison, RunList
    from jupyter_distrib.kernel.notebook.doctor import Report
    from jupyter_distrib.kernel.notebook.status import PoolTable, Status
    from jupyter_distrib.kernel.session.rank_differences import Differences
    from jupyter_distrib.kernel.views.flame import FlameGraph


HELP = (["--help"], ["-h"])
"""The words of a line that ask for help."""


def _line_magic(magic: Callable[[Any, str], Any]) -> Any:
    """Make a line magic of a method; `--help` as the first word prints its docstring."""

    @functools.wraps(magic)
    def answer(self: LineMagics, line: str) -> Any:
        if line.split()[:1] in HELP:
            return print(inspect.getdoc(magic))
        return magic(self, line)

    return line_magic(answer)


@magics_class
class LineMagics(Magics):
    """The line magics of one shell."""

    shell: InteractiveShell

    @_line_magic
    def distributed_run(self, line: str) -> Any:
        """Run a script on every rank: `%distributed_run [OPTION]... train.py [ARGUMENT]...`.

        The options are those of `%%distributed`. With `--detach`, returns the run at once; with
        `--dry-run`, the answer.
        """
        from jupyter_distrib.kernel.notebook import script
        from jupyter_distrib.options import split_words

        try:
            words = split_words(line)
            options, (path, *arguments) = session.current().settings.command(words)
            given = shlex.join(words[: len(words) - len(arguments) - 1])
            return script.run(path, arguments, options, given=given)
        except KeyboardInterrupt as interrupt:
            stopped = early_interrupt(interrupt)
        raise stopped

    @_line_magic
    def distributed_export(self, line: str) -> None:
        """Write what a cell ran as a script for torchrun: `%distributed_export NAME train.py`.

        NAME is a name of the notebook that holds a Results or a Run, or the id or number of a run.
        """
        from jupyter_distrib.kernel.notebook import export, magic_answers, magic_requests

        request = magic_requests.parse_export(line)
        export.check_path(request.path)
        run = magic_answers.run_named(request.name, self.shell.user_ns)
        print(export.write(run, request.path, self.shell.user_ns))

    @_line_magic
    def distributed_status(self, line: str) -> Status | Report | None:
        """Return a view of pools, ranks and runs, as text and HTML: `%distributed_status`.

        `%distributed_status --doctor`: versions, front end, pool, driver, and advice on what is missing.
        `%distributed_status --json`: one line of JSON for each run, with its state, values, errors and files.
        """
        from jupyter_distrib.kernel.notebook import magic_requests
        from jupyter_distrib.kernel.notebook.doctor import Report
        from jupyter_distrib.kernel.notebook.status import Status

        request = magic_requests.parse_status(line)
        if request.json:
            from jupyter_distrib.kernel.session import machines
            from jupyter_distrib.kernel.session.runs import json_lines

            lines = [json_lines.status_line(run) for run in session.current().history]
            lines += map(json_lines.line, machines.as_dicts(session.current()))
            print("".join(f"{line}\n" for line in lines), end="")
            return None
        if request.doctor:
            return Report.of(session.current(), self.shell)
        return Status.of(session.current())

    @_line_magic
    def distributed_logs(self, line: str) -> None:
        """Print the whole output of a run: `%distributed_logs [RUN] [--rank R]`; without RUN, of the last run.

        RUN is its id or number, or a name of the notebook that holds a Results or a Run.
        `%distributed_logs --json` prints it as one line of JSON.
        """
        from jupyter_distrib.kernel.notebook import magic_answers

        magic_answers.print_logs(line, self.shell.user_ns)

    @_line_magic
    def distributed_stack(self, line: str) -> None:
        """Print where each rank of a run is now in its Python code: `%distributed_stack [RUN]`; without RUN, of the
        last run. Ranks at the same place are shown together."""
        from jupyter_distrib.kernel.notebook import magic_answers, magic_requests
        from jupyter_distrib.kernel.views import stacks

        run = magic_answers.run_named(magic_requests.parse_stack(line), self.shell.user_ns)
        if run.done():
            raise PoolError(f"run {run.id} has ended: only ranks that execute a cell have a stack.")
        if run.state in ("queued", "starting"):
            raise PoolError(f"run {run.id} is {run.state}: only ranks that execute a cell have a stack.")
        seen = run.stacks()
        if not seen and not run.done():
            raise PoolError(f"no rank of run {run.id} has answered; perhaps they have not started the cell yet.")
        print(stacks.as_text(seen) if seen else f"run {run.id} has just ended.")

    @_line_magic
    def distributed_debug(self, line: str) -> None:
        """Debug the cell that has failed, in the rank that failed: `%distributed_debug [RANK]`; without RANK, the
        rank that failed first.

        The prompt is pdb's: frames, variables and expressions are those of the rank, which keeps them until the next
        cell, or until `%distributed_debug --done`.
        """
        from jupyter_distrib.kernel.notebook import magic_requests
        from jupyter_distrib.kernel.session import failure_examination

        request, current = magic_requests.parse_debug(line), session.current()
        if request.done:
            failure_examination.drop(current.runs, current.pools)
        else:
            failure_examination.examine(current.runs, current.pools, request.rank)

    @_line_magic
    def distributed_diff(self, line: str) -> Differences:
        """Return how a kept value differs between ranks: `%distributed_diff model`."""
        from jupyter_distrib.kernel.notebook import magic_answers

        return magic_answers.compare_ranks(line, self.shell.user_ns)

    @_line_magic
    def distributed_flame(self, line: str) -> FlameGraph:
        """Sample the stacks of ranks of a run in progress for 5 s: `%distributed_flame [RANK]`."""
        from jupyter_distrib.kernel.notebook import magic_answers

        return magic_answers.sample_stacks(line)

    @_line_magic
    def distributed_runs(self, line: str) -> RunList | Comparison:
        """Return saved runs, also those of earlier kernels: `%distributed_runs [WORD]...` with all of these words,
        `%distributed_runs 12` one of them, `%distributed_runs diff 12 15` two or more side by side."""
        from jupyter_distrib.kernel.notebook import magic_answers

        return magic_answers.find_runs(line)

    @_line_magic
    def distributed_tour(self, line: str) -> None:
        """Write a notebook of five cells that show what the magic does: `%distributed_tour`."""
        from jupyter_distrib.kernel.notebook import magic_requests, tour

        magic_requests.parse_tour(line)
        print(f"Open {tour.write(Path.cwd()).name}: it is in the folder of this notebook.")

    @_line_magic
    def distributed_attach(self, line: str) -> Run:
        """Show a detached run again, with its whole record: `%distributed_attach [RUN]`; without RUN, the newest of
        this notebook, else of any notebook."""
        from jupyter_distrib.kernel.notebook import magic_requests

        run = session.current().attach(magic_requests.parse_attach(line))
        show_detached(run)
        return run

    @_line_magic
    def distributed_compat(self, line: str) -> None:
        """Let our own modules serve the import names of other platforms: `%distributed_compat
        databricks|spark|horovod`.

        A package that is installed wins. docs/coming-from.md says what each platform has.
        """
        from jupyter_distrib.kernel.notebook import magic_requests

        platforms = magic_requests.parse_compat(line)
        stand_ins.enable(platforms)
        for each in platforms:
            real = stand_ins.real_packages(each)
            print(f"{each}: " + ", ".join(name for name in stand_ins.PLATFORMS[each] if name.split(".")[0] not in real))
            for name in real:
                print(f"{name} is installed, so it is used itself.")

    @_line_magic
    def distributed_pool(self, line: str) -> PoolTable:
        """Show the pools, or change one.

        `%distributed_pool`                     the pools, and the ranks that are up
        `%distributed_pool use NAME`            cells use this pool from now on
        `%distributed_pool add NAME --kind K`   a pool of this notebook, with the options of its kind
        `%distributed_pool remove NAME`         end its ranks and remove it
        `%distributed_pool start --gpus N`      start ranks before a cell asks for them; or `--ranks N`
        `%distributed_pool stop [NAME]`         end the ranks; the values that they keep are lost
        `%distributed_pool restart [NAME]`      replace the ranks by new processes
        `%distributed_pool resize N`            use N ranks from now on
        `%distributed_pool up [NAME]`           start the machines of a pool that has them on demand
        `%distributed_pool down [NAME]`         end its ranks, and these machines
        `%distributed_pool trust`               follow the settings file of this folder, which is not yours by itself
        """
        from jupyter_distrib.kernel.notebook import magic_answers

        return magic_answers.change_pools(line)
