"""Random cells and faults in one notebook on CPU ranks: ranks, forkserver and agent are killed, the kernel restarts, Stop is
pressed. After each step a cell gives the right values within seconds; in the end nothing is left.

    python -m tests.product.test_campaign MINUTES [SEED]
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import agents, wait_until_gone

STEPS = 12
LIMIT_S = 40.0
BEGUN = "import os\nprint('begun', rank, os.getpid(), flush=True)\n"
ENDLESS = f"{BEGUN}import time\nwhile True:\n    time.sleep(0.01)"
WAITING = (
    f"{BEGUN}import time, torch, torch.distributed as dist\n"
    "if rank == 1:\n    time.sleep(600)\ndist.all_reduce(torch.ones(1))"
)


class Campaign:
    """The steps in one notebook.

    Args:
        book: The notebook.
        runtime: The folder of its agent.
    """

    def __init__(self, book: Notebook, runtime: Path, seed: int) -> None:
        self._book, self._runtime, self._random = book, runtime, random.Random(seed)
        self.told: list[str] = []
        """The steps so far, for the message of a failure."""
        self._load()

    def step(self) -> None:
        """Do something at random, then check that the next cell is right."""
        fault = self._random.choice(FAULTS)
        self.told.append(fault.__name__)
        fault(self)
        size = self._random.choice((1, 2, 3))
        outcome = self._book.cell(f"%%distributed --ranks {size} --strategy ddp\n[rank, world_size]", LIMIT_S)
        wanted = "\n".join(f"rank {rank}: [{rank}, {size}]" for rank in range(size))
        assert outcome.result == wanted, f"{self.told}: {outcome.text}"

    def _load(self) -> None:
        assert self._book.cell("%load_ext jupyter_distrib").status == "ok"

    def _begin(self) -> list[int]:
        """Begin a run without an end; return the pids of its ranks, which may be others than before: idle ranks are
        exchanged for better ones."""
        body = self._random.choice((ENDLESS, WAITING))
        self._book.start(f"%%distributed --ranks 2 --strategy ddp\n{body}")
        self._book.until("begun 0")
        text = self._book.until("begun 1").text
        return [int(pid) for pid in re.findall(r"begun [01] (\d+)", text)]

    def _ends(self, *names: str) -> None:
        outcome = self._book.finish(LIMIT_S)
        assert outcome.ename in names, f"{self.told}: {outcome.text}"

    def _ranks(self) -> list[int]:
        outcome = self._book.cell(
            dedent("""\
                %%distributed --ranks 2 --out _pids
                import os
                os.getpid()"""),
            LIMIT_S,
        )
        assert outcome.status == "ok", f"{self.told}: {outcome.text}"
        return [int(pid) for pid in self._book.cell("print(*_pids)").stdout.split()]

    def press(self) -> None:
        self._begin()
        for _ in range(self._random.choice((1, 1, 2))):
            self._book.interrupt()
        self._ends("KeyboardInterrupt")

    def kill_rank_in_a_run(self) -> None:
        os.kill(self._random.choice(self._begin()), signal.SIGKILL)
        self._ends("RankLost")

    def kill_idle_rank(self) -> None:
        pid = self._random.choice(self._ranks())
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid], 5)

    def kill_forkserver(self) -> None:
        ranks = self._ranks()
        for agent in agents(self._runtime):
            for pid in set(_children(agent)) - set(ranks):
                os.kill(pid, signal.SIGKILL)

    def kill_idle_agent(self) -> None:
        self._ranks()
        found = agents(self._runtime)
        for agent in found:
            os.kill(agent, signal.SIGKILL)
        wait_until_gone(found, 5)

    def kill_agent_in_a_run(self) -> None:
        self._begin()
        for agent in agents(self._runtime):
            os.kill(agent, signal.SIGKILL)
        self._ends("RankLost")

    def restart_kernel(self) -> None:
        if self._random.random() < 0.5:
            self._begin()
        self._book.restart()
        self._load()

    def raise_on_a_rank(self) -> None:
        outcome = self._book.cell("%%distributed --ranks 2 --strategy ddp\n1 / (rank - 1)", LIMIT_S)
        assert outcome.ename == "ZeroDivisionError", f"{self.told}: {outcome.text}"

    def leave_a_rank(self) -> None:
        outcome = self._book.cell(
            dedent("""\
                %%distributed --ranks 2
                import os
                if rank == 1:
                    os._exit(3)"""),
            LIMIT_S,
        )
        assert outcome.ename == "RankLost", f"{self.told}: {outcome.text}"


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


FAULTS: tuple[Callable[[Campaign], None], ...] = (
    Campaign.press,
    Campaign.press,
    Campaign.kill_rank_in_a_run,
    Campaign.kill_idle_rank,
    Campaign.kill_forkserver,
    Campaign.kill_idle_agent,
    Campaign.kill_agent_in_a_run,
    Campaign.restart_kernel,
    Campaign.raise_on_a_rank,
    Campaign.leave_a_rank,
)


@contextmanager
def campaign(folder: Path, seed: int) -> Iterator[Campaign]:
    """Give a campaign in a notebook of its own, whose processes are gone afterwards."""
    runtime = folder / "run"
    with Notebook(folder, env={"JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        yield Campaign(book, runtime, seed)
    found = agents(runtime)
    for agent in found:
        os.kill(agent, signal.SIGTERM)
    assert wait_until_gone(found, 20) == []


@pytest.mark.slow
def test_after_any_fault_the_next_cell_is_right(tmp_path: Path) -> None:
    with campaign(tmp_path, seed=20) as steps:
        for _ in range(STEPS):
            steps.step()


def _main() -> None:
    minutes, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    end_s = time.monotonic() + 60 * minutes
    with campaign(Path(tempfile.mkdtemp(prefix="jd-")), seed) as steps:
        while time.monotonic() < end_s:
            steps.step()
        print(f"seed {seed}: {len(steps.told)} steps")


if __name__ == "__main__":
    _main()
