"""What a notebook sees when something of a Ray pool stops or dies: the right words, soon, and the next cell is good."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until_gone
from tests.product import crash_cases, restart_cases
from tests.ray.conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

GOOD = """\
%%distributed --strategy ddp
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
int(t)"""


@pytest.fixture
def book(kernel: Notebook) -> Iterator[Notebook]:
    assert_good(kernel)
    yield kernel
    kernel.forget()


def assert_good(book: Notebook) -> None:
    outcome = book.cell(GOOD, timeout_s=120)
    assert outcome.result == "ranks 0-3: 4", outcome.text


def processes(book: Notebook, what: str = "os.getpid()") -> list[int]:
    text = book.ok(f"%%distributed\nimport os\n(rank, {what})").result
    return [int(found) for found in re.findall(r", (\d+)\)", text)]


@pytest.mark.parametrize(
    ("where", "how", "rank"),
    [
        pytest.param(where, how, rank, id=f"{how} {where} on {rank}")
        for where, how in crash_cases.CASES
        for rank in ((0, 3) if how in ("raise", "SIGKILL") else (3,))
    ],
)
def test_the_rank_at_fault_is_named_and_the_next_cell_is_good(book: Notebook, where: str, how: str, rank: int) -> None:
    """Also rank 0, on whose node the store is."""
    outcome = crash_cases.run(book, where, how, rank, line="%%distributed --strategy ddp")
    assert outcome.wall_s < 15
    assert_good(book)


@pytest.mark.parametrize("victim", restart_cases.VICTIMS)
def test_a_cell_that_loses_a_rank_or_a_node_is_started_again(book: Notebook, victim: str) -> None:
    restart_cases.check(book, victim)
    assert_good(book)


def test_a_thread_that_raises_does_not_end_its_rank(book: Notebook) -> None:
    outcome = book.ok("%%distributed --strategy ddp\n" + crash_cases.cell("in a thread", "raise", 3))
    assert outcome.result == "ranks 0-3: 'went on'"
    assert "RuntimeError: boom" in outcome.view
    assert_good(book)


def test_a_rank_that_dies_between_cells_is_replaced_unnoticed(book: Notebook) -> None:
    pids = processes(book)
    os.kill(pids[3], signal.SIGKILL)
    book.ok(
        "import time\nfrom jupyter_distrib.kernel.session import session\n[group] = session.current().pools.groups()\n"
        f"while group.workers[3].pid == {pids[3]}: time.sleep(0.01)"
    )
    assert_good(book)
    assert [now == before for now, before in zip(processes(book), pids, strict=True)] == [True, True, True, False]


def test_a_rank_that_leaves_early_frees_those_that_wait_for_it(book: Notebook) -> None:
    cell = dedent("""\
        import sys, torch, torch.distributed as dist
        if rank == 3:
            sys.exit()
        dist.all_reduce(torch.ones(1))""")
    outcome = book.fails(f"%%distributed --strategy ddp\n{cell}")
    assert outcome.wall_s < 15
    assert_good(book)


def test_an_interrupt_stops_ranks_of_all_nodes_in_a_collective(book: Notebook) -> None:
    before = processes(book)
    book.start(
        dedent("""\
            %%distributed --strategy ddp
            import time, torch, torch.distributed as dist
            print('entered', flush=True)
            time.sleep(100) if rank == 2 else dist.all_reduce(torch.ones(1))""")
    )
    book.until("entered")
    book.interrupt()
    outcome = book.finish()
    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert_good(book)
    assert processes(book) == before, "the processes and what they keep live on"


def test_a_time_limit_holds_on_all_nodes(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""\
            %%distributed --timeout 0.5
            import time
            time.sleep(50)""")
    )
    assert outcome.ename == "RunTimeout"
    assert_good(book)


