"""The magic `%%distributed` and the line magics: the whole course of a cell. Runs in the kernel's main thread.

    parse -> capture -> start -> show -> wait -> return

No other function knows the whole path.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, output_can_be_silenced

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.capture import inputs
from jupyter_distrib.kernel.capture.capture import Captured, Dropped, capture, explain_missing
from jupyter_distrib.kernel.notebook import comment_syntax
from jupyter_distrib.kernel.notebook.live_view import LiveView
from jupyter_distrib.kernel.record import failures
from jupyter_distrib.kernel.record.traceback_text import Rendering
from jupyter_distrib.kernel.session import handles as handles_module
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.presses import early_interrupt
from jupyter_distrib.kernel.session.program import Program
from jupyter_distrib.kernel.session.results import RankValue, Results
from jupyter_distrib.kernel.session.run import Run
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.settings import Settings
from jupyter_distrib.kernel.sidebar import cell_outputs
from jupyter_distrib.system import formatting, interrupts, stand_ins
from jupyter_distrib.worker.strategy import load as load_strategy

if TYPE_CHECKING:  # what few cells need is imported by those
    from jupyter_distrib.kernel.history.listing import Comparison, RunList
    from jupyter_distrib.kernel.notebook import sweep
    from jupyter_distrib.kernel.notebook.doctor import Report
    from jupyter_distrib.kernel.notebook.explain import Explanation
    from jupyter_distrib.kernel.notebook.status import PoolTable, Status
    from jupyter_distrib.kernel.session.rank_differences import Differences
    from jupyter_distrib.kernel.views.flame import FlameGraph


def _help() -> str:
    from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
    from jupyter_distrib.kernel.settings.help import help_text

    return help_text(strategies=STRATEGIES, pools=POOLS)


@magics_class
class DistributedMagics(Magics):
    """The magics of one shell."""

    shell: InteractiveShell

    @output_can_be_silenced
    @cell_magic
    def distributed(self, line: str, cell: str) -> Any:
        """Run the cell on every rank of a worker pool; `%%distributed?` shows the options."""
        try:
            return self._run(line, cell)
        except KeyboardInterrupt as interrupt:
            stopped = early_interrupt(interrupt)
        raise stopped

    distributed.getdoc = _help  # type: ignore[union-attr]  # IPython shows it for `%%distributed?`
    distrib: Any = cell_magic("distrib")(distributed)  # type: ignore[arg-type]  # IPython's takes a name or a function

    def _run(self, line: str, cell: str) -> Any:
        settings = session.current().settings
        options = settings.options(line)
        swept = _configurations(options, self.shell.user_ns) if options.sweep else []
        captured = self._capture(options, cell, swept[0] if swept else {})
        if options.explain:
            return self._explain(captured, options, settings)
        if swept:
            return self._sweep(captured, options, settings, swept)
        run = self._start(captured, options, settings)
        if options.detach:
            return self._detached(run, options)
        results = session.current().wait(run, LiveView(run), options)
        if options.out:
            self.shell.user_ns[options.out] = results or Results(dict.fromkeys(run.record.ranks))
        return results

    def _explain(self, captured: Captured, options: Options, settings: Settings) -> Explanation:
        strategy = settings.filled(options).strategy or "none"
        with interrupts.WholeImports():
            from jupyter_distrib.kernel.notebook.explain import Explanation

            effects = load_strategy(strategy).effects(options.strategy_options)
        return Explanation.of(captured, self.shell.user_ns, strategy=strategy, effects=effects)

    def _sweep(
        self, captured: Captured, options: Options, settings: Settings, swept: list[sweep.Configuration]
    ) -> sweep.SweepRuns:
        """Submit the cell once for each configuration, and wait for all of them unless the cell is detached."""
        from jupyter_distrib.kernel.notebook import runs_view, sweep

        runs: list[Run] = []
        try:
            for configuration in swept:
                given = replace(captured, inputs=sweep.inputs_with(captured, configuration))
                label = f"{captured.cell.filename}, {sweep.label_of(configuration)}"
                runs.append(self._start(given, options, settings, label=label, submitted=True))
            made = sweep.SweepRuns(swept, runs)
            if options.out:
                self.shell.user_ns[options.out] = made
            if options.detach:
                runs_view.show(runs)
                return made
            return made.wait(halt_on_failure=options.halt_on_failure)
        except BaseException:
            sweep.SweepRuns(swept, runs).cancel()
            raise

    def _capture(self, options: Options, cell: str, swept: sweep.Configuration) -> Captured:
        captured: Captured | SyntaxError
        dropped = session.current().dropped
        try:
            captured = capture(
                cell,
                {**self.shell.user_ns, **swept} if swept else self.shell.user_ns,
                filename=cell_label(self.shell),
                with_names=options.with_,
                dropped=dropped,
                transform=comment_syntax.body_transformer(self.shell),
            )
        except SyntaxError as error:
            captured = error
        if isinstance(captured, SyntaxError):
            raise _shown_alone(captured)
        if (missing := explain_missing(captured, dropped)) is not None:
            raise missing
        return captured

    def _start(
        self, captured: Captured, options: Options, settings: Settings, *, label: str = "", submitted: bool = False
    ) -> Run:
        current, notebook = session.current(), self.shell.user_ns
        if options.pool:
            current.choices.name(options.pool)
        with interrupts.WholeImports() if captured.inputs else nullcontext():
            packed_inputs = inputs.pack(captured.inputs, notebook, most_bytes=settings.max_capture(options))
        if (unknown := handles_module.explain_unknown(options.keep, captured, packed_inputs, notebook)) is not None:
            raise unknown
        source, sources = captured.cell.source, packed_inputs.sources()
        absent = inputs.absent(source, packed_inputs, notebook, current.dropped)
        absent = {**inputs.unseen(source, packed_inputs, notebook), **absent}
        detached = partial(current.submit, here=True) if options.detach else current.start
        begin = current.submit if submitted else detached
        run = begin(
            replace(captured.cell, absent=absent, sources=sources) if absent or sources else captured.cell,
            packed_inputs.packed,
            options,
            label=label or captured.cell.filename,
            cell_id=cell_outputs.cell_id(self.shell),
            handles=[value for value in packed_inputs.values.values() if isinstance(value, RankValue)],
            on_ended=self._taking_over(current, captured, options),
            settings=settings,
        )
        run.program = Program.of(captured.cell, captured.inputs, settings.filled(options))
        return run

    def _detached(self, run: Run, options: Options) -> Run:
        """Show the run from a thread of its own, so that the cell ends as soon as the ranks have it or it is queued."""
        try:
            run.start.wait()
        except KeyboardInterrupt:
            run.cancel()
            raise
        view = LiveView(run).open_now()

        def follow() -> None:
            try:
                run.wait(view)
            except BaseException:  # noqa: BLE001 - `result()` raises it
                return

        threading.Thread(target=follow, name=f"jupyter_distrib-{run.id}", daemon=True).start()
        if options.out:
            self.shell.user_ns[options.out] = run
        return run

    def _taking_over(self, current: session.Session, captured: Captured, options: Options) -> Callable[[Run], None]:
        """Return a function that binds handles to a run's kept values in the notebook and records the names not kept.

        It runs in the node's thread, so that no interrupt comes between, and before a thread that waits for the run
        goes on. A detached run does not overwrite names that the notebook has bound anew since it began.
        """
        notebook = self.shell.user_ns
        before = {name: notebook.get(name) for name in options.keep}

        def take_over(run: Run) -> None:
            handles_module.note_missing(run, options.keep)
            handles = current.handles(run, options.keep)
            for name, handle in handles.items():
                if not options.detach or notebook.get(name) is before[name]:
                    notebook[name] = handle
            for name in captured.defines:
                if name in notebook:
                    current.dropped.pop(name, None)
                else:
                    current.dropped[name] = Dropped(cell=captured.cell.filename, imported=name in captured.imports)

        return take_over

    @line_magic
    def distributed_run(self, line: str) -> Run | None:
        """Run a script on every rank: `%distributed_run [OPTION]... train.py [ARGUMENT]...`.

        The options are those of `%%distributed`. With `--detach`, returns the run at once.
        """
        from jupyter_distrib.kernel.notebook import script
        from jupyter_distrib.options import split_words

        try:
            options, (path, *arguments) = session.current().settings.command(split_words(line))
            return script.run(path, arguments, options)
        except KeyboardInterrupt as interrupt:
            stopped = early_interrupt(interrupt)
        raise stopped

    @line_magic
    def distributed_export(self, line: str) -> None:
        """Write what a cell ran as a script for torchrun: `%distributed_export NAME train.py`.

        NAME is a name of the notebook that holds a Results or a Run, or the id or number of a run.
        """
        from jupyter_distrib.kernel.notebook import export, line_magics

        request = line_magics.parse_export(line)
        export.check_path(request.path)
        value = self.shell.user_ns.get(request.name)
        name = value.run if isinstance(value, Results) else value.id if isinstance(value, Run) else request.name
        print(export.write(session.current().find_run(name), request.path, self.shell.user_ns))

    @line_magic
    def distributed_status(self, line: str) -> Status | Report | None:
        """Return a view of pools, ranks and runs, as text and HTML: `%distributed_status`.

        `%distributed_status --doctor`: versions, front end, pool, driver, and advice on what is missing.
        `%distributed_status --json`: one line of JSON for each run, with its state, values, errors and files.
        """
        from jupyter_distrib.kernel.notebook import line_magics
        from jupyter_distrib.kernel.notebook.doctor import Report
        from jupyter_distrib.kernel.notebook.status import Status

        request = line_magics.parse_status(line)
        if request.json:
            from jupyter_distrib.kernel.notebook import json_lines

            print("".join(json_lines.status_line(run) + "\n" for run in session.current().history), end="")
            return None
        if request.doctor:
            return Report.of(session.current(), self.shell)
        return Status.of(session.current())

    @line_magic
    def distributed_logs(self, line: str) -> None:
        """Print the whole output of a run: `%distributed_logs [RUN] [--rank R]`; without RUN that of the last run.

        `%distributed_logs --json` prints it as one line of JSON.
        """
        from jupyter_distrib.kernel.notebook import line_magics

        request = line_magics.parse_logs(line)
        run = session.current().find_run(request.run)
        if request.rank is not None and request.rank not in run.record.ranks:
            raise PoolError(
                f"run {run.id} has no rank {request.rank}: it was on {formatting.rank_list(run.record.ranks)}."
            )
        if request.json:
            from jupyter_distrib.kernel.notebook import json_lines

            print(json_lines.logs_line(run, request.rank))
            return
        print(run.logs(request.rank), end="")

    @line_magic
    def distributed_stack(self, line: str) -> None:
        """Print where each rank of a run is now in its Python code: `%distributed_stack [RUN]`; without RUN of the last
        run. Ranks at the same place are shown together."""
        from jupyter_distrib.kernel.notebook import line_magics
        from jupyter_distrib.kernel.views import stacks

        run = session.current().find_run(line_magics.parse_stack(line).run)
        if run.done():
            raise PoolError(f"run {run.id} has ended: only ranks that execute a cell have a stack.")
        seen = run.stacks()
        if not seen and not run.done():
            raise PoolError(f"no rank of run {run.id} has answered; its ranks have not started the cell, perhaps.")
        print(stacks.as_text(seen) if seen else f"run {run.id} has just ended.")

    @line_magic
    def distributed_debug(self, line: str) -> None:
        """Debug the cell that has failed, in the rank that failed: `%distributed_debug [RANK]`; without RANK the rank
        that failed first.

        The prompt is pdb's: frames, variables and expressions are those of the rank, which keeps them until the next
        cell, or until `%distributed_debug --done`.
        """
        from jupyter_distrib.kernel.notebook import line_magics
        from jupyter_distrib.kernel.session import failure_examination

        request, current = line_magics.parse_debug(line), session.current()
        if request.done:
            failure_examination.drop(current.runs, current.pools)
        else:
            failure_examination.examine(current.runs, current.pools, request.rank)

    @line_magic
    def distributed_diff(self, line: str) -> Differences:
        """Return how a kept value differs between ranks: `%distributed_diff model`."""
        from jupyter_distrib.kernel.notebook import diff_magic

        return diff_magic.answer(line, self.shell.user_ns)

    @line_magic
    def distributed_flame(self, line: str) -> FlameGraph:
        """Sample where ranks of a run that goes on are, for 5 s: `%distributed_flame [RANK]`."""
        from jupyter_distrib.kernel.notebook import flame_magic

        return flame_magic.answer(line)

    @line_magic
    def distributed_runs(self, line: str) -> RunList | Comparison:
        """Return saved runs, also those of earlier kernels: `%distributed_runs [WORD]...` with all of these words,
        `%distributed_runs 12` one of them, `%distributed_runs diff 12 15` two or more beside one another."""
        from jupyter_distrib.kernel.notebook import runs_magic

        return runs_magic.answer(line)

    @line_magic
    def distributed_attach(self, line: str) -> Run:
        """Show a detached run again, with its whole record: `%distributed_attach [RUN]`; without RUN the newest of this
        notebook, else of any notebook."""
        from jupyter_distrib.kernel.notebook import line_magics

        run = session.current().attach(line_magics.parse_attach(line).run)
        return self._detached(run, Options())

    @line_magic
    def distributed_compat(self, line: str) -> None:
        """Serve the import names of other platforms by our own parts: `%distributed_compat databricks|spark|horovod`.

        A package that is installed wins. docs/coming-from.md says what each platform has.
        """
        from jupyter_distrib.kernel.notebook import line_magics

        platforms = line_magics.parse_compat(line)
        stand_ins.enable(platforms)
        for each in platforms:
            real = stand_ins.real_packages(each)
            print(f"{each}: " + ", ".join(name for name in stand_ins.PLATFORMS[each] if name.split(".")[0] not in real))
            for name in real:
                print(f"{name} is installed, so it is used itself.")

    @line_magic
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
        `%distributed_pool trust NAME`          use the program or machine that a project's file names for it
        """
        from jupyter_distrib.kernel.notebook import pool_magic

        return pool_magic.change(line)


def _configurations(options: Options, notebook: dict[str, Any]) -> list[sweep.Configuration]:
    from jupyter_distrib.kernel.notebook import sweep

    return sweep.configurations(options.sweep, notebook)


def _shown_alone(error: SyntaxError) -> BaseException:
    """Return an exception to raise in place of a `SyntaxError`, which IPython would show with our frames."""
    place, *rest = "".join(traceback.format_exception_only(error)).splitlines()
    stand_in = failures.remote_error("SyntaxError", str(error))
    lines = (place.replace(f'File "{error.filename}"', str(error.filename)), *rest)
    stand_in.__dict__["_render_traceback_"] = Rendering(lines=lines)
    return stand_in


def cell_label(shell: InteractiveShell) -> str:
    """Return the name of the cell that is being executed in IPython's own tracebacks: `Cell In[5]`.

    The name comes from the running code, since IPython 9 has already raised its count while a cell runs, IPython 8 not.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (name := shell.compile.format_code_name(frame.f_code.co_filename)) is not None:
            return " ".join(name)
        frame = frame.f_back
    return "Cell"
