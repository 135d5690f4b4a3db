"""Chooses what a dry run plays, and what follows from its answer. In the thread that executes the cell.

--dry-run                    one strategy, or all possible ones side by side
--dry-run first              the cell is started only if it fits
--strategy auto              the first strategy that fits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from IPython.core.display_functions import display

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.capture.capture import Input
from jupyter_distrib.kernel.notebook import dry_run
from jupyter_distrib.kernel.notebook.dry_run import Forkserver, Play, World
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.settings.available import for_strategy
from jupyter_distrib.kernel.settings.cell_options import AUTO_STRATEGY, DEFAULT_STRATEGY, Options
from jupyter_distrib.kernel.settings.settings import CellOptions
from jupyter_distrib.kernel.views.dry_run import CONTEXT_BYTES, FAILS, NO_FIT, TIGHT, DryRun, DryRuns, LargestBatch
from jupyter_distrib.serialization import payload
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

FIRST = "first"
Candidates = tuple[tuple[str, Mapping[str, str]], ...]
CANDIDATES: Candidates = (("ddp", {}), ("fsdp", {}), ("fsdp", {"precision": "bf16"}))
"""The strategies that are compared, and tried in this order by `--strategy auto`, with their options."""
STEPS = 2
"""Steps that a dry run takes."""
MOST_TIMES = 4096
"""The largest batch to try, in batches of the cell."""
CHECKS = 2


@data_class
class Asked:
    """A cell with its options, as a dry run needs them."""

    current: Session
    cell: m.Cell
    packed: payload.Packed
    options: CellOptions

    def plays(self, *, none: bool) -> list[Play]:
        """Return the dry runs to make: one if a strategy was written, else one for each candidate.

        Args:
            none: Whether the cell as it is, without a strategy, is a candidate.

        Raises:
            OptionsError, DistributedError: The strategy refuses the run.
        """
        given, filled = self.options.given, self.options.filled
        started = given.dry_run == FIRST or not given.dry_run
        world = World.of(self.current, filled, asks=started)
        written = given.strategy if given.strategy != AUTO_STRATEGY else None
        if written or filled.strategy not in (DEFAULT_STRATEGY, AUTO_STRATEGY):
            return [self._play(filled, world)]
        as_it_is: Candidates = ((DEFAULT_STRATEGY, {}),) if none and filled.strategy == DEFAULT_STRATEGY else ()
        return [self._play(with_strategy(filled, name, own), world) for name, own in (*as_it_is, *CANDIDATES)]

    def _play(self, options: Options, world: World) -> Play:
        options = for_strategy(options, self.options.size)
        setting = dry_run.setting(self.cell, options)
        return Play(
            cell=self.cell,
            packed=self.packed,
            setting=setting,
            world=world,
            setups=self.current.setups.to_send(),
        )


def with_shapes(current: Session, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Return the inputs with the shapes of values that ranks keep in place of their handles: a dry run has no values.

    Raises:
        PoolError: The ranks that keep them are busy, or gone.
    """
    handles = {handle.key: handle for each in inputs for handle in _handles_in(each.value)}
    if not handles:
        return inputs
    shapes = current.queries.shapes(handles)
    return tuple(replace(each, value=_with(each.value, shapes)) for each in inputs)


def _handles_in(value: object) -> Iterator[RankValue]:
    if isinstance(value, RankValue):
        yield value
    elif type(value) in (tuple, list, dict):
        for each in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            yield from _handles_in(each)


def _with(value: Any, shapes: Mapping[str, Any]) -> Any:
    if isinstance(value, RankValue):
        return shapes[value.key]
    if next(_handles_in(value), None) is None:
        return value
    if isinstance(value, dict):
        return {key: _with(each, shapes) for key, each in value.items()}
    return type(value)(_with(each, shapes) for each in value)


def with_strategy(options: Options, name: str, own: Mapping[str, str]) -> Options:
    """Return the options with this strategy, and with its options added to the written ones."""
    return replace(options, strategy=name, strategy_options={**options.strategy_options, **own})


def answer(asked: Asked) -> DryRun | DryRuns:
    """Make the dry runs of a cell. Return the answer, which may be about several strategies."""
    plays = asked.plays(none=True)
    with Forkserver() as forkserver:
        runs = _played(asked, plays, forkserver)
        fitting = next((place for place, each in enumerate(runs) if each.fits and each.gpu_bytes), None)
        if fitting is not None and (largest := largest_batch(plays[fitting], runs[fitting], forkserver)) is not None:
            runs[fitting] = replace(runs[fitting], largest_batch=largest)
    return runs[0] if len(runs) == 1 else DryRuns(tuple(runs))


