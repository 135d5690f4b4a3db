"""Trainings that are there at the same time and take turns of a few steps: what else the machine does, or how fast it
is just now, takes no side.

    here                              rank 0 of a training           its other ranks
    writes how many steps        ->   reads it, tells the others ->  take part
    reads how many seconds       <-   when all are through

Who waits for its turn is blocked, in a read or in a collective, and costs nothing. The training is `train.py`.
"""

from __future__ import annotations

import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from driver import Notebook

SCRIPT = Path(__file__).resolve().parent / "train.py"
_LIMIT_S = 120.0


class Turns:
    """One training. `settings` are the names at the top of the script, in small letters."""

    def __init__(self, folder: Path, **settings: object) -> None:
        paths = {"GO": str(folder / "go"), "DONE": str(folder / "done")}
        for path in paths.values():
            os.mkfifo(path)
        self._go, self._done = (os.open(path, os.O_RDWR) for path in paths.values())  # which waits for nobody
        self.settings = {name.upper(): value for name, value in settings.items()} | paths

    def steps_per_s(self, steps: int) -> float:
        """Have it train so many steps."""
        os.write(self._go, f"{steps}\n".encode())
        ready, _, _ = select.select([self._done], [], [], _LIMIT_S)
        if not ready:
            raise TimeoutError(f"{self.settings}: no answer for {_LIMIT_S:.0f} s")
        return steps / float(os.read(self._done, 100))

    def end(self) -> None:
        os.write(self._go, b"0\n")

    def close(self) -> None:
        os.close(self._go)
        os.close(self._done)


@contextmanager
def under_torchrun(**settings: object) -> Iterator[Turns]:
    """The script with 2 ranks, each with as many threads as a rank of ours gets."""
    with tempfile.TemporaryDirectory(prefix="jdb-") as folder:
        turns = Turns(Path(folder), **settings)
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        env |= {f"BENCH_{name}": str(value) for name, value in turns.settings.items()}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
            try:
                yield turns
                turns.end()
            except BaseException:
                process.terminate()
                raise
            finally:
                process.wait()
                turns.close()


@contextmanager
def in_a_cell(notebook: Notebook, line: str, **settings: object) -> Iterator[Turns]:
    """The text of the script as the body of a cell."""
    with tempfile.TemporaryDirectory(prefix="jdb-") as folder, ThreadPoolExecutor(1) as pool:
        turns = Turns(Path(folder), **settings)
        text = SCRIPT.read_text()
        for name, value in turns.settings.items():
            text = re.sub(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.MULTILINE)
        running = pool.submit(notebook.good, f"%%distributed {line}\n{text}", 3600)
        try:
            yield turns
            turns.end()
        except BaseException:
            notebook.interrupt()
            raise
        finally:
            running.result()
            turns.close()


@contextmanager
def both(
    mine: Callable[[], AbstractContextManager[Turns]],
    other: Callable[[], AbstractContextManager[Turns]],
    *,
    number: int,
) -> Iterator[tuple[Turns, Turns]]:
    """Two trainings, of which one trains before the other is started; which one alternates with `number`.

    Started together, a cell, which begins at once, lost some percent for good to a script that imported torch
    meanwhile (x0.94 to x0.97); started one after the other, in either order, nothing (x1.00 to x1.02).
    """
    with ExitStack() as stack:
        started = {}
        for make in (mine, other) if number % 2 else (other, mine):
            started[make] = stack.enter_context(make())
            started[make].steps_per_s(1)
        yield started[mine], started[other]


def rates(
    first: Turns, second: Turns, *, steps: int, pairs: range, pause_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """Steps a second of both, by turns; who begins alternates. `pause_s` is for what is done after a turn."""
    first.steps_per_s(steps)
    second.steps_per_s(steps)
    found: dict[Turns, list[float]] = {first: [], second: []}
    for number in pairs:
        for each in (first, second) if number % 2 else (second, first):
            found[each].append(each.steps_per_s(steps))
            time.sleep(pause_s)
    return found[first], found[second]


@dataclass
class Compared:
    """Two trainings, in several pairs of new processes, since those that do the same differ by some percent as long as
    they live.

    All rates are in steps a second.
    """

    mine: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """One for each pair of processes."""

    def add(self, mine: list[float], other: list[float]) -> None:
        """What `rates` gave for one pair of processes: the median over every two turns of each, of which one came first
        in one order and one in the other."""
        self.mine += mine
        self.other += other
        turns = zip(mine[::2], mine[1::2], other[::2], other[1::2], strict=True)
        self.ratios.append(statistics.median((1 / c + 1 / d) / (1 / a + 1 / b) for a, b, c, d in turns))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        pairs = f"{len(self.ratios)} pairs of processes, x{min(self.ratios):.3f} to x{max(self.ratios):.3f}"
        mine, other = statistics.median(self.mine), statistics.median(self.other)
        return f"x{self.ratio:.3f} ({pairs}); {mine:.0f} against {other:.0f} steps/s"
