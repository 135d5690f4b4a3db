"""Saved runs as tables, text and HTML: a list, one run, or several compared. Kernel side.

run  cell         began        ranks  strategy  state  metrics    time
12   Cell In[5]   today 14:02  0-3    ddp       done   loss 0.31  2 min 5 s

of           12     15
option.with  lr=1   lr=2
loss         0.31   0.24
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any, overload

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.analysis.metrics import Metrics
from jupyter_distrib.kernel.analysis.shares import percents
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.record import not_finite
from jupyter_distrib.kernel.record.not_finite import NotFinite
from jupyter_distrib.kernel.views import chart
from jupyter_distrib.kernel.views.drawing import Point
from jupyter_distrib.kernel.views.table import Row, TextTable
from jupyter_distrib.system.formatting import clipped, duration, short, size

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 20
"""Number of runs in a displayed list; as a sequence the list has all."""
METRICS = 4
MOST_DRAWN = 1e300
"""Largest magnitude that a chart can show; the difference of two such values is still finite."""
DETAIL_CHARACTERS = 80
_ARGUMENT = "argument."
_NONE = "no saved run matches these words."
_NOTHING = "no run is saved."
HEAD = ("run", "cell", "notebook", "began", "ranks", "strategy", "state", "metrics", "time")


@dataclass(frozen=True, slots=True)
class RunList(Sequence[SavedRun]):
    """A list of saved runs, newest first: `runs[0].metrics.to_pandas()`."""

    runs: tuple[SavedRun, ...]
    note: str = ""
    """A sentence on saved runs that cannot be listed."""
    if_none: str = _NONE
    """A sentence in place of an empty list."""

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, place: int) -> SavedRun: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[SavedRun, ...]: ...
    def __getitem__(self, place: int | slice) -> SavedRun | tuple[SavedRun, ...]:
        return self.runs[place]

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self.table().as_text() if self.runs else self.if_none, self._left(), self.note]))

    def _repr_html_(self) -> str:
        table = self.table().as_html() if self.runs else self.if_none
        return f"<div>{table}<div>{self._left()}</div><div>{escape(self.note)}</div></div>"

    def table(self) -> TextTable:
        return TextTable(head=HEAD, rows=[_row(run) for run in self.runs[:SHOWN]]).without_empty()

    def as_dicts(self) -> list[dict[str, str]]:
        """Return the rows of the table, each by the names of the columns."""
        return [dict(zip(HEAD, _row(run), strict=True)) for run in self.runs[:SHOWN]]

    def as_table(self, most: int) -> list[dict[str, Any]]:
        """Return up to this many rows with what they can be sorted by, as JSON values: the times, each metric as a
        number (None if it is not finite) and as text, and the arguments or swept values by name."""
        heads = (dict(zip(HEAD, _row(run), strict=True)) for run in self.runs[:most])
        return [
            {
                **head,
                "began_at_s": run.began_at_s,
                "elapsed_s": run.elapsed_s,
                "error": clipped(run.error, DETAIL_CHARACTERS),
                "values": {
                    name: [each if isfinite(each) else None, last_value(run, name, 4)]
                    for name, each in run.last.items()
                },
                "parameters": parameters(run),
            }
            for head, run in zip(heads, self.runs, strict=False)
        ]

    def to_pandas(self) -> pd.DataFrame:
        """Return a `pandas.DataFrame` with a row for each run: number, cell, state, seconds, parameters, and the last
        value of each metric.

        Raises:
            DistributedError: pandas is not installed.
        """
        return _data_frame(self.runs)

    def _left(self) -> str:
        left = len(self.runs) - SHOWN
        return f"{left} earlier run{'s' * (left != 1)}: name words to search for" if left > 0 else ""


def _data_frame(runs: Sequence[SavedRun]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError:
        raise DistributedError("to_pandas() needs pandas: pip install pandas.") from None
    return pd.DataFrame(
        [
            {"run": run.number, "cell": run.label, "state": run.state, "seconds": run.elapsed_s}
            | {name: _value(text) for name, text in parameters(run).items()}
            | run.last
            for run in runs
        ]
    )


def _value(text: str) -> int | float | str:
    """Return a parameter as a number if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def matching(runs: Sequence[SavedRun], words: Sequence[str], note: str = "") -> RunList:
    """Return the runs, newest first, that contain every word in their cell, notebook, options, code, metrics or
    errors."""
    lowered = [word.lower() for word in words]
    found = [run for run in reversed(runs) if all(word in _text_of(run) for word in lowered)]
    return RunList(tuple(found), note, _NONE if runs else _NOTHING)


def _text_of(run: SavedRun) -> str:
    facts = (f"{name}={value}" for name, value in run.facts.items())
    return "\n".join([run.run, run.label, run.notebook, run.state, run.error, *facts, *run.last, run.source]).lower()


def _row(run: SavedRun) -> Row:
    return (
        str(run.number),
        run.label,
        run.notebook.rpartition("/")[2],
        began(run),
        run.facts.get("ranks", "").partition(" ")[2],
        run.facts.get("strategy", ""),
        run.state,
        clipped(run.error, DETAIL_CHARACTERS) if run.error else _metrics(run),
        duration(run.elapsed_s),
    )


def parameters(run: SavedRun) -> dict[str, str]:
    """Return the arguments of the run, or the values that a sweep gave it, by name."""
    return {name.removeprefix(_ARGUMENT): value for name, value in run.facts.items() if name.startswith(_ARGUMENT)}


