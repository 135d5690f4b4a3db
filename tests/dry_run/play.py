"""Plays a cell in a process of a dry run, without a kernel, and gives its report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent

from jupyter_distrib.kernel.notebook import dry_run
from jupyter_distrib.kernel.views.dry_run import DryRun
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire import messages as m


def play(
    source: str,
    strategy: str = "none",
    *,
    ranks: int = 4,
    gpu: str = "H100",
    folder: Path | None = None,
    options: dict[str, str] | None = None,
    inputs: dict[str, object] | None = None,
    path: tuple[str, ...] = (),
) -> DryRun:
    """Play rank 0; on a CPU, if `gpu` is empty."""
    return play_each(
        source, [strategy], ranks=ranks, gpu=gpu, folder=folder, options=options, inputs=inputs, path=path
    )[0]


def play_each(
    source: str,
    strategies: list[str],
    *,
    ranks: int = 4,
    gpu: str = "H100",
    folder: Path | None = None,
    options: dict[str, str] | None = None,
    inputs: dict[str, object] | None = None,
    path: tuple[str, ...] = (),
) -> list[DryRun]:
    """Play rank 0 under each strategy, at once."""
    plays = [
        prepared(source, each, ranks=ranks, gpu=gpu, folder=folder, options=options, inputs=inputs, path=path)
        for each in strategies
    ]
    with dry_run.Forkserver() as forkserver:
        return forkserver.play(plays)


def prepared(
    source: str,
    strategy: str = "none",
    *,
    ranks: int = 4,
    gpu: str = "H100",
    folder: Path | None = None,
    options: dict[str, str] | None = None,
    inputs: dict[str, object] | None = None,
    path: tuple[str, ...] = (),
) -> dry_run.Play:
    """Return a dry run to be made."""
    setting = m.Setting(
        env=dict(os.environ),
        directory=str(folder or Path.cwd()),
        path=(*path, *sys.path),
        strategy=strategy,
        strategy_options=options or {},
    )
    return dry_run.Play(
        cell=m.Cell(source=dedent(source), filename="Cell In[1]"),
        packed=payload.pack_inputs(inputs or {}, {}),
        setting=setting,
        world=dry_run.World(ranks=ranks, gpu=gpu),
    )
