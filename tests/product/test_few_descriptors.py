"""Every kind of cell where the kernel, the agent or the ranks may open hardly any files: each cell ends, with its value or
with a sentence on the limit, and a cell that needs less works afterwards.

    python -m tests.product.test_few_descriptors MINUTES [SEED]
"""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.notebook import ROOT, Notebook, Outcome
from tests.processes import agents, wait_until_gone

LIMIT_S = 40.0
LIMITS = {"forkserver": (24, 26, 28, 32, 36, 40), "agent": (24, 28, 32, 36, 40, 48), "kernel": (67, 69, 72, 76, 80)}
"""The limits of the forkserver and its ranks; of the agent with these; of the kernel, which needs 65 itself, with all."""
MODULES = {
    "kernel": "ipykernel_launcher",
    "agent": "jupyter_distrib.agent",
    "forkserver": "jupyter_distrib.worker.process.forkserver",
}
SITE = """
import resource, sys
if {module!r} in sys.orig_argv:
    resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
"""
ADVICE = re.compile(r"Too many open files: the limit is (\d+) for each process \(ulimit -n\)\. Raise it with")
FEWER = "%%distributed --ranks 2\n[rank, world_size]"
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=2, num_workers=WORKERS):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
"""
SAVE = """
from jupyter_distrib import load, save
import os
folder = os.environ["FEW_FOLDER"]
for _ in range(3):
    save(folder + "/STRATEGYKEEP", model=model, optimizer=optimizer, **OPTIONS)
load(folder + "/STRATEGYKEEP", model=model, optimizer=optimizer)
"""
FILL = """
import builtins
builtins.held = []
try:
    while True: builtins.held.append(open("/dev/null"))
