"""Ranks, their children and the agent come and go as promised, whatever ends: a run, a kernel, the agent."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.testing import PoolClient
from tests.conftest import leftovers_after
from tests.notebook import Notebook
from tests.processes import agents, is_alive, ranks, wait_until_gone

GONE_S = 2.0

IN_COMPUTE = "x = 0\nwhile True: x += 1"
IN_COLLECTIVE = """\
import torch.distributed as dist
if rank == 1:
    import time
    time.sleep(600)
dist.barrier()"""
SWALLOWING = """\
import time
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass"""
GIL_HELD = "import ctypes\nctypes.PyDLL(None).sleep(600)"
WITH_CHILDREN = """\
import os, subprocess
plain = subprocess.Popen(['sleep', '600']).pid
own_session = subprocess.Popen(['setsid', 'sleep', '600']).pid
daemon = int(subprocess.check_output(['sh', '-c', 'setsid sleep 600 >/dev/null 2>&1 & echo $!']))
forked = os.fork()
if forked == 0:
    import time
    time.sleep(600)
alone = os.fork()
if alone == 0:
    import time
    os.setsid()
    time.sleep(600)
print('pids', plain, own_session, daemon, forked, alone, flush=True)
"""

pytestmark = pytest.mark.slow  # kernels and agents come and go


def _session(book: Notebook) -> str:
    return book.cell(
        "from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)"
    ).stdout.strip()


def _rank_pids(book: Notebook, ranks: int = 2) -> list[int]:
    book.cell(
        dedent(f"""\
            %%distributed --ranks {ranks} --out _pids
            import os
            os.getpid()""")
    )
    return [int(pid) for pid in book.cell("print(*_pids)").stdout.split()]


def _begin(book: Notebook, code: str) -> None:
    book.start(f"%%distributed --ranks 2 --strategy ddp\nprint('begun', flush=True)\n{code}")
    book.until("begun")


def test_ranks_stay_warm_between_cells(notebook: Notebook) -> None:
    assert _rank_pids(notebook) == _rank_pids(notebook)


def test_ranks_that_are_programs_of_their_own_stay_warm_too(notebook: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 1 --env PYTHONHASHSEED=1
        import os
        os.getpid()""")
    assert notebook.ok(cell).result == notebook.ok(cell).result


def test_fresh_takes_new_processes(notebook: Notebook) -> None:
    before = _rank_pids(notebook)
    notebook.cell(
        dedent("""\
            %%distributed --ranks 2 --fresh --out _pids
            import os
            os.getpid()""")
    )
    after = [int(pid) for pid in notebook.cell("print(*_pids)").stdout.split()]

    assert not set(before) & set(after)
    assert wait_until_gone(before, 5.0) == []


def test_unloading_ends_the_ranks(notebook: Notebook) -> None:
    pids = _rank_pids(notebook)
    notebook.cell("%unload_ext jupyter_distrib")

    assert wait_until_gone(pids, GONE_S) == []


@pytest.mark.parametrize(
    "code", [IN_COMPUTE, IN_COLLECTIVE, SWALLOWING, GIL_HELD], ids=["compute", "collective", "swallows", "gil"]
)
@pytest.mark.parametrize("end", ["restart", "kill"])
def test_a_kernel_takes_its_ranks_with_it(tmp_path: Path, code: str, end: str) -> None:
    with Notebook(tmp_path) as book:
        book.cell("%load_ext jupyter_distrib")
        session, pids = _session(book), _rank_pids(book)
        _begin(book, code)
        if end == "kill":
            os.kill(book.pid, signal.SIGKILL)
        else:
            book.restart()

        assert wait_until_gone(pids, GONE_S) == []
        leftovers_after(session, GONE_S)


def test_children_of_a_rank_end_with_it_however_they_were_started(notebook: Notebook) -> None:
    outcome = notebook.cell("%%distributed --ranks 1\n" + WITH_CHILDREN)
    line = next(line for line in outcome.view.splitlines() if "pids" in line)
    children = [int(word) for word in line.split("pids")[1].split()]
    assert all(is_alive(pid) for pid in children)

    notebook.cell("%distributed_pool stop")

    assert wait_until_gone(children, 5.0) == []


