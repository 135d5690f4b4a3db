"""Every kind of cell where the kernel, the agent or the ranks may open hardly any files: each cell ends, with its value or
with a sentence on the limit, and a cell that needs less works afterwards.

    python -m tests.product.test_few_descriptors MINUTES [SEED]
"""

from __future__ import annotations

import os
import queue
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook, Outcome
from tests.processes import agents, tree, wait_until_gone

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
    "full, program": (
        "",
        FILL
        + dedent("""\
            import os
            os.fork() or os._exit(0)
            len(large)"""),
    ),
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
QUICK = ("files", "full", "full, capture", "one waits", "program left", "full, then fails", "plain")


class FewDescriptors:
    """Cells in one notebook, of which one process may open hardly any files.

    Args:
        where: The process that begins with the limit: kernel, agent or forkserver.
    """

    def __init__(self, book: Notebook, where: str, limit: int, env: dict[str, str]) -> None:
        self.book, self._where, self._limit, self.env = book, where, limit, env
        self.told: list[str] = []
        """The cells so far, with their ends."""
        assert book.cell("%load_ext jupyter_distrib\nlarge = bytes(100_000_000)").status == "ok"

    def step(self, kind: str) -> None:
        """Run a cell, then one that needs less."""
        self._ends_well(kind, self._cell(kind), wanted="KeyboardInterrupt" if kind == "loader" else "")
        empty = f"%%distributed --ranks 2\n{self._check()}{EMPTY}"
        for code in (empty, FEWER):
            outcome = self.book.cell(code, LIMIT_S)
            self._ends_well(f"after {kind}", outcome)
        if self._has_room:
            assert outcome.result == "rank 0: [0, 2]\nrank 1: [1, 2]", f"{self}\n{outcome.text}"

    def magic(self, line: str) -> None:
        self._ends_well(line, self.book.cell(line, LIMIT_S))

    def debug(self) -> None:
        """Answer the debugger, which comes unless the ranks cannot be started."""
        self.book.start(f"%%distributed --ranks 2 --debug\n{self._check()}1 / 0", keyboard=True)
        if self.book.shows("is stopped at", LIMIT_S):
            self.book.types("p rank", "q")
        else:
            assert not self._has_room, f"{self}\n{self.book.finish(LIMIT_S).text}"
        self._ends_well("debug", self.book.finish(LIMIT_S), wanted="ZeroDivisionError")

    def detach(self) -> None:
        """Detach a run, look at its stacks, and fetch its result."""
        code = f"{self._check()}import time\nend = time.monotonic() + 6\nwhile time.monotonic() < end: sum(range(99))\nrank"
        outcome = self.book.cell(f"%%distributed --ranks 2 --detach --out run\n{code}", LIMIT_S)
        self._ends_well("detach", outcome)
        if outcome.status == "ok":
            self._ends_well("flame", self.book.cell("%distributed_flame", LIMIT_S))
            self._ends_well("attach", self.book.cell("run.result()", LIMIT_S))

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
        self.book.start(f"%%distributed --ranks 2 {options}\n{self._check()}{body}")
        try:
            return self.book.finish(LIMIT_S)
        except AssertionError as error:
            if kind != "loader" or "Too many open files" not in str(error):
                raise
        self.book.interrupt()  # a worker of torch's loader meets that error for ever, and prints it
        return self.book.finish(LIMIT_S)

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
            yield FewDescriptors(book, where, limit, env)
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


LOST = "import os\nif rank == 1: os._exit(3)"
AT_EACH: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {
    "agent": (
        (0, 1, 2, 3, 8, 17, 28),
        {"b'x' * 10_000_000": "--ranks 2", "len(large)": "--ranks 2", "rank": "--ranks 3", LOST: "--ranks 2"},
    ),
    "forkserver": ((0, 3, 11, 12, 28), {LOST: "--ranks 2", "rank": "--ranks 3"}),
    "rank": (
        (0, 1, 2, 16),
        {
            "len(large)": "--ranks 2",
            "b'x' * 10_000_000": "--ranks 2",
            CELLS["collective"][1]: "--ranks 2 --strategy ddp",
            "import subprocess\nprogram = subprocess.Popen(['sleep', '0'])": "--ranks 2",
        },
    ),
    "kernel": (
        (0, 1, 16),
        {
            "print('shown at once', flush=True)\nsum(range(30_000_000))": "--ranks 2",
            "b'x' * 10_000_000": "--ranks 2",
            "len(large)": "--ranks 2",
            "rank": "--ranks 3",
        },
    ),
}
"""The numbers of files that one process may still open, and the cells that then need some, with their options."""


