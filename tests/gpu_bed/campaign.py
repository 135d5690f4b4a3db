"""Random cells and faults in two notebooks on a machine with 8 feigned GPUs, and what must hold after each.

    python -m tests.gpu_bed.campaign --minutes 10 [--seed 7] [--two-agents]

After each step: every rank that lives has a GPU of its own, which is leased; nobody was refused GPUs that were free or
could be; no step took longer than it may. In the end: no rank and no lease is left. The seed repeats the steps, if not
their timing.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_distrib.wire import messages as m
from tests.gpu_bed import GpuBed
from tests.notebook import Notebook, Outcome
from tests.processes import wait_until

STEP_LIMIT_S = 40.0
_WHERE = re.compile(r"\(GPU (\d+)\)$")
_FREE = re.compile(r"--gpus (\d+), but only (\d+) of (\d+) GPUs are free")
_SMALL = "import os\nos.getpid()"
_LONG = """\
print('it has begun')
import signal
while True:
    signal.pause()"""


class Broken(AssertionError):
    """Something that must always hold does not."""


@dataclass(slots=True, eq=False)
class Book:
    """One notebook, and the cell that it is at."""

    name: str
    notebook: Notebook
    running: bool = False
    excuses: set[str] = field(default_factory=set)
    """Errors that its next cell may end with, because of what was done to it."""


class Campaign:
    """The steps, and the checks.

    Args:
        bed: The machine; 8 GPUs.
        seed: For the choice of steps.
        two_agents: Whether each notebook has an agent of its own, as notebooks of two environments have.
        log: Takes a line for each step.
    """

    def __init__(
        self, bed: GpuBed, seed: int, *, two_agents: bool = False, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self._bed, self._random, self._log, self._two_agents = bed, random.Random(seed), log, two_agents
        self._books = [self._new_book(name) for name in "AB"]
        self.steps = 0
        self._line = ""

    def run(self, seconds: float) -> None:
        """Go on for so long, then end everything."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.step()
        self.end()

    def step(self) -> None:
        """Do one thing in one notebook, and check what must hold."""
        book = self._random.choice(self._books)
        actions = self._while_running if book.running else self._while_idle
        action = self._random.choices([each for each, _ in actions], [weight for _, weight in actions])[0]
        self.steps += 1
        self._line = f"{self.steps} {book.name} {action.__name__.strip('_')}"
        began_s = time.monotonic()
        action(self, book)
        took_s = time.monotonic() - began_s
        self._log(f"{self._line} ({took_s:.2f} s)")
        if took_s > STEP_LIMIT_S:
            raise Broken(f"{self._line} took {took_s:.0f} s")
        self._check()

    def end(self) -> None:
        """Close the notebooks, and look for what is left."""
        for book in self._books:
            book.notebook.close()
        if not self._bed.ranks_gone(10.0):
            raise Broken(f"ranks are left when their kernels are gone: {self._bed.contexts()}")
        if not wait_until(lambda: not self._holders(), 10.0):
            raise Broken(f"leases are left when the ranks are gone: {self._holders()}")
        self._check()

    # ------------------------------------------------------------------------------------------------ steps

    def _cell(self, book: Book) -> None:
        self._distributed(book, f"--gpus {self._count()}", _SMALL)

    def _default_cell(self, book: Book) -> None:
        self._distributed(book, "", _SMALL)

    def _cpu_cell(self, book: Book) -> None:
        outcome = self._finish(book, f"%%distributed --ranks {self._random.randint(1, 3)}\n{_SMALL}")
        if outcome.status != "ok" and not self._excused(book, outcome):
            raise Broken(f"{self._line}: CPU ranks failed: {outcome.text}")

    def _fresh_cell(self, book: Book) -> None:
        self._distributed(book, f"--gpus {self._count()} --fresh", _SMALL)

    def _waiting_cell(self, book: Book) -> None:
        self._distributed(book, f"--gpus {self._count()} --wait 0.3", _SMALL)

    def _keep(self, book: Book) -> None:
        self._distributed(book, f"--gpus {self._count()} --keep w", "w = [1]")

    def _drop(self, book: Book) -> None:
        self._finish(book, "w = None")

    def _restart_ranks(self, book: Book) -> None:
        self._pool(book, "%distributed_pool restart")

    def _resize(self, book: Book) -> None:
        self._pool(book, f"%distributed_pool resize --gpus {self._count()}")

    def _stop_ranks(self, book: Book) -> None:
        self._finish(book, "%distributed_pool stop")

    def _start_long(self, book: Book) -> None:
        book.notebook.start(f"%%distributed --gpus {self._count()}\n{_LONG}")
        try:
            book.notebook.until("it has begun", STEP_LIMIT_S)
        except AssertionError:  # it has ended: refused, or its ranks are gone
            self._judge(book, book.notebook._outcome, self._pinned(book))
            book.notebook.cell("")
        else:
            book.running = True

    def _interrupt(self, book: Book) -> None:
        book.notebook.interrupt()
        self._over(book, {"KeyboardInterrupt"})

    def _kill_running_rank(self, book: Book) -> None:
        os.kill(self._random.choice(self._pids(book, running=True)), signal.SIGKILL)
        self._over(book, {"RankLost", "PoolError"})

    def _detach_and_leave(self, book: Book) -> None:
        self._finish(book, f"%%distributed --gpus {self._count()} --detach --out run\nimport time\ntime.sleep(0.2)")
        self._finish(book, "run.wait(20) if 'run' in globals() and run is not None else None")

    def _kill_rank(self, book: Book) -> None:
        if pids := self._pids(book):
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)

    def _kill_kernel(self, book: Book) -> None:
        book.notebook.manager.signal_kernel(signal.SIGKILL)
        book.notebook.close()
        self._books[self._books.index(book)] = self._new_book(book.name)

    def _restart_kernel(self, book: Book) -> None:
        book.notebook.restart()
        book.running = False
        book.notebook.ok("%load_ext jupyter_distrib")

    def _lose_gpu(self, book: Book) -> None:
        """Have the driver lose a GPU until the next step of this kind, or find it again."""
        lost = [index for index, gpu in enumerate(self._bed.gpus) if gpu["lost"]]
        if lost:
            self._bed.use(lost[0], lost=False)
        elif free := [index for index in range(8) if index not in self._used()]:
            self._bed.use(self._random.choice(free), lost=True)

    def _fill_gpu(self, book: Book) -> None:
        self._bed.use(self._random.randrange(8), used_bytes=self._random.choice((0, 0, 30 << 30)))

    _while_idle: tuple[tuple[Callable[[Campaign, Book], None], int], ...] = (
        (_cell, 12),
        (_default_cell, 4),
        (_cpu_cell, 3),
        (_fresh_cell, 6),
        (_waiting_cell, 3),
        (_keep, 6),
        (_drop, 6),
        (_restart_ranks, 3),
        (_resize, 3),
        (_stop_ranks, 2),
        (_start_long, 6),
        (_detach_and_leave, 2),
        (_kill_rank, 4),
        (_kill_kernel, 1),
        (_restart_kernel, 2),
        (_lose_gpu, 1),
        (_fill_gpu, 2),
    )
    _while_running: tuple[tuple[Callable[[Campaign, Book], None], int], ...] = (
        (_interrupt, 6),
        (_kill_running_rank, 3),
        (_kill_kernel, 1),
        (_restart_kernel, 1),
        (_fill_gpu, 1),
    )

    # ------------------------------------------------------------------------------------------------ their outcome

    def _count(self) -> int:
        return self._random.choice((1, 2, 2, 3, 4, 4, 6, 8))

    def _distributed(self, book: Book, options: str, code: str) -> None:
        pinned = self._pinned(book)
        outcome = self._finish(book, f"%%distributed {options}\n{code}")
        self._judge(book, outcome, pinned)

    def _pool(self, book: Book, line: str) -> None:
        pinned = self._pinned(book)
        self._judge(book, self._finish(book, line), pinned)

    def _finish(self, book: Book, code: str) -> Outcome:
        self._line += f": {code.splitlines()[0]}"
        return book.notebook.cell(code, STEP_LIMIT_S)

    def _judge(self, book: Book, outcome: Outcome, pinned: set[int]) -> None:
        """Decide whether a cell may have failed: for GPUs that were not there, or for what was done to its ranks."""
        if outcome.ename == "" or self._excused(book, outcome):
            return
        self._line += f" -> {outcome.ename}: {outcome.evalue[:150]}"
        if "GPUs are visible here" in outcome.evalue and any(gpu["lost"] for gpu in self._bed.gpus):
            return
        refused = _FREE.match(outcome.evalue)
        if refused is None:
            raise Broken(f"{self._line}: {outcome.text}")
        lost = sum(gpu["lost"] for gpu in self._bed.gpus)
        if int(refused[1]) <= 8 - lost - len(pinned | self._pinned(book)):
            raise Broken(f"{self._line}: refused, but only GPUs {pinned} are at work or keep anything")

    def _excused(self, book: Book, outcome: Outcome) -> bool:
        """A rank that was killed a moment ago takes the cell with it that has begun by then, or what it kept."""
        return outcome.ename in ("RankLost", "ValueLost", "Interrupted")

    def _over(self, book: Book, expected: set[str]) -> None:
        outcome = book.notebook.finish(STEP_LIMIT_S)
        book.running = False
        if outcome.ename not in expected:
            raise Broken(f"{self._line}: ended with {outcome.ename or 'no error'}: {outcome.text}")

    # ------------------------------------------------------------------------------------------------ what must hold

    def _check(self) -> None:
        if found := self._bed.violations():
            raise Broken(f"after {self._line}: a GPU was given twice: {found}")
        if not wait_until(lambda: not self._shared(), 5.0):  # ranks of one group may be exchanged
            raise Broken(f"after {self._line}: two ranks stay on one GPU: {self._bed.contexts()}")
        if not wait_until(lambda: not self._used() - self._holders().keys(), 5.0):
            raise Broken(f"after {self._line}: GPUs {self._used()} are used, and only {self._holders()} leased")
        if not wait_until(lambda: not self._holders().keys() - self._of_groups(), 8.0):
            raise Broken(f"after {self._line}: {self._holders()} are leased, and ranks up on {self._of_groups()} only")

    def _shared(self) -> list[str]:
        held = [uuid for uuids in self._bed.contexts().values() for uuid in uuids]
        return [uuid for uuid in held if held.count(uuid) > 1]

    def _used(self) -> set[int]:
        return {number for numbers in self._bed.numbers().values() for number in numbers}

    def _groups(self) -> Iterator[m.GroupStatus]:
        for server in self._bed.status():
            yield from server.groups

    def _of_groups(self) -> set[int]:
        return {number for group in self._groups() for number in _gpus_of(group)}

    def _pinned(self, book: Book) -> set[int]:
        """Return the GPUs of ranks that do not yield to this notebook: they run, keep something, or are another
        agent's."""
        groups = [
            group
            for group in self._groups()
            if group.run or group.kept or (self._two_agents and not self._is_of(group, book))
        ]
        return {number for group in groups for number in _gpus_of(group)}

    def _holders(self) -> dict[int, str]:
        return {gpu.index: gpu.holder for server in self._bed.status() for gpu in server.gpus if gpu.holder}

    def _pids(self, book: Book, *, running: bool = False) -> list[int]:
        """Return the ranks of a notebook; with `running`, those that execute its cell."""
        groups = [group for group in self._groups() if self._is_of(group, book)]
        return [worker.pid for group in groups if group.run or not running for worker in group.workers]

    def _is_of(self, group: m.GroupStatus, book: Book) -> bool:
        return bool(re.search(rf"\bkernel {book.notebook.pid}\b", group.holder))

    def _new_book(self, name: str) -> Book:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._bed.folder))
        own = {"OMP_DISPLAY_ENV": "FALSE"} if self._two_agents and name == "B" else {}
        notebook = Notebook(folder, {**self._bed.environment, **own})
        notebook.ok("%load_ext jupyter_distrib")
        return Book(name=name, notebook=notebook)


def _gpus_of(group: m.GroupStatus) -> list[int]:
    return [int(found[1]) for worker in group.workers if (found := _WHERE.search(worker.device_name))]


def main() -> None:
    """Run a campaign by itself, with a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--two-agents", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jd-") as runtime, GpuBed(count=8) as bed:
        os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"] = runtime
        print(f"seed {options.seed}", flush=True)
        campaign = Campaign(bed, options.seed, two_agents=options.two_agents, log=lambda line: print(line, flush=True))
        try:
            campaign.run(60 * options.minutes)
        except BaseException:
            for book in campaign._books:
                with suppress(Exception):
                    book.notebook.close()
            raise
        print(f"{campaign.steps} steps, all well", flush=True)


if __name__ == "__main__":
    main()
