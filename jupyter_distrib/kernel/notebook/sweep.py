"""A sweep: one cell, run once for each configuration of the names that `--sweep` gives values to.

    %%distributed --sweep "lr=[1e-3, 1e-2]" --ranks 1     -->  two runs, as many at once as the pool has room for

In the thread that executes the cell.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, overload

from IPython.core.getipython import get_ipython

from jupyter_distrib.errors import CaptureError, DistributedError, OptionsError
from jupyter_distrib.kernel.capture.capture import Captured, Input
from jupyter_distrib.kernel.notebook.runs_view import RunsView, row_of, texts
from jupyter_distrib.kernel.session.runs import interrupt_presses
from jupyter_distrib.kernel.session.runs.results import Results
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.sidebar import cell_outputs
from jupyter_distrib.kernel.views import run_table

if TYPE_CHECKING:
    import pandas as pd

    from jupyter_distrib.kernel.capture.inputs import PackedInputs

MOST_RUNS = 10_000

_BY_TEXT = frozenset({"globals", "locals", "vars", "eval", "exec", "__main__"})
"""Names with which code reads others that it may put together as it runs."""

Configuration = dict[str, Any]


def configurations(given: Mapping[str, str], notebook: dict[str, Any]) -> list[Configuration]:
    """Return a mapping from names to values for each combination; the last name varies fastest.

    Args:
        given: The expressions by name; each gives the values of that name.
        notebook: The names of the notebook, which the expressions may read.

    Raises:
        OptionsError: An expression fails, or gives no values.
    """
    values = {name: _values(name, text, notebook) for name, text in given.items()}
    count = 1
    for each in values.values():
        count *= len(each)
    if count > MOST_RUNS:
        raise OptionsError(f"--sweep gives more than {MOST_RUNS:,} runs: choose fewer values")
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def _values(name: str, text: str, notebook: dict[str, Any]) -> list[Any]:
    values: list[Any] = []
    try:
        given = eval(text, dict(notebook))  # noqa: S307 - the user's own expression, as in the cell
        if isinstance(given, (str, bytes, Mapping)):
            why = f"gives a single {type(given).__name__}, and each of its parts would be a value"
        else:
            values, why = list(itertools.islice(given, MOST_RUNS + 1)), "gives no values"  # it may have no end
    except Exception as error:  # noqa: BLE001 - foreign code
        why = f"cannot be evaluated ({type(error).__name__}: {error})"
    if not values:
        raise OptionsError(f"--sweep {name}={text} {why}: write a list, such as --sweep {name}=[1,2]")
    return values


def inputs_with(captured: Captured, configuration: Configuration) -> tuple[Input, ...]:
    """Return the cell's inputs, with the values of a configuration in place of the notebook's.

    Raises:
        CaptureError: The cell itself gives one of the names a value.
    """
    for name in configuration:
        if name in captured.defines:
            raise CaptureError(f"--sweep gives `{name}` its values, and so does the cell: remove its line there.")
    others = [item for item in captured.inputs if item.name not in configuration]
    swept = [
        Input(name=name, value=value, line=0, certain=True, reason="--sweep") for name, value in configuration.items()
    ]
    return (*others, *swept)


def unread(captured: Captured, configuration: Configuration, pack: Callable[[tuple[Input, ...]], PackedInputs]) -> str:
    """Return a sentence on the names of a sweep that nothing in the cell reads; empty if there are none, or if the cell
    or a function that it calls may read any name.

    Args:
        captured: The cell, with the values of a configuration among the notebook's names.
        configuration: The values.
        pack: Packs inputs, to find out which functions travel.
    """
    read = captured.reads | {item.name for item in captured.inputs}
    names = [name for name in configuration if name not in read]
    if not _BY_TEXT.isdisjoint(read | captured.imports):
        return ""
    if names:
        packed = pack(inputs_with(captured, configuration))
        if not _BY_TEXT.isdisjoint(packed.globals_in_code()):
            return ""
        in_code, texts = packed.names_in_code(), packed.texts_in_code()
        names = [name for name in names if name not in in_code and not re.search(rf"\b{name}\b", texts)]
    if not names:
        return ""
    listed, is_are = ", ".join(f"`{name}`" for name in names), "are" if names[1:] else "is"
    return (
        f"{listed} of --sweep {is_are} read neither by the cell nor by a function that it calls, so the values change "
        f"nothing. What the notebook has computed before, such as a default argument, stays as it is."
    )


class SweepRuns(Sequence[Any]):
    """The runs of a sweep, and their values in the order of the configurations.

    `sweep[0]` is the value of the first run: the rank's value if it has one rank, else its `Results`. A run that
    failed has its exception in place of a value.
    """

    def __init__(self, configured: Sequence[Configuration], runs: Sequence[Run]) -> None:
        self.configurations = tuple(configured)
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a value, or a list of values; waits for the runs to end."""
        if isinstance(index, slice):
            return [_value(run) for run in self.runs[index]]
        return _value(self.runs[index])

    def __iter__(self) -> Iterator[Any]:
        return map(_value, self.runs)

    def cancel(self, *, force: bool = False) -> None:
        """Stop all runs of the sweep, the queued ones first."""
        for run in reversed(self.runs):
            if not run.done():
                run.cancel(force=force)

    def wait(self, *, halt_on_failure: bool) -> SweepRuns:
        """Wait for all runs and show them in one view; an interrupt stops them, a second one kills them.

        Args:
            halt_on_failure: Stop the others when one has failed, and raise its exception.

        Raises:
            KeyboardInterrupt: The sweep was interrupted.
            BaseException: The exception of the first run, if none succeeded.
        """
        interrupted: list[bool] = []

        def pressed() -> None:
            self.cancel(force=bool(interrupted))
            interrupted.append(True)

        try:
            with interrupt_presses.interrupts_as_orders(pressed, stopped=lambda: bool(interrupted)):
                view = self.view()
                while not all(run.done() for run in self.runs):
                    view.wait_for_news()
                    view.draw()
                    if halt_on_failure and any(_has_failed(run) for run in self.runs):
                        self.cancel()
                view.draw()
        except BaseException:
            self.cancel()
            raise
        self._raise(interrupted=bool(interrupted), halt_on_failure=halt_on_failure)
        return self

    def view(self) -> RunsView:
        """Return the view of the sweep, drawn once."""
        view = RunsView(lambda: self.runs, self._rows, cell_outputs.place(get_ipython()), waits=True)
        for run in self.runs:
            view.follow(run)
        view.draw()
        return view

    def _raise(self, *, interrupted: bool, halt_on_failure: bool) -> None:
        failed = [run for run in self.runs if _has_failed(run)]
        if interrupted:
            failed = [run for run in self.runs if run.state == "interrupted"] or failed
        elif not halt_on_failure and len(failed) < len(self.runs):
            return
        for run in failed[:1]:
            try:
                run.result()
            except CancelledError as error:  # the run was still queued when the cell was stopped
                stopped = KeyboardInterrupt(str(error))
            else:
                continue
            raise stopped

    def _rows(self) -> list[run_table.RunRow]:
        return [row_of(run, texts(each)) for run, each in zip(self.runs, self.configurations, strict=True)]

    def to_pandas(self) -> pd.DataFrame:
        """Return a `pandas.DataFrame` with a row for each configuration: its values, the last value of each metric, the
        state and the seconds.

        Raises:
            DistributedError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise DistributedError("to_pandas() needs pandas: pip install pandas.") from None
        rows = zip(self.configurations, self._rows(), strict=True)
        return pd.DataFrame(
            [{**each, **row.metrics, "state": row.state, "seconds": row.elapsed_s} for each, row in rows]
        )

    def __repr__(self) -> str:
        if all(run.done() and _value(run) is None for run in self.runs):
            return f"{len(self.runs)} runs without a value; to_pandas() gives their numbers"
        return "\n".join(f"{label_of(each)}: {_shown(run)}" for run, each in self._pairs())

    def _pairs(self) -> Iterator[tuple[Run, Configuration]]:
        return zip(self.runs, self.configurations, strict=True)


def label_of(configuration: Configuration) -> str:
    """Return a configuration as one line: `lr=0.001, width=8`."""
    return ", ".join(f"{name}={text}" for name, text in texts(configuration).items())


def _has_failed(run: Run) -> bool:
    return run.done() and run.state in ("failed", "lost", "refused")


def _value(run: Run) -> Any:
    try:
        results = run.result()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the user's exception, in place of the value
        return error
    if results is None:
        return None
    return results[results.ranks[0]] if len(results) == 1 else results


def _shown(run: Run) -> str:
    if not run.done():
        return run.state
    value = _value(run)
    return repr(Results({0: value})).partition(": ")[2]