def _played(asked: Asked, plays: Sequence[Play], forkserver: Forkserver) -> list[DryRun]:
    """Make the dry runs, and remember their peaks for the real run that may follow."""
    runs = forkserver.play(plays)
    for each, run in zip(plays, runs, strict=True):
        if run.fits:
            asked.current.predicted_peaks.put(each.cell, each.packed, each.setting, run.ranks, run.peak_bytes)
    return runs


def largest_batch(play: Play, run: DryRun, forkserver: Forkserver) -> LargestBatch | None:
    """Return the largest batch that fits: from a line through the peaks of two batches, with a check; None if the peak
    does not grow with the batches of the user's data loader."""
    if not run.batch or not run.gpu_bytes:
        return None
    limit_bytes = TIGHT * run.gpu_bytes - CONTEXT_BYTES
    most = run.samples // run.ranks // STEPS if run.samples else MOST_TIMES * run.batch
    points = [(run.batch, run.passes_peak_bytes)]
    wanted = min(2 * run.batch, most)
    for attempt in range(1 + CHECKS):
        if wanted <= run.batch:
            return None
        (tried,) = forkserver.play([replace(play, batch_factor=wanted / run.batch)])
        if tried.error is not None or tried.refused or tried.steps < STEPS:
            return None
        if attempt and tried.peak_bytes <= limit_bytes:
            return LargestBatch(samples=wanted, peak_bytes=tried.peak_bytes, of_all_data=wanted == most)
        points.append((wanted, tried.passes_peak_bytes))
        (few, few_bytes), (many, many_bytes) = points[-2:]
        if many_bytes <= few_bytes:
            return None
        growth = (many_bytes - few_bytes) / (many - few)
        wanted = min(int(few + (limit_bytes - few_bytes) / growth), most)
    return None


def show(answer: DryRun | DryRuns) -> None:
    """Show an answer in the notebook, or print it in a program."""
    display(answer)  # type: ignore[no-untyped-call]


def check(answer: DryRun | DryRuns, options: Options) -> None:
    """Show an answer, and raise `DistributedError` if the cell that `--dry-run first` starts fails or does not fit."""
    show(answer)
    runs = [answer] if isinstance(answer, DryRun) else list(answer)
    real = runs[0]
    if real.verdict in (FAILS, NO_FIT):
        raise DistributedError(
            f"The cell was not started: the dry run says that it {real.verdict}"
            f"{'' if options.strategy else ' without a strategy'}. To run it anyway, leave out --dry-run first."
        )


def chosen(asked: Asked) -> tuple[CellOptions, str]:
    """Return the options with the first strategy that fits in place of `auto`, and a sentence that says why.

    Raises:
        DistributedError: None of them fits, or the cell fails.
    """
    plays = asked.plays(none=False)
    with Forkserver() as forkserver:
        runs = _played(asked, plays, forkserver)
    for play, run in zip(plays, runs, strict=True):
        if run.fits:
            given = with_strategy(asked.options.given, play.setting.strategy, play.setting.strategy_options)
            return asked.options.settings.completed(given), f"--strategy auto took {run.strategy}: {_reason(runs, run)}"
    show(DryRuns(tuple(runs)))
    verdicts = "; ".join(f"{run.strategy}: {run.verdict}" for run in runs)
    raise DistributedError(
        f"--strategy auto found none that fits, so the cell was not started ({verdicts}). To run it anyway, name "
        "a strategy."
    )


def _reason(runs: Sequence[DryRun], taken: DryRun) -> str:
    before = [f"{run.strategy} {run.verdict}" for run in runs[: runs.index(taken)]]
    return "; ".join([*before, f"its peak {taken.memory_sentence()}"])


def decided(asked: Asked) -> tuple[CellOptions, list[str]] | DryRun | DryRuns:
    """Return the options with which the cell is to be started, and sentences for the head of its run; or the answer of
    a dry run, after which nothing is started.

    Raises:
        DistributedError: The cell is not to be started.
    """
    if dry_run := asked.options.given.dry_run:
        answered = answer(asked)
        if dry_run != FIRST:
            return answered
        check(answered, asked.options.given)
    if asked.options.filled.strategy != AUTO_STRATEGY:
        return asked.options, []
    options, why = chosen(asked)
    return options, [why]