def test_children_of_a_killed_rank_end_too(notebook: Notebook) -> None:
    outcome = notebook.cell("%%distributed --ranks 1\n" + WITH_CHILDREN + "os.kill(os.getpid(), 9)")
    line = next(line for line in outcome.view.splitlines() if "pids" in line)

    assert outcome.ename == "RankLost"
    assert wait_until_gone([int(word) for word in line.split("pids")[1].split()], GONE_S) == []


def test_a_killed_agent_takes_the_ranks_with_it_and_the_next_cell_works(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with Notebook(tmp_path, env={"JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        book.cell("%load_ext jupyter_distrib")
        pids = _rank_pids(book)
        outcome = book.ok("%%distributed --ranks 2\n" + WITH_CHILDREN)
        children = [
            int(word) for line in outcome.view.splitlines() if "pids" in line for word in line.split("pids")[1].split()
        ]
        assert len(children) == 10
        _begin(book, IN_COMPUTE)
        (agent,) = agents(runtime)
        os.kill(agent, signal.SIGKILL)
        outcome = book.finish()

        assert outcome.ename == "RankLost"
        assert "Rank 0 is gone, because the agent that looks after the ranks has ended." in outcome.traceback
        assert wait_until_gone([*pids, *children], GONE_S) == []
        assert book.cell("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
        for pid in agents(runtime):
            os.kill(pid, signal.SIGTERM)


def test_the_first_cell_after_the_end_of_an_idle_agent_has_a_new_one(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with Notebook(tmp_path, env={"JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        book.cell("%load_ext jupyter_distrib")
        for _ in range(5):
            cell = dedent("""\
                %%distributed --ranks 2 --keep kept
                kept = rank
                rank""")
            assert book.ok(cell).result == "rank 0: 0\nrank 1: 1"
            (agent,) = agents(runtime)
            os.kill(agent, signal.SIGKILL)
            assert wait_until_gone([agent], GONE_S) == []
        assert book.fails("%%distributed\nkept").ename == "ValueLost"
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"
        for pid in agents(runtime):
            os.kill(pid, signal.SIGTERM)


def test_the_third_press_of_stop_gives_up_an_agent_that_is_frozen(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with Notebook(tmp_path, env={"JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        book.cell("%load_ext jupyter_distrib")
        _begin(book, IN_COMPUTE)
        (agent,) = agents(runtime)
        os.kill(agent, signal.SIGSTOP)
        try:
            presses = [threading.Timer(at_s, os.kill, (book.pid, signal.SIGINT)) for at_s in (0.0, 0.2, 1.6)]
            for press in presses:
                press.start()
            outcome = book.finish()
            for press in presses:
                press.join()
            assert outcome.ename == "KeyboardInterrupt"
            assert (
                f"process {agent} is stopped (SIGSTOP)"
                in book.ok(
                    "from jupyter_distrib.kernel.session import session as _s; print(_s.current().history[-1].record.ranks[0].exit.reason)"
                ).stdout
            )
        finally:
            os.kill(agent, signal.SIGCONT)
        assert book.cell("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
        for pid in agents(runtime):
            os.kill(pid, signal.SIGTERM)


LOST_MEANWHILE = """
import os, signal, time
from jupyter_distrib.kernel.session import cell_order
command = cell_order.command
def with_the_agent_lost(order, options, inputs, run, group, **more):
    cell_order.command = command
    os.kill(group.connection.ask().pid, signal.SIGKILL)
    while group.connection.state.name != "LOST" or group.connection.groups:
        time.sleep(0.01)
    return command(order, options, inputs, run, group, **more)
cell_order.command = with_the_agent_lost
"""
"""The agent ends after the ranks were found to be up, and before the cell is sent."""


def test_an_agent_that_is_killed_just_before_a_cell_is_sent_ends_that_cell(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with Notebook(tmp_path, env={"JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        book.cell("%load_ext jupyter_distrib")
        book.ok("%%distributed --ranks 2\nrank")
        book.ok(LOST_MEANWHILE)

        assert book.cell("%%distributed --ranks 2\nrank").ename == "RankLost"
        assert book.cell("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
        for pid in agents(runtime):
            os.kill(pid, signal.SIGTERM)


def test_two_kernels_share_an_agent_and_do_not_disturb_each_other(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("%%distributed --ranks 2 --keep thing\nthing = rank + 40")
    mine = _rank_pids(notebook)
    with Notebook(tmp_path) as other:
        other.cell("%load_ext jupyter_distrib")
        theirs = _rank_pids(other)
        agent = "get_ipython().run_line_magic('distributed_status', '').agent.split()[1]"
        assert other.cell(agent).result == notebook.cell(agent).result
        other.restart()
        assert wait_until_gone(theirs, GONE_S) == []

    assert _rank_pids(notebook) == mine
    assert notebook.cell("%%distributed --ranks 2\nthing").result == "rank 0: 40\nrank 1: 41"


def test_the_search_for_what_is_left_finds_ranks_and_what_they_have_forked() -> None:
    client = PoolClient(LocalPool())
    group = client.group(2)
    pids = {worker.pid for worker in group.workers}
    child = client.run(
        group,
        dedent("""\
            import os, time
            child = os.fork()
            if not child:
                time.sleep(600)
            child"""),
        ranks=(0,),
    )
    runtime = Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"])
    assert set(ranks(runtime, client.session)) == {*pids, child.values[0]}
    assert ranks(runtime, "another") == []
    client.close()

    leftovers_after(client.session)


def _counts(book: Notebook) -> dict[str, int]:
    """What must not grow, over ranks, agent and kernel."""
    book.cell(
        dedent("""\
            %%distributed --ranks 2 --out _c
            import os, threading
            (os.getpid(), len(os.listdir('/proc/self/fd')), threading.active_count())""")
    )
    cell = dedent("""\
        import os, threading
        _a = int(get_ipython().run_line_magic('distributed_status', '').agent.split()[1].strip(','))
        print(sum(c[1] for c in _c), sum(c[2] for c in _c), len(os.listdir(f'/proc/{_a}/fd')), len(os.listdir('/proc/self/fd')), threading.active_count(), len(open(f'/proc/{_a}/task/{_a}/children').read().split()))""")
    text = book.cell(cell).stdout
    names = ("rank fds", "rank threads", "agent fds", "kernel fds", "kernel threads", "agent children")
    return dict(zip(names, map(int, text.split()), strict=True))


def _preload_ordered(book: Notebook, before: dict[str, int]) -> dict[str, int]:
    """What is more than before; the kernel's own history database comes and goes with a descriptor."""
    slack = {"kernel fds": 2}
    return {name: count for name, count in _counts(book).items() if count > before[name] + slack.get(name, 0)}


SMALL_DDP = """\
%%distributed --ranks 2 --strategy ddp
import torch, torch.distributed as dist
model = torch.nn.Linear(8, 4)
x = torch.ones(2, 8)
model(x).sum().backward()
for p in model.parameters(): dist.all_reduce(p.grad)
x.sum().item()"""


@pytest.mark.parametrize(
    "runs", [pytest.param(30), pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_many_runs_leave_nothing_behind(notebook: Notebook, runs: int) -> None:
    for _ in range(5):
        assert notebook.cell(SMALL_DDP).status == "ok"
    before = _counts(notebook)
    for _ in range(runs):
        assert notebook.cell(SMALL_DDP).status == "ok"

    assert _preload_ordered(notebook, before) == {}


def test_many_failures_leave_nothing_behind(notebook: Notebook) -> None:
    bad = dedent("""\
        %%distributed --ranks 2 --strategy ddp
        import torch.distributed as dist
        if rank == 1:
            raise KeyError('x')
        dist.barrier()""")
    for _ in range(3):
        notebook.cell(bad)
    before = _counts(notebook)
    for _ in range(15):
        assert notebook.cell(bad).ename == "KeyError"

    assert _preload_ordered(notebook, before) == {}