except OSError: pass
"""
FIGURE = """
import matplotlib
matplotlib.use("agg")
from matplotlib import pyplot
from IPython.display import display
display(pyplot.figure())
"""
EMPTY = "import builtins\nif hasattr(builtins, 'held'): del builtins.held\n"


def trained(workers: int = 0) -> str:
    return TRAIN.replace("WORKERS", str(workers))


def saved(strategy: str, keep: str) -> str:
    options = "{'keep': 2}" if keep else "{}"
    return trained() + SAVE.replace("STRATEGY", strategy).replace("KEEP", keep).replace("OPTIONS", options)


CELLS: dict[str, tuple[str, str]] = {
    "plain": ("", "[rank, world_size]"),
    "values": ("", "'x' * 100"),
    "large values": ("", "b'x' * 10_000_000"),
    "capture": ("", "len(large)"),
    "profile": ("--strategy ddp --profile", trained()),
    "collective": ("--strategy ddp", "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))"),
    "keep": ("--keep kept", "kept = rank"),
    "ddp": ("--strategy ddp", trained()),
    "fsdp": ("--strategy fsdp", trained()),
    "save": ("--strategy ddp", saved("ddp", "")),
    "save, keep": ("--strategy fsdp", saved("fsdp", "keep")),
    "loader": ("--strategy ddp", trained(workers=2)),
    "display": ("", "from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))"),
    "figure": ("", FIGURE),
    "program": ("", "import subprocess\nsubprocess.run(['echo', 'x'], capture_output=True, check=True).stdout"),
    "program left": ("", "import subprocess\nprogram = subprocess.Popen(['sleep', '2'])"),
    "files": ("", "files = [open('/dev/null') for _ in range(60)]"),
    "full": ("", FILL + "b'x' * 1_000_000"),
    "full, then fails": ("", FILL + "1 / 0"),
    "full, capture": ("", FILL + "len(large)"),
    "full, program": ("", FILL + "import os\nos.fork() or os._exit(0)\nlen(large)"),
    "full, collective": (
        "--strategy ddp",
        FILL + "import torch.distributed as dist, torch\ndist.all_reduce(torch.ones(1))",
    ),
    "full, new group": ("--strategy ddp", FILL + "import torch.distributed as dist\ndist.new_group()"),
    "one waits": (
        "--strategy ddp",
        "import torch, torch.distributed as dist\n" + FILL + "if rank: 1 / 0\ndist.barrier()",
    ),
}
MAGICS = ("%distributed_status", "%distributed_status --doctor", "%distributed_runs")
QUICK = (
    "plain",
    "large values",
    "files",
    "full",
    "full, capture",
    "one waits",
    "program left",
    "full, then fails",
    "plain",
)


class FewDescriptors:
    """Cells in one notebook, of which one process may open hardly any files.

    Args:
        where: The process that begins with the limit: kernel, agent or forkserver.
    """

    def __init__(self, book: Notebook, where: str, limit: int) -> None:
        self._book, self._where, self._limit = book, where, limit
        self.told: list[str] = []
        """The cells so far, with their ends."""
        assert book.cell("%load_ext jupyter_distrib\nlarge = bytes(100_000_000)").status == "ok"

    def step(self, kind: str) -> None:
        """Run a cell, then one that needs less."""
        self._ends_well(kind, self._cell(kind))
        empty = f"%%distributed --ranks 2\n{self._check()}{EMPTY}"
        for code in (empty, FEWER):
            outcome = self._book.cell(code, LIMIT_S)
            self._ends_well(f"after {kind}", outcome)
        if self._has_room:
            assert outcome.result == "rank 0: [0, 2]\nrank 1: [1, 2]", f"{self}\n{outcome.text}"

    def magic(self, line: str) -> None:
        self._ends_well(line, self._book.cell(line, LIMIT_S))

    def debug(self) -> None:
        """Answer the debugger, which comes unless the ranks cannot be started."""
        self._book.start(f"%%distributed --ranks 2 --debug\n{self._check()}1 / 0", keyboard=True)
        if self._book.shows("is stopped at", LIMIT_S):
            self._book.types("p rank", "q")
        else:
            assert not self._has_room, f"{self}\n{self._book.finish(LIMIT_S).text}"
        self._ends_well("debug", self._book.finish(LIMIT_S), wanted="ZeroDivisionError")

    def detach(self) -> None:
        """Detach a run, look at its stacks, and fetch its result."""
        code = f"{self._check()}import time\nend = time.monotonic() + 6\nwhile time.monotonic() < end: sum(range(99))\nrank"
        outcome = self._book.cell(f"%%distributed --ranks 2 --detach --out run\n{code}", LIMIT_S)
        self._ends_well("detach", outcome)
        if outcome.status == "ok":
            self._ends_well("flame", self._book.cell("%distributed_flame", LIMIT_S))
            self._ends_well("attach", self._book.cell("run.result()", LIMIT_S))

    def __str__(self) -> str:
        return f"{self._where} {self._limit}: {self.told}"

    @property
    def _has_room(self) -> bool:
        """Return whether there is room for two idle ranks."""
        return self._limit >= {"forkserver": 24, "agent": 40, "kernel": 72}[self._where]

    def _check(self) -> str:
        return f"import resource\nassert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == {self._limit}\n"

    def _cell(self, kind: str) -> Outcome:
        options, body = CELLS[kind]
        return self._book.cell(f"%%distributed --ranks 2 {options}\n{self._check()}{body}", LIMIT_S)

    def _ends_well(self, kind: str, outcome: Outcome, wanted: str = "") -> None:
        self.told.append(f"{kind}: {outcome.ename or outcome.status}")
        text = f"{self}\n{outcome.text}"
        assert not re.search("SIGABRT|SIGSEGV|SIGBUS|AssertionError", outcome.text), text
        if outcome.status != "ok" and outcome.ename not in ("ZeroDivisionError", wanted):
            assert set(ADVICE.findall(outcome.text)) == {str(self._limit)}, text


@contextmanager
def few_descriptors(folder: Path, where: str, limit: int) -> Iterator[FewDescriptors]:
    """Give a notebook with an agent of its own, whose processes are gone afterwards."""
    site, runtime = folder / "site", folder / "run"
    site.mkdir(parents=True)
    code = SITE.format(module=MODULES[where], limit=limit)
    (site / "sitecustomize.py").write_text(code)
    env = {
        "JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime),
        "JUPYTER_DISTRIB_LOG_DIR": str(folder / "logs"),
        "FEW_FOLDER": str(folder),
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
    }
    try:
        with Notebook(folder, env) as book:
            yield FewDescriptors(book, where, limit)
    finally:
        found = agents(runtime)
        for agent in found:
            os.kill(agent, signal.SIGTERM)
        left = wait_until_gone(found, 20)
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize(("where", "limit"), [("forkserver", 26), ("agent", 36), ("kernel", 69)])
def test_a_cell_with_few_descriptors_ends_and_says_why(tmp_path: Path, where: str, limit: int) -> None:
    with few_descriptors(tmp_path, where, limit) as cells:
        for kind in QUICK:
            cells.step(kind)
        cells.debug()
        for line in MAGICS:
            cells.magic(line)


def _main() -> None:
    minutes, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    end_s, chance, failures = time.monotonic() + 60 * minutes, random.Random(seed), 0
    while time.monotonic() < end_s:
        where = chance.choice([*LIMITS])
        limit, folder = chance.choice(LIMITS[where]), Path(tempfile.mkdtemp(prefix="jd-"))
        try:
            with few_descriptors(folder, where, limit) as cells:
                for kind in chance.sample([*CELLS], 8):
                    cells.step(kind)
                for step in chance.sample(
                    [cells.debug, cells.detach, *(lambda line=m: cells.magic(line) for m in MAGICS)], 2
                ):
                    step()
                print(cells, flush=True)
        except (AssertionError, queue.Empty) as error:
            failures += 1
            print(f"FAILED {where} {limit} in {folder}: {error!r}", flush=True)
    print(f"seed {seed}: {failures} failures")


if __name__ == "__main__":
    _main()