def test_who_is_waited_for_on_another_node_is_named_and_a_hang_timeout_ends_the_run_there_too(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""\
            %%distributed --strategy ddp --hang-timeout 7
            import time, torch, torch.distributed as dist
            if rank >= 2:
                time.sleep(100)
            dist.all_reduce(torch.ones(1))""")
    )
    assert outcome.ename == "RunTimeout", outcome.text
    assert (
        "its --hang-timeout is 7 s. Ranks 2-3 have not reached all_reduce #1; ranks 0-1 wait there (line 5). "
        "Ranks 2-3 run the cell (line 4)."
    ) in outcome.traceback, outcome.traceback
    assert outcome.wall_s < 30
    assert_good(book)


def test_an_agent_that_is_killed_is_reported_and_replaced_and_all_logs_are_there(book: Notebook) -> None:
    agents = processes(book, "os.getppid()")
    book.start(
        dedent("""\
            %%distributed --strategy ddp
            import time, torch.distributed as dist
            print('in', rank, flush=True)
            dist.barrier()
            print('all in', flush=True)
            time.sleep(100)""")
    )
    book.until("all in")
    os.kill(agents[3], signal.SIGKILL)
    outcome = book.finish()
    assert outcome.ename == "RankLost", outcome.text
    assert re.search(r"node 127\.0\.0\.[23] was lost: its agent has ended", outcome.traceback), outcome.traceback
    for rank in range(4):
        assert book.ok(f"%distributed_logs --rank {rank}").stdout.startswith(f"in {rank}\n")
    assert_good(book)


def test_a_coordinator_that_is_killed_leaves_nothing(book: Notebook) -> None:
    ranks = processes(book)
    coordinator = int(re.search(r"agent (\d+)", book.ok("%distributed_status").result)[1])  # type: ignore[index]
    book.start(
        dedent("""\
            %%distributed
            import time
            print('entered', flush=True)
            time.sleep(100)""")
    )
    book.until("entered")
    os.kill(coordinator, signal.SIGKILL)
    outcome = book.finish()
    assert "the process that holds the Ray cluster has ended" in outcome.traceback
    assert wait_until_gone(ranks, 10) == []
    assert_good(book)


@contextmanager
def filled(address: str) -> Iterator[None]:
    """The object store of this cluster's only node has no room left."""
    code = dedent(f"""\
        import pickle, ray, sys
        ray.init(address={address!r})
        full = [ray.put(pickle.PickleBuffer(bytes(1 << 20))) for _ in range(130)]
        read = ray.get(full)  # what is read is not spilled
        print('full', flush=True)
        sys.stdin.read()""")
    pipe, env = subprocess.PIPE, {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        yield
        process.stdin.close()


def test_values_that_the_object_store_cannot_take_fail_their_cell_alone(tmp_path: Path) -> None:
    """The ranks are there for the next."""
    own = Cluster(nodes=1, RAY_local_fs_capacity_threshold="0.0001")
    line = f"%%distributed --pool ray --insecure --address {own.address} --ranks 1\n"
    try:
        with Notebook(tmp_path) as book:
            book.ok("%load_ext jupyter_distrib")
            first = book.cell(f"{line.rstrip()} --keep pid\nimport os\npid = os.getpid()", timeout_s=150)
            assert first.status == "ok", first.text
            book.ok("large = bytearray(300 << 20)")
            assert book.cell(f"{line}len(large)", timeout_s=100).result == "rank 0: 314572800", "twice the store"
            book.ok("large = bytearray(300 << 20)")  # a value that is there already is not sent again
            book.ok("large[0] = 1")
            with filled(own.address):
                outcome = book.cell(f"{line}len(large)", timeout_s=100)
                assert "could not be put into Ray's object store" in outcome.traceback, outcome.text
            assert book.ok(f"{line}import os\npid == os.getpid()").result == "rank 0: True"
    finally:
        own.close()


DETACHED_RUNS = """\
from jupyter_distrib.kernel.session import detached
print(*sorted(each.run for each in detached.runs()))
"""
LARGE = "large = bytearray(200 << 20)"
AFTER_TWO_STEPS = """\
import errno, os, signal
from jupyter_distrib.serialization import shared_memory
_write_at = shared_memory._write_at
def _writing(fd, view, start):
    if start == 2 * shared_memory.STEP_BYTES:
        {what}
    _write_at(fd, view, start)
shared_memory._write_at = _writing
"""


@pytest.mark.parametrize(
    ("what", "ename", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt", "Stopped by you"),
        ("raise OSError(errno.ENOSPC, 'full')", "PayloadError", "210 MB of data must be handed over, but only"),
    ],
)
def test_a_cell_that_the_kernel_cannot_send_whole_leaves_its_ranks(
    book: Notebook, what: str, ename: str, said: str
) -> None:
    book.ok(f"{LARGE}\n{AFTER_TWO_STEPS.format(what=what)}")
    cell = dedent("""\
        %%distributed --keep mine
        import os
        mine = rank
        os.getpid()""")
    pids = book.ok(cell).result
    outcome = book.fails("%%distributed\nlen(large)")
    assert (outcome.ename, said in outcome.traceback) == (ename, True), outcome.text
    book.ok("shared_memory._write_at = _write_at")
    cell = dedent("""\
        %%distributed
        import os
        os.getpid()""")
    assert book.ok(cell).result == pids
    assert book.ok("%%distributed\nmine, len(large)").result.splitlines()[3] == "rank 3: (3, 209715200)"


def test_a_kernel_that_dies_while_it_copies_inputs_leaves_neither_ranks_nor_a_detached_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    use = f"%distributed_pool add lab --kind ray --address {cluster.address} --insecure --ranks 2 --nodes 2"
    load = f"%load_ext jupyter_distrib\n{use}\n%distributed_pool use lab"
    with Notebook(tmp_path) as book:
        book.ok(load)
        before = book.ok(DETACHED_RUNS).stdout
        pids = [int(pid) for pid in re.findall(r": (\d+)", book.ok("%%distributed\nimport os\nos.getpid()").result)]
        book.ok(f"{LARGE}\n{AFTER_TWO_STEPS.format(what='os.kill(os.getpid(), signal.SIGKILL)')}")
        book.start("%%distributed --detach\nlen(large)")
        assert wait_until_gone([book.pid], 60) == []
        assert wait_until_gone(pids, 30) == []
    with Notebook(tmp_path) as other:
        other.ok(load)
        assert other.ok(DETACHED_RUNS).stdout == before


def test_ranks_end_with_their_kernel(cluster: Cluster, tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        line = f"%%distributed --pool ray --insecure --address {cluster.address} --ranks 2 --nodes 2\n"
        ranks = [int(pid) for pid in re.findall(r": (\d+)", book.ok(line + "import os\nos.getpid()").result)]
        os.kill(book.pid, signal.SIGKILL)
        assert wait_until_gone(ranks, 5) == []


def test_a_detached_run_survives_its_kernel(cluster: Cluster, tmp_path: Path) -> None:
    use = f"%distributed_pool add lab --kind ray --address {cluster.address} --insecure --ranks 2 --nodes 2"
    flag = tmp_path / "go"
    with Notebook(tmp_path) as book:
        book.ok(f"%load_ext jupyter_distrib\n{use}\n%distributed_pool use lab")
        book.ok(
            dedent(f"""\
                %%distributed --detach --out run
                import os, time
                print('before')
                while not os.path.exists({str(flag)!r}):
                    time.sleep(0.05)
                print('after')
                rank * 10""")
        )
        cell = dedent("""\
            import time
            while not run.record.entry_count: time.sleep(0.05)
            print(run.id)""")
        name = book.ok(cell).stdout.strip()
    flag.touch()
    with Notebook(tmp_path) as other:
        other.ok(f"%load_ext jupyter_distrib\n{use}\n%distributed_pool use lab")
        other.ok(f"run = get_ipython().run_line_magic('distributed_attach', {name!r})")
        assert other.ok("run.result(timeout_s=60)").result == "rank 0: 0\nrank 1: 10"
        assert other.ok("print(run.logs(1))").stdout.split() == ["before", "after"]


def test_a_node_that_is_lost_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    """The last of the file: the node does not come back as it was."""
    with Notebook(tmp_path) as book:
        line = f"%%distributed --pool ray --insecure --address {cluster.address} --ranks 2 --nodes 2\n"
        book.ok("%load_ext jupyter_distrib")
        book.ok(line + "rank;")
        book.start(
            line
            + dedent("""\
                import time
                print('entered', flush=True)
                time.sleep(300)""")
        )
        book.until("[0-1] entered")
        cluster.ask("lose")
        outcome = book.finish(90)
        assert outcome.ename == "RankLost", outcome.text
        assert "node 127.0.0.3 was lost" in outcome.traceback
        told = book.ok("%distributed_logs").stdout
        cluster.ask("add")
        found = re.match(
            r"--- rank (\d)\nentered\nRank (\d) of run \S+ printed more, but the log is empty or gone", told
        )
        assert found is not None, told
        assert {found[1], found[2]} == {"0", "1"}, "the log of the other rank is on the other node"
        assert book.cell(line + "rank", timeout_s=90).result == "rank 0: 0\nrank 1: 1"
