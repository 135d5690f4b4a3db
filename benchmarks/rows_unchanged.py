"""Values that have not changed since the last run of a cell, on this machine and on two hosts of a command.

A turn changes the value and runs the cell three times: with nothing kept, as a first time, and again after half a
second, since nobody runs a cell again sooner. The order of the first two alternates.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

from driver import Notebook
from plan import Plan
from report import Figure, spread

_MB = 1 << 20
_BIG = 512 * _MB
_HOSTS = (
    "%distributed_pool add far --kind command --hosts a:1,b:1 --nodes 2 --interface lo "
    f"--start 'env HOST={{host}} {{python}}' --python {sys.executable}"
)
_TWICE = 2.0
"""Most that a cell on hosts may take, in times of one without data and the hash."""
_LIMIT = f"{2 * _BIG}"


def unchanged(plan: Plan) -> Iterator[Figure]:
    """512 MB of the notebook, sent for the first time and once more."""
    with plan.warm() as notebook:
        turns = Turns(notebook, "--ranks 2")
        for number in plan.times(11, 3):
            turns.take(number)
    yield turns.again("local pool")
    yield turns.first_time("local pool")
    with plan.warm() as notebook:
        notebook.good(_HOSTS)
        turns = Turns(notebook, "--pool far")
        for number in plan.times(7, 2):
            turns.take(number)
    yield turns.beside_nothing("two hosts of a command")
    yield turns.first_time("two hosts of a command")


class Turns:
    """One notebook with 512 MB, and the options of its cells."""

    def __init__(self, notebook: Notebook, line: str) -> None:
        self._notebook, self._line = notebook, line
        self.alone: list[float] = []
        """Seconds with nothing kept."""
        self.first: list[float] = []
        self.second: list[float] = []
        self.nothing: list[float] = []
        """Seconds of a cell without data."""
        self.hashes: list[float] = []
        notebook.good(f"import time, torch, xxhash\nbig = torch.ones({_BIG // 4})")
        self._run("--cache 0")

    def _run(self, more: str, cell: str = "big[5].item()") -> float:
        return self._notebook.good(f"%%distributed {self._line} {more}\n{cell}").wall_s

    def _changed(self, more: str) -> float:
        self._notebook.good("big += 1")
        return self._run(more)

    def take(self, number: int) -> None:
        def alone() -> None:
            self.alone.append(self._changed("--cache 0"))

        def kept() -> None:
            self.first.append(self._changed(f"--cache {_LIMIT}"))
            time.sleep(0.5)
            self.second.append(self._run(f"--cache {_LIMIT}"))
            self.nothing.append(self._run("", "5"))
            self._notebook.good(
                "_b = time.perf_counter(); xxhash.xxh3_128(big.numpy()).digest(); _hash_s = time.perf_counter() - _b"
            )
            self.hashes.append(self._notebook.value("_hash_s"))

        for each in (alone, kept) if number % 2 else (kept, alone):
            each()

    def again(self, where: str) -> Figure:
        ratio = statistics.median(b / a for a, b in zip(self.first, self.second, strict=True))
        return Figure(
            what=f"512 MB that have not changed, the second run beside the first, {where}",
            measured=f"x{ratio:.2f}: {spread(self.second)} beside {spread(self.first)}",
            target="<= x0.35",
            ok=ratio <= 0.35,
            numbers={"first_s": self.first, "second_s": self.second, "ratio": ratio},
        )

    def first_time(self, where: str) -> Figure:
        ratio = min(self.first) / min(self.alone)  # of the turns in which the machine did nothing else
        return Figure(
            what=f"512 MB for the first time, beside the same with nothing kept, {where}",
            measured=f"x{ratio:.2f}: {spread(self.first)} beside {spread(self.alone)}",
            target="<= x1.05",
            ok=ratio <= 1.05,
            numbers={"first_s": self.first, "alone_s": self.alone, "ratio": ratio},
        )

    def beside_nothing(self, where: str) -> Figure:
        pairs = zip(self.second, self.nothing, self.hashes, strict=True)
        ratio = statistics.median(second / (nothing + hashed) for second, nothing, hashed in pairs)
        return Figure(
            what=f"512 MB that have not changed, beside a cell without data and the hash, {where}",
            measured=f"x{ratio:.2f}: {spread(self.second)} beside {spread(self.nothing)} and {spread(self.hashes)}",
            target=f"<= x{_TWICE:.1f}",
            ok=ratio <= _TWICE,
            numbers={"second_s": self.second, "nothing_s": self.nothing, "hash_s": self.hashes, "ratio": ratio},
        )