def give_room(pid: int, room: int) -> int:
    """Let a process open just so many more files; returns its limit, 0 if it has ended, as one that forks ranks does."""
    with suppress(FileNotFoundError, ProcessLookupError):
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        limit = [number for number in range(room + len(used) + 1) if number not in used][room]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
        return limit
    return 0


def give_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))


def limited(where: str, book: Notebook, runtime: Path) -> list[int]:
    """The processes that are to have little room."""
    cell = dedent("""\
        %%distributed --ranks 2
        import os
        f'rank {os.getpid()}'""")
    outcome = book.cell(cell)
    if outcome.ename == "RankLost":  # of a rank that could not get what comes between two cells
        assert ADVICE.search(outcome.text), outcome.text
        outcome = book.ok(cell)
    found = re.findall(r"'(\w+) (\d+)'", outcome.result)
    (agent,) = agents(runtime)
    of_ranks = [int(pid) for _, pid in found]
    match where:
        case "kernel":
            return [book.pid]
        case "agent":
            return [agent]
        case "rank":
            return of_ranks
        case _:
            return [pid for pid in tree(agent)[1:] if pid not in of_ranks]


@pytest.mark.slow
@pytest.mark.parametrize("where", AT_EACH)
def test_whatever_room_is_left_a_cell_ends_and_says_why(tmp_path: Path, where: str) -> None:
    rooms, bodies = AT_EACH[where]
    failed: dict[int, set[str]] = {room: set() for room in rooms}
    with few_descriptors(tmp_path, "kernel", 4096) as cells:
        for room in rooms:
            pids = limited(where, cells.book, tmp_path / "run")
            for body, options in bodies.items():
                if where in ("rank", "forkserver"):  # they may have been replaced
                    pids = limited(where, cells.book, tmp_path / "run")
                limits = {give_room(pid, room) for pid in pids}
                outcome = cells.book.cell(f"%%distributed {options}\n{body}", LIMIT_S)
                give_all(pids)
                if outcome.status != "ok" and not (body == LOST and outcome.ename == "RankLost"):
                    named = {int(limit) for limit in ADVICE.findall(outcome.text)}
                    assert named, f"{where} with room for {room}: {body}\n{outcome.text}"
                    assert named <= limits
                    failed[room].add(body)
    assert failed[rooms[0]], "something needs more"
    assert not failed[rooms[-1]]


@pytest.mark.slow
def test_what_a_cell_holds_the_next_one_can_let_go(tmp_path: Path) -> None:
    """Also if it is the first one of another strategy."""
    with few_descriptors(tmp_path, "forkserver", 64) as cells:
        cells.book.ok(f"%%distributed --ranks 2 --strategy ddp\n{FILL}")
        cells.book.ok(f"%%distributed --ranks 2\n{EMPTY}")
        assert cells.book.ok(FEWER).result == "rank 0: [0, 2]\nrank 1: [1, 2]"


@pytest.mark.slow
def test_ranks_that_missed_their_new_store_meet_as_soon_as_there_is_room(tmp_path: Path) -> None:
    """Ranks that raise get a new store, whose socket comes to a rank that the failed cell has left full."""
    with few_descriptors(tmp_path, "forkserver", 64) as cells:
        failed = cells.book.cell(
            f"%%distributed --ranks 2 --strategy ddp\n{FILL.replace('builtins.held', 'held')}1 / 0"
        )
        assert failed.ename == "ZeroDivisionError"
        code = f"%%distributed --ranks 2 --strategy ddp\n{CELLS['collective'][1]}\nrank"
        assert cells.book.ok(code).result == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_a_notebook_for_which_there_is_no_room_is_told_so_and_served_later(tmp_path: Path) -> None:
    with few_descriptors(tmp_path, "kernel", 4096) as cells, Notebook(tmp_path, cells.env) as book:
        limited("agent", cells.book, tmp_path / "run")
        (agent,) = agents(tmp_path / "run")
        book.ok("import jupyter_distrib")
        for pid, words in (
            (agent, "the agent that looks after the ranks cannot serve this notebook: "),
            (book.pid, ""),
        ):
            limit = give_room(pid, 0)
            if pid == agent:
                book.ok("%load_ext jupyter_distrib")
            outcome = book.cell("%%distributed --ranks 1\nrank", LIMIT_S)
            give_all([pid])
            assert outcome.ename == "PoolError", outcome.text
            assert words in outcome.text
            assert f"the limit is {limit} " in outcome.text
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"


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