def began(run: SavedRun) -> str:
    """Format the start time: `14:02` today, `25 Nov 14:02` this year, `2025-11-25 14:02`."""
    then, now = time.localtime(run.began_at_s), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%d %b %H:%M" if then.tm_year == now.tm_year else "%Y-%m-%d %H:%M", then)


def _metrics(run: SavedRun) -> str:
    return "  ".join(f"{short(name)} {last_value(run, name, 4)}" for name in list(run.last)[:METRICS])


def last_value(run: SavedRun, name: str, digits: int) -> str:
    """Return the last value of a metric, and the steps at which it was nan or infinite."""
    value, odd = run.last[name], run.not_finite.get(name, "")
    number = f"{value:.{digits}g}"
    return number if not odd else odd if odd.startswith(f"{number} ") else f"{number} ({odd})"


@dataclass(frozen=True, slots=True)
class Comparison(Sequence[SavedRun]):
    """Several saved runs side by side: differences in options, versions, outcomes and code, and their charts. For a
    single run, everything."""

    runs: tuple[SavedRun, ...]

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, place: int) -> SavedRun: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[SavedRun, ...]: ...
    def __getitem__(self, place: int | slice) -> SavedRun | tuple[SavedRun, ...]:
        return self.runs[place]

    def __repr__(self) -> str:
        return "\n\n".join([self.table().as_text(), *("\n".join(lines) for lines in self.texts())])

    def _repr_html_(self) -> str:
        texts = "".join(f"<pre>{escape(chr(10).join(lines))}</pre>" for lines in self.texts())
        return f"<div>{self.table().as_html()}{charts(self.runs)}{texts}</div>"

    def table(self) -> TextTable:
        every = [_properties(run) for run in self.runs]
        names = list(dict.fromkeys(name for each in every for name in each))
        rows = [(name, *(each.get(name, "") for each in every)) for name in names]
        if len(self.runs) > 1:
            rows = [row for row in rows if len(set(row[1:])) > 1]
        return TextTable(head=("run", *(str(run.number) for run in self.runs)), rows=rows)

    def to_pandas(self) -> pd.DataFrame:
        """Return a `pandas.DataFrame` as `RunList.to_pandas` does."""
        return _data_frame(self.runs)

    def texts(self) -> Iterator[list[str]]:
        """Yield the traceback of a single run that failed, and what `code` yields."""
        if len(self.runs) == 1:
            with suppress(OSError, ValueError):  # the file is gone or damaged
                if lines := self.runs[0].traceback:
                    yield lines
        yield from self.code()

    def code(self) -> Iterator[list[str]]:
        """Yield the code of a single run, or for each further run the lines in which it differs from the first."""
        first, *others = self.runs
        if not others:
            yield first.source.splitlines()
        for other in others:
            lines = list(
                difflib.unified_diff(
                    first.source.splitlines(), other.source.splitlines(), str(first.number), str(other.number),
                    lineterm="", n=2,
                )
            )  # fmt: skip
            yield lines or [f"the code of {first.number} and {other.number} is the same"]


def _properties(run: SavedRun) -> dict[str, str]:
    """Return everything known about a run except its code and its reports, as texts."""
    peak_gpu = run.peak_gpu_memory_bytes
    return {
        "cell": run.label,
        "notebook": run.notebook,
        "began": began(run),
        "time": duration(run.elapsed_s),
        "state": run.state,
        "error": clipped(run.error, DETAIL_CHARACTERS),
        **run.facts,
        **{name: last_value(run, name, 6) for name in run.last},
        "peak memory": size(run.peak_rss_bytes) if run.peak_rss_bytes else "",
        "peak GPU memory": size(peak_gpu) if peak_gpu else "",
        "peak of tensors on each GPU": _peak_of_tensors(run),
        "where its time went": percents(run.shares),
    }


def _peak_of_tensors(run: SavedRun) -> str:
    peak = size(run.peak_tensor_bytes) if run.peak_tensor_bytes else ""
    if run.deviation is None or run.predicted_bytes is None:
        return peak
    return f"{peak}, {100 * run.deviation:+.1f}% compared with the {size(run.predicted_bytes)} of the dry run"


def charts(runs: Sequence[SavedRun]) -> str:
    """Return an `<img>` with a chart for each metric and a line for each run; the first run's stands out."""
    lines: dict[str, list[chart.Line]] = {}
    turned: dict[str, dict[int, NotFinite]] = {}
    for place, run in reversed(list(enumerate(runs))):
        for name, each, odd in points(run):
            lines.setdefault(name, []).append((place, each))
            if odd is not None:
                turned.setdefault(name, {})[place] = odd
    name_of: Callable[[int], str] = lambda place: f"run {runs[place].number}"  # noqa: E731
    drawing = chart.drawn(lines, name_of, turned)
    return "" if drawing is None else drawing.as_html()


def points(run: SavedRun) -> Iterator[tuple[str, list[Point], NotFinite | None]]:
    """Yield the finite points of each metric, and where it was nan or infinite: of many ranks their mean, else those of
    the first rank that reported it. Nothing if the file is gone."""
    try:
        metrics: Metrics = run.metrics
    except (OSError, ValueError, IndexError):
        return
    for name in metrics.names:
        of_ranks = metrics.finite(name)
        many = len(of_ranks) > chart.MANY
        reported = metrics.mean(name) if many else next(iter(of_ranks.values()), [])
        line = [(float(step), value) for step, value in reported if abs(value) < MOST_DRAWN]
        found = [odd for each in metrics[name].values() if (odd := not_finite.of_points(each))]
        odd = min(found, key=lambda each: (not each.is_now, each.first)) if found else None
        if line or odd is not None:
            yield name, line, odd
