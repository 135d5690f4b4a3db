"""The answer of a dry run as text and HTML: whether the cell works, and its memory on each GPU. Kernel side; pure
functions of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import overload

from jupyter_distrib.kernel.views import markup
from jupyter_distrib.kernel.views.table import Row, TextTable
from jupyter_distrib.system.formatting import size

CONTEXT_BYTES = 1_600_000_000
"""An estimate of what a GPU's memory holds besides tensors: CUDA's context, the workspaces of cuBLAS, buffers of
NCCL."""
TIGHT = 0.9
"""The share of a GPU's memory above which a cell only just fits: the allocator's gaps take some percent."""
FITS, IS_TIGHT, NO_FIT = "fits", "tight", "does not fit"
FAILS, REFUSED, ENDED, UNUSED = "fails", "cannot be run dry", "did not train", "uses no GPU"
BAR_CHARACTERS = 40
_MOST_LINES = 5
_COLORS = ("#3f83c4", "#2f9494", "#8f74c9", "#c78a1e", "#c2569b", "#d4553f", "#6b9e3f", "#8a8a8a", "#4a5d78", "#a0785a")
_NOT_SEEN = (
    "Not seen: values (such as labels out of range or NaN), what other ranks do differently, hangs, kernels of other "
    "libraries, and what comes after the second step of the optimizer, such as evaluation. Time is not predicted."
)

Line = tuple[str, int]
"""Name of the cell or file, and number of the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryError:
    """An exception of the cell."""

    type_name: str
    text: str
    notes: Sequence[str] = ()
    frames: Sequence[tuple[str, int, str]] = ()
    """Name, line and source of each of the user's frames, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch of the cell's data loader that fits on each GPU, found by dry runs."""

    samples: int
    peak_bytes: int
    of_all_data: bool
    """Whether the data has no larger one for two steps on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The findings of a dry run of one strategy."""

    strategy: str
    ranks: int
    gpu: str
    """The type of the GPU; empty for CPU ranks."""
    gpu_bytes: int
    assumed: Sequence[str] = ()
    """Sentences on what was not known and had to be assumed."""
    refused: str = ""
    """The reason why the cell cannot be run dry; empty if it can."""
    error: DryError | None = None
    steps: int = 0
    batch: int = 0
    """The samples in a batch of the cell's data loader on each rank; 0 if it has none."""
    samples: int = 0
    """The number of samples that the data loader reads; 0 if it is unknown."""
    largest_batch: LargestBatch | None = None
    peak_bytes: int = 0
    passes_peak_bytes: int = 0
    """The peak outside of optimizer steps, which grows with the batch."""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    by_line: Mapping[Line, int] = field(default_factory=dict)
    guessed_lines: Mapping[Line, int] = field(default_factory=dict)
    """The lines at which values had to be guessed, and how often."""
    sources: Mapping[Line, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """The messages of the strategy."""
    effects: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The files and programs of what the cell has done for real, by the words that say what it did with them."""
    wall_s: float = 0.0
    memory_here_bytes: int = 0
    """The peak memory of the dry run's own process."""

    @property
    def needed_bytes(self) -> int:
        """The peak with the estimate of what else is in a GPU's memory."""
        return self.peak_bytes + (CONTEXT_BYTES if self.gpu else 0)

    @property
    def verdict(self) -> str:
        """One of: fits, tight, does not fit, fails, did not train, uses no GPU, cannot be run dry."""
        if self.refused:
            return REFUSED
        if self.error is not None:
            return FAILS
        if self.gpu_bytes and self.needed_bytes > self.gpu_bytes:
            return NO_FIT
        if not self.steps:
            return ENDED
        if self.gpu and not self.peak_bytes:
            return UNUSED
        return IS_TIGHT if self.gpu_bytes and self.needed_bytes > TIGHT * self.gpu_bytes else FITS

    @property
    def fits(self) -> bool:
        return self.verdict in (FITS, IS_TIGHT)

    def __repr__(self) -> str:
        tables = "\n\n".join(table.as_text() for table in self._tables() if table.rows)
        bar = f"{_text_bar(self)}\n" if self.peak_bytes and self.gpu_bytes else ""
        return "\n\n".join(filter(None, [f"{self._head()}\n{bar}{self._sentence()}", tables, "\n".join(self._rest())]))

    def _repr_html_(self) -> str:
        head = f"<div><b>{escape(self._head())}</b></div>"
        bar = _html_bar(self) if self.peak_bytes and self.gpu_bytes else ""
        error = "".join(f"<div>{escape(line)}</div>" for line in self._sentence().splitlines())
        tables = "".join(table.as_html() for table in self._tables() if table.rows)
        rest = "".join(f"<div>{escape(line)}</div>" for line in self._rest())
        return markup.inert(f"{head}{error}{bar}{tables}{rest}")

    def _head(self) -> str:
        where = f"on {self.gpu} ({size(self.gpu_bytes)})" if self.gpu else "on CPUs"
        return f"dry run: {self.verdict} · --strategy {self.strategy} · rank 0 of {self.ranks} {where}"

    def _sentence(self) -> str:
        if self.refused:
            return self.refused
        if self.error is not None:
            return "\n".join(_error_lines(self.error))
        peak = f"The peak {self.memory_sentence()}"
        if not self.steps:
            return f"{peak}. No optimizer of torch stepped before the cell ended, so a training run may need more."
        if self.verdict == UNUSED:
            return "The cell puts nothing on the GPU: move the model there, or use a strategy, which moves it for you."
        return f"{peak}." if self.steps > 1 else f"{peak}. The cell ended after one step; a second may need more."

    def memory_sentence(self) -> str:
        """Return the peak as the rest of a sentence: `is 3.1 GB of each GPU ...`."""
        if not self.gpu:
            return f"is {size(self.peak_bytes)} of tensors on each rank"
        return f"is {size(self.peak_bytes)} of each GPU, and about {size(CONTEXT_BYTES)} more for CUDA and NCCL"

    def _tables(self) -> list[TextTable]:
        total = max(self.peak_bytes, 1)
        kinds = [
            (kind, size(size_bytes), f"{100 * size_bytes / total:.0f}%")
            for kind, size_bytes in sorted(self.by_kind.items(), key=lambda item: -item[1])
            if size_bytes > total / 1000
        ]
        lines: list[Row] = [
            (_named(line), size(size_bytes), self.sources.get(line, ""))
            for line, size_bytes in sorted(self.by_line.items(), key=lambda item: -item[1])[:_MOST_LINES]
            if size_bytes > total / 1000
        ]
        return [
            TextTable(head=("at the peak", "size", "share"), rows=kinds),
            TextTable(head=("line", "holds", "activations, batches and temporary tensors"), rows=lines),
        ]

    def _rest(self) -> list[str]:
        lines = [f"· {text}" for text in (*self.notes, *self.assumed)]
        if self.largest_batch is not None:
            lines.insert(0, f"· {_largest(self)}")
        if self.guessed_lines:
            places = ", ".join(_named(line) for line in sorted(self.guessed_lines))
            lines.append(f"· values had to be guessed on {places}: what depends on them may differ in a real run.")
        if self.effects:
            done = "; ".join(f"{what} {', '.join(names)}" for what, names in self.effects.items())
            lines.append(f"· for real, the cell has {done}")
        if not self.refused:
            lines.append(f"· {_NOT_SEEN}")
        return lines


def _largest(run: DryRun) -> str:
    largest = run.largest_batch
    assert largest is not None
    if largest.of_all_data:
        return (
            f"a batch of {largest.samples:,} for each rank fits, with a peak of {size(largest.peak_bytes)}, which is "
            f"all that the data has for two steps; the cell has {run.batch:,}."
        )
    return (
        f"the largest batch that fits is about {largest.samples:,} for each rank, with a peak of "
        f"{size(largest.peak_bytes)}; the cell has {run.batch:,}."
    )


class DryRuns(Sequence[DryRun]):
    """The dry runs of one cell under several strategies."""

    def __init__(self, runs: Sequence[DryRun]) -> None:
        self._runs = tuple(runs)

    @overload
    def __getitem__(self, index: int) -> DryRun: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DryRun]: ...
    def __getitem__(self, index: int | slice) -> DryRun | Sequence[DryRun]:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def best(self) -> DryRun:
        """The first run that fits, else the first that works, else the first."""
        return next((run for run in self if run.fits), next((run for run in self if run.error is None), self[0]))

    @property
    def fits(self) -> bool:
        return any(run.fits for run in self)

    def __repr__(self) -> str:
        return f"{self._table().as_text()}\n\n{self.best!r}"

    def _repr_html_(self) -> str:
        return self._table().as_html() + self.best._repr_html_()

    def _table(self) -> TextTable:
        rows = [(run.strategy, run.verdict, size(run.peak_bytes), _most(run)) for run in self]
        return TextTable(head=("strategy", "", "peak of each rank", "most of it"), rows=rows)


