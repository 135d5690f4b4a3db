"""The magic `%%distributed`: everything that happens to a cell. Runs in the kernel's main thread.

    parse -> capture -> start -> show -> wait -> return

No other function knows the whole path.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, output_can_be_silenced

from jupyter_distrib.interfaces.strategy import load as load_strategy
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.analysis.traceback_text import Rendering
from jupyter_distrib.kernel.capture import inputs
from jupyter_distrib.kernel.capture.capture import Captured, Dropped, Input, capture, explain_missing
from jupyter_distrib.kernel.notebook import comment_syntax
from jupyter_distrib.kernel.notebook.live_view import LiveView, show_detached
from jupyter_distrib.kernel.session import handles as handles_module
from jupyter_distrib.kernel.session import kept_classes, session
from jupyter_distrib.kernel.session.cell_order import CellRequest
from jupyter_distrib.kernel.session.runs.interrupt_presses import early_interrupt
from jupyter_distrib.kernel.session.runs.program import Program
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.settings import CellOptions
from jupyter_distrib.kernel.sidebar import cell_outputs
from jupyter_distrib.options import split_words
from jupyter_distrib.system import interrupts, open_files

if TYPE_CHECKING:  # what few cells need is imported where they need it
    from jupyter_distrib.kernel.notebook import sweep
    from jupyter_distrib.kernel.notebook.dry_choice import Asked
    from jupyter_distrib.kernel.notebook.explain import Explanation


def _help() -> str:
    from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
    from jupyter_distrib.kernel.settings.help import help_text

    return help_text(strategies=STRATEGIES, pools=POOLS)


@magics_class
class CellMagics(Magics):
    """The cell magics of one shell."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._transform_body = comment_syntax.body_transformer(shell)

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

    @output_can_be_silenced
    @line_cell_magic
    def distributed_setup(self, line: str, cell: str | None = None) -> Any:
        """Run the cell in the notebook, and on every rank before its first cell, also on ranks that start later:
        `%%distributed_setup [NAME]`.

        `%distributed_setup --list` shows the set-ups of the notebook; after `%distributed_setup --undo NAME` new ranks
        do not run it.
        """
        from jupyter_distrib.kernel.notebook import setup_cell

        if "--help" in line.split():
            return print(inspect.getdoc(CellMagics.distributed_setup))
        current = session.current()
        if cell is None:
            return setup_cell.change(current, line)
        captured = self._capture(current, Options(), cell, {})
        return setup_cell.run(current, self.shell, line, captured)

    def _run(self, line: str, cell: str) -> Any:
        if "--help" in line and "--help" in split_words(line):
            return print(_help())
        current = session.current()
        options = current.settings.options(line)
        try:
            begun = self._begin(current, options, cell)
        except OSError as error:
            open_files.raise_if_full(error)
            raise
        return begun()

    def _begin(self, current: Session, options: CellOptions, cell: str) -> Callable[[], Any]:
        """Start the cell. Return a function that waits for its value.

        That function has no values of the notebook: IPython keeps the frames of an exception, which must keep none, nor
        handles to values on ranks.
        """
        given = options.given
        swept = _configurations(given, self.shell.user_ns) if given.sweep else []
        captured = self._capture(current, given, cell, swept[0] if swept else {})
        if given.explain:
            explanation = self._explain(current, captured, options)
            return lambda: explanation
        notes: list[str] = []
        if options.needs_dry_run:
            from jupyter_distrib.kernel.notebook import dry_choice

            decided = dry_choice.decided(self._asked(current, captured, options, swept))
            if not isinstance(decided, tuple):
                return lambda: decided
            options, notes = decided
        if swept:
            made = self._sweep(current, captured, options, swept)
            if given.detach:
                return lambda: made
            return partial(made.wait, halt_on_failure=given.halt_on_failure)
        run = self._start(current, captured, options, notes=notes)
        return partial(self._detached if given.detach else self._wait, current, run, options.filled)

    def _detached(self, current: Session, run: Run, options: Options) -> Run:
        show_detached(run)
        if options.out:
            self.shell.user_ns[options.out] = run
        return run

    def _wait(self, current: Session, run: Run, options: Options) -> Any:
        results = current.wait(run, LiveView(run), options)
        if options.out:
            self.shell.user_ns[options.out] = results or run.all_none()
        return results

    def _explain(self, current: Session, captured: Captured, options: CellOptions) -> Explanation:
        filled = options.filled
        strategy = filled.strategy or "none"
        with interrupts.WholeImports():
            from jupyter_distrib.kernel.notebook.explain import Explanation

            effects = load_strategy(strategy).effects(options.given.strategy_options)
        return Explanation.of(
            captured,
            self.shell.user_ns,
            strategy=strategy,
            effects=effects,
            unchanged_bytes=lambda packed: current.unchanged_bytes(packed, filled),
            reads_files=partial(current.reads_files, options),
        )

    def _asked(
        self,
        current: Session,
        captured: Captured,
        options: CellOptions,
        swept: list[sweep.Configuration],
    ) -> Asked:
        """Return the cell as a dry run needs it; for a sweep, with the first configuration."""
        from jupyter_distrib.kernel.notebook import sweep
        from jupyter_distrib.kernel.notebook.dry_choice import Asked, with_shapes

        if swept:
            captured = replace(captured, inputs=sweep.inputs_with(captured, swept[0]))
        captured = replace(captured, inputs=with_shapes(current, captured.inputs))
        packed_inputs = self._pack(current, captured, options)
        cell = inputs.explained(captured.cell, packed_inputs, self.shell.user_ns, current.dropped)
        return Asked(current=current, cell=cell, packed=packed_inputs.packed, options=options)

    def _sweep(
        self,
        current: Session,
        captured: Captured,
        options: CellOptions,
        swept: list[sweep.Configuration],
    ) -> sweep.SweepRuns:
        """Submit the cell once for each configuration, and return the runs."""
        from jupyter_distrib.kernel.notebook import runs_view, sweep

        def pack(needed: tuple[Input, ...]) -> inputs.PackedInputs:
            return self._pack(current, replace(captured, inputs=needed), options)

        if sentence := sweep.unread(captured, swept[0], pack):
            print(sentence, file=sys.stderr)
        runs: list[Run] = []
        try:
            for configuration in swept:
                given = replace(captured, inputs=sweep.inputs_with(captured, configuration))
                label = f"{captured.cell.filename}, {sweep.label_of(configuration)}"
                run = self._start(current, given, options, label=label, swept=configuration, submitted=True)
                run.group = f"Sweep of {captured.cell.filename}"
                runs.append(run)
            made = sweep.SweepRuns(swept, runs)
            if options.given.out:
                self.shell.user_ns[options.given.out] = made
            if options.given.detach:
                runs_view.show(runs, [runs_view.texts(each) for each in swept])
            return made
        except BaseException:
            sweep.SweepRuns(swept, runs).cancel()
            raise

    def _capture(self, current: Session, options: Options, cell: str, swept: sweep.Configuration) -> Captured:
        captured: Captured | SyntaxError
        try:
            captured = capture(
                cell,
                {**self.shell.user_ns, **swept} if swept else self.shell.user_ns,
                filename=cell_label(self.shell),
                with_names=options.with_,
                dropped=current.dropped,
                transform=self._transform_body,
            )
        except SyntaxError as error:
            captured = error
        if isinstance(captured, SyntaxError):
            raise _shown_alone(captured)
        if (missing := explain_missing(captured, current.dropped)) is not None:
            raise missing
        return captured

    def _start(
        self,
        current: Session,
        captured: Captured,
        options: CellOptions,
        *,
        label: str = "",
        swept: sweep.Configuration | None = None,
        submitted: bool = False,
        notes: Sequence[str] = (),
    ) -> Run:
        notebook, keep = self.shell.user_ns, options.given.keep
        take_over = self._taking_over(current, captured, options.given)
        packed_inputs = self._pack(current, captured, options)
        kept = handles_module.read_by(captured, packed_inputs, notebook)
        if kept:
            packed_inputs, more = self._with_classes(current, captured, options, packed_inputs, kept.values())
            notes = [*notes, *more]
        classes = kept_classes.after(captured, packed_inputs, kept.values(), notebook, keep) if keep else None
        if keep and ((unknown := handles_module.explain_unknown(keep, captured, packed_inputs, notebook)) is not None):
            raise unknown
        source = captured.cell.source
        request = CellRequest(
            options=options,
            label=label or captured.cell.filename,
            handles=packed_inputs.of_type(RankValue),
            on_ended=partial(take_over, classes=classes),
            cell=inputs.explained(captured.cell, packed_inputs, notebook, current.dropped),
            inputs=packed_inputs.packed,
            uses=packed_inputs.uses(source),
            cell_id=cell_outputs.cell_id(self.shell),
            notes=[
                *notes,
                *current.module_changes.sentences(source, captured.inputs, notebook, current.setups.sources),
                *(handles_module.notes_on_ties(kept, captured, packed_inputs, notebook) if kept else ()),
            ],
            arguments=swept or {},
        )
        concurrent = submitted or options.given.detach
        run = current.submit(request, here=not submitted) if concurrent else current.start(request)
        run.program = current.setups.before(Program.of(captured.cell, captured.inputs, options))
        return run

    def _with_classes(
        self,
        current: Session,
        captured: Captured,
        options: CellOptions,
        packed_inputs: inputs.PackedInputs,
        handles: Iterable[RankValue],
    ) -> tuple[inputs.PackedInputs, list[str]]:
        """Return the inputs with the classes of kept values that use something else by now, and a sentence on each
        value whose class is not sent."""
        more, notes, otherwise = kept_classes.to_send(captured, handles, self.shell.user_ns)
        if more is None:
            return packed_inputs, notes
        packed = self._pack(current, replace(captured, inputs=(*captured.inputs, more)), options)
        return (packed, notes) if more.name in packed.values else (packed_inputs, [*notes, *otherwise])

    def _pack(self, current: Session, captured: Captured, options: CellOptions) -> inputs.PackedInputs:
        notebook = self.shell.user_ns
        with interrupts.WholeImports() if captured.inputs else nullcontext():
            return inputs.pack(
                captured.inputs,
                notebook,
                most_bytes=options.filled.max_capture,
                shared=partial(current.setups.shared, notebook),
                reads_files=partial(current.reads_files, options),
            )

    def _taking_over(self, current: Session, captured: Captured, options: Options) -> Callable[..., None]:
        """Return a function that binds handles to a run's kept values in the notebook, and records the names that were
        not kept. Besides the run, it takes the classes of the kept values as they were sent, if known.

        It runs in the node's thread, so that no interrupt comes between, and before a thread that waits for the run
        goes on. A detached run does not overwrite names that the notebook has bound anew since it began.
        """
        notebook = self.shell.user_ns
        before = {name: notebook.get(name) for name in options.keep}
        # without `captured`, which holds the values of all that the cell reads
        label, defines, imports = captured.cell.filename, captured.defines, captured.imports

        def take_over(run: Run, classes: kept_classes.KeptClasses | None) -> None:
            handles_module.note_missing(run, options.keep, notebook)
            handles = current.handles(run, options.keep)
            for name, handle in handles.items():
                if not run.record.ok and handles_module.covers_more(notebook.get(name), handle):
                    continue  # a rank may end its part while its GPU still waits for the one that has failed
                if not options.detach or notebook.get(name) is before[name]:
                    handles_module.bind(notebook, name, handle)
                    handle.classes = classes
            handles_module.note_stopped(run, handles)
            for name in defines:
                if name in notebook:
                    current.dropped.pop(name, None)
                else:
                    current.dropped[name] = Dropped(
                        cell=label, imported=name in imports, kept=name in options.keep, failed=not run.record.ok
                    )

        return take_over


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
