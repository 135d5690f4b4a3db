"""The magics `%time` and `%timeit` on a rank. Rank's main thread.

Ranks that time a collective have to call it equally often, however long each of them takes: the first rank that has
measured decides for all of them how many loops follow, through the run's messages, and none waits for another.
"""

from __future__ import annotations

import getopt
import hashlib
import itertools
import math
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jupyter_distrib.interfaces import framework

ENOUGH_S = 0.2
"""Seconds that the loops of one run take at least, unless their number is given."""
RUNS = 7
_OPTIONS = "n:r:tcp:qov:"
"""The options of IPython's `%timeit`."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (0.0, "ns"))


class Timing(NamedTuple):
    """The result of `%timeit -o`: seconds for each loop."""

    average: float
    stdev: float
    best: float
    worst: float
    loops: int
    repeat: int
    all_runs: tuple[float, ...]

    def __str__(self) -> str:
        runs = f"{self.repeat} run{'s' * (self.repeat != 1)}, {self.loops:,} loop{'s' * (self.loops != 1)} each"
        return f"{_shown(self.average)} ± {_shown(self.stdev)} per loop (mean ± std. dev. of {runs})"


class PrintedTimes:
    """A context manager that prints at the end how long the block took. It leaves an exception of the block as it is,
    where `contextmanager` would set its `__traceback__`."""

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        print(f"CPU times: {cpu:.3g} s, wall time: {wall:.3g} s")


def measure(line: str, names: dict[str, object]) -> Timing | None:
    """Run `%timeit` with this line, and print how long a loop takes. Return that with `-o`.

    Raises:
        ValueError: An option is wrong.
    """
    options, statement = parsed(line)
    timer = timeit.Timer(statement, globals=names)
    count = int(options["-n"]) if "-n" in options else _loops(timer, _agreement(statement))
    runs = int(options.get("-r", RUNS))
    seconds = tuple(each / count for each in timer.repeat(runs, count))
    found = Timing(
        average=statistics.fmean(seconds),
        stdev=statistics.pstdev(seconds),
        best=min(seconds),
        worst=max(seconds),
        loops=count,
        repeat=runs,
        all_runs=tuple(each * count for each in seconds),
    )
    if "-q" not in options:
        print(found)
    if "-v" in options:
        names[options["-v"]] = found
    return found if "-o" in options else None


def parsed(line: str) -> tuple[dict[str, str], str]:
    """Return the options of `%timeit` and its statement, with its quotes and spaces. Raises `ValueError`."""
    options: dict[str, str] = {}
    rest = line.strip()
    while rest.startswith("-") and rest[1:2].isalpha():
        word, _, rest = rest.partition(" ")
        if word in ("-n", "-r", "-p", "-v"):
            value, _, rest = rest.lstrip().partition(" ")
            word += value
        try:
            options.update(getopt.getopt([word], _OPTIONS)[0])
        except getopt.GetoptError as error:
            raise ValueError(f"%timeit: {error}.") from None
        rest = rest.lstrip()
    for name in ("-n", "-r"):
        if name in options and not (options[name].isdecimal() and int(options[name])):
            raise ValueError(f"%timeit {name} must be a whole number of 1 or more; got {options[name]!r}.")
    return options, rest


def _loops(timer: timeit.Timer, agreed: Callable[[str, str], str]) -> int:
    """Return how many loops take long enough."""
    count = 1
    for factor in itertools.cycle((2, 2.5, 2)):  # 1, 2, 5, 10, 20 ...
        seconds = timer.timeit(count)
        if agreed(str(count), "enough" if seconds >= ENOUGH_S else "more") == "enough":
            break
        count = int(count * factor)
    return count


def _agreement(statement: str) -> Callable[[str, str], str]:
    """Return a function that takes the name of a decision and this rank's own decision, and returns that of the
    first rank."""
    groups: Any = framework.current.groups if framework.current is not None else None
    board = groups.board() if hasattr(groups, "board") else None
    if board is None:
        return lambda _, own: own
    digest = hashlib.sha256(statement.encode()).hexdigest()[:12]
    met = _met.setdefault(board, Counter())
    met[digest] += 1
    number = met[digest]
    return lambda name, own: board.put_first(f"timeit/{digest}/{number}/{name}", own)


_met: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""The number of times that each statement was timed, by the messages of the run."""


def _shown(seconds: float) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if seconds >= unit)
    value = seconds / (unit or 1e-9)
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{digits}f} {name}"