def _most(run: DryRun) -> str:
    if run.error is not None:
        return f"{run.error.type_name}: {run.error.text}".partition("\n")[0][:80]
    kinds = sorted(run.by_kind.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{kind} {size(size_bytes)}" for kind, size_bytes in kinds)


def _error_lines(error: DryError) -> list[str]:
    lines = [f"{_named((name, line))}: {source}" for name, line, source in error.frames]
    return [*lines, f"{error.type_name}: {error.text}", *error.notes]


def _named(line: Line) -> str:
    name, number = line
    return f"line {number}" if name.startswith("Cell") or not name else f"{name.rpartition('/')[2]}, line {number}"


def _text_bar(run: DryRun) -> str:
    share = run.needed_bytes / run.gpu_bytes
    full = min(BAR_CHARACTERS, round(BAR_CHARACTERS * share))
    return f"[{'#' * full}{'.' * (BAR_CHARACTERS - full)}] {100 * share:.0f}% of {size(run.gpu_bytes)}"


def _html_bar(run: DryRun) -> str:
    whole = max(run.needed_bytes, run.gpu_bytes)
    parts = [
        *sorted(run.by_kind.items(), key=lambda item: -item[1]),
        ("CUDA and NCCL", CONTEXT_BYTES if run.gpu else 0),
    ]
    pieces = "".join(
        f'<span title="{escape(f"{kind}: {size(size_bytes)}")}" style="display:inline-block;height:14px;'
        f'width:{100 * size_bytes / whole:.2f}%;background:{_COLORS[place % len(_COLORS)]}"></span>'
        for place, (kind, size_bytes) in enumerate(parts)
        if size_bytes > whole / 1000
    )
    limit = 100 * run.gpu_bytes / whole
    mark = (
        f'<div style="width:{limit:.2f}%;border-right:2px solid #d4553f;text-align:right;padding-right:4px">'
        f"{escape(run.gpu)}: {size(run.gpu_bytes)}</div>"
    )
    return f'<div style="width:620px"><div style="white-space:nowrap;background:#80808033">{pieces}</div>{mark}</div>'
