"""Stalls of real ranks: who waits for whom is told in seconds, and nothing else is."""

from __future__ import annotations

import os
import queue
import signal
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook

GROUP = """\
import torch, time, torch.distributed as dist
dist.init_process_group('gloo')
dist.all_reduce(torch.ones(2))
"""
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def client() -> Iterator[PoolClient]:
    client = PoolClient(LocalPool())
    yield client
    client.close()


@dataclass
class Follower:
    """The events of one run, as they come."""

    client: PoolClient
    run: str
    events: list[m.RunEvent] = field(default_factory=list)

    def until(self, *kinds: type) -> m.RunEvent:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                event = self.client.seen.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kinds} in {self.events}") from None
            if event.run == self.run:
                self.events.append(event)
                if isinstance(event, kinds):
                    return event

    def of(self, kind: type) -> list[m.RunEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def follow(client: PoolClient, group: m.WorkerGroupOpened, source: str, **more: object) -> Follower:
    return Follower(client, client.start(group, source, **more))


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_goes_on_when_it_does(client: PoolClient) -> None:
    group = client.group(2)
    run = follow(
        client,
        group,
        GROUP
        + dedent("""\
            for _ in range(40):
                dist.all_reduce(torch.ones(1))
                time.sleep(0.1)"""),
    )
    run.until(m.Started)
    pid = group.workers[1].pid
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        stalled = run.until(m.Stalled)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(stalled, m.Stalled)
    assert f"Rank 1 is stopped (SIGSTOP); `kill -CONT {pid}` resumes it." in stalled.text
    assert stalled.at_s - began_s < 10
    run.until(m.Ended)
    assert len(run.of(m.Returned)) == 2
    client.close_group(group)


CASES = {
    "late": (
        GROUP + dedent("""\
            def load():
                time.sleep(60)
            if rank == 0:
                load()
            dist.all_reduce(torch.ones(4))"""),
        "Rank 0 has not reached all_reduce #2; ranks 1-2 wait there (line 8). Rank 0 runs load() (line 5).",
    ),
    "spins": (
        GROUP + dedent("""\
            if rank == 1:
                while True: pass
            dist.all_reduce(torch.ones(4))"""),
        "Rank 1 has not reached all_reduce #2; ranks 0, 2 wait there (line 6). Rank 1 runs the cell (line 5).",
    ),
    "lock": (
        GROUP + dedent("""\
            if rank == 0:
                sum(range(10**11))
            dist.all_reduce(torch.ones(4))"""),
        "ranks 1-2 wait there (line 6). Rank 0 is in C code that does not release Python's lock (line 5).",
    ),
    "barrier": (
        GROUP + "if rank == 0:\n    dist.barrier()",
        "Only rank 0 called barrier #2 (line 5, inside `if rank == 0`). Ranks 1-2 have left the cell.",
    ),
    "order": (
        GROUP + dedent("""\
            if rank == 0:
                dist.barrier()
            dist.all_reduce(torch.ones(2))"""),
        "#2 rank 0 calls barrier (line 5, inside `if rank == 0`) and ranks 1-2 call all_reduce (line 6): collectives match",
    ),
    "rendezvous": (
        dedent("""\
            import torch, time, torch.distributed as dist
            if rank == 2:
                time.sleep(60)
            dist.init_process_group('gloo')"""),
        "Rank 2 has not reached init_process_group; ranks 0-1 wait there (line 4). Rank 2 runs the cell (line 3).",
    ),
    "uneven": (
        GROUP + dedent("""\
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            for _ in range(5 + (rank == 0)):
                model(torch.ones(1, 2)).sum().backward()"""),
        "rank 0 waits there (line 6). Ranks 1-2 have left the cell.",
    ),
    "message": (
        GROUP + dedent("""\
            if rank == 0:
                dist.recv(torch.ones(2), src=1)
            else:
                time.sleep(60)"""),
        "Rank 0 waits in recv (line 5, inside `if rank == 0`) for another rank. Ranks 1-2 run the cell (line 7).",
    ),
}  # fmt: skip


@pytest.mark.slow
def test_every_kind_of_stall_is_named(client: PoolClient) -> None:
    """All kinds side by side, each in ranks of its own."""
    groups = {name: client.group(3) for name in CASES}
    runs = {name: client.start(groups[name], source) for name, (source, _) in CASES.items()}
    names = {run: name for name, run in runs.items()}
    told: dict[str, str] = {}
    heard: dict[str, str] = {}
    deadline = time.monotonic() + 90
    while groups and (left_s := deadline - time.monotonic()) > 0:
        try:
            event = client.seen.get(timeout=left_s)
        except queue.Empty:
            break
        name = names.get(event.run, "")
        if isinstance(event, m.Stalled) and name in groups:
            heard[name] = event.text
            if CASES[name][1] in event.text:
                told[name] = event.text
                client.close_group(groups.pop(name))  # one that computes is told to wait for a processor otherwise
    for group in groups.values():
        client.close_group(group)
    assert told.keys() == CASES.keys(), [heard.get(name) for name in CASES.keys() - told.keys()]


@pytest.mark.slow
def test_computing_is_not_a_stall_on_any_rank(client: PoolClient) -> None:
    group = client.group(2)
    source = GROUP + dedent("""\
        a = torch.ones(400, 400)
        t = time.monotonic()
        while time.monotonic() - t < 12: a @ a""")
    run = follow(client, group, source)
    run.until(m.Ended)
    assert run.of(m.Stalled) == []
    assert len(run.of(m.Returned)) == 2
    client.close_group(group)


@pytest.mark.slow
def test_a_stall_that_is_over_is_said_to_be(client: PoolClient) -> None:
    group = client.group(2)
    run = follow(
        client,
        group,
        GROUP
        + dedent("""\
            if rank == 0: time.sleep(7)
            dist.all_reduce(torch.ones(1))
            time.sleep(3)"""),
    )
    run.until(m.Stalled)
    run.until(m.Moved)
    run.until(m.Ended)
    assert len(run.of(m.Returned)) == 2
    client.close_group(group)


@pytest.mark.slow
def test_a_stall_is_shown_while_it_lasts_and_when_it_is_stopped(shared_notebook: Notebook) -> None:
    shared_notebook.start(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch, time, torch.distributed as dist
            if rank == 0:
                time.sleep(60)
            dist.all_reduce(torch.ones(1))""")
    )
    words = "Rank 0 has not reached all_reduce #1; rank 1 waits there (line 5)."
    shared_notebook.until(words)
    shared_notebook.interrupt()
    outcome = shared_notebook.finish()
    assert outcome.ename == "KeyboardInterrupt"
    assert words in outcome.traceback
    assert words in outcome.view


@pytest.mark.slow
def test_a_hang_timeout_stops_the_run_with_the_reason(shared_notebook: Notebook) -> None:
    outcome = shared_notebook.cell(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp --hang-timeout 6
            import torch, time, torch.distributed as dist
            if rank == 0:
                time.sleep(60)
            dist.all_reduce(torch.ones(1))""")
    )
    assert outcome.ename == "RunTimeout"
    assert "its --hang-timeout is 6 s. Rank 0 has not reached all_reduce #1" in outcome.traceback
    assert shared_notebook.ok("%%distributed --ranks 2\nrank").result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("dist.broadcast(x, 0) if rank == 0 else dist.all_reduce(x)", "Detected mismatch between collectives"),
        ("dist.all_reduce(torch.ones(2 + rank))", "Detected mismatch between collectives"),
        ("dist.all_reduce(x if rank else x.double())", "Detected mismatch between collectives"),
    ],
)
@pytest.mark.versions
def test_check_names_calls_that_do_not_match(shared_notebook: Notebook, cell: str, words: str) -> None:
    top = "%%distributed --ranks 2 --strategy ddp"
    cell = f"import torch, torch.distributed as dist\nx = torch.ones(2)\n{cell}"
    shared_notebook.ok(
        dedent(f"""\
            {top}
            import torch, torch.distributed as dist
            dist.all_reduce(torch.ones(1))""")
    )
    outcome = shared_notebook.fails(f"{top} --check\n{cell}")
    assert words in outcome.traceback
    # The next cell without it has a group that checks nothing.
    source = dedent(f"""\
        {top}
        import torch.distributed as dist
        str(dist.get_debug_level())""")
    debug = shared_notebook.ok(source).result
    assert "OFF" in debug


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "wrapped"), [("ddp", False), ("ddp", True), ("fsdp", False), ("tp", False)])
@pytest.mark.versions
def test_a_training_with_check_ends_as_one_without(shared_notebook: Notebook, strategy: str, wrapped: bool) -> None:
    cell = textwrap.dedent("""
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        if wrapped:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
        loss.item()
    """)
    shared_notebook.ok(f"wrapped = {wrapped}")
    without, checked = (
        shared_notebook.ok(f"%%distributed --ranks 2 --strategy {strategy} {option}{cell}").result
        for option in ("", "--check")
    )
    assert checked == without


@pytest.mark.slow
def test_ranks_are_sampled_while_a_cell_runs_and_only_then(client: PoolClient) -> None:
    group = client.group(2)
    run = follow(
        client,
        group,
        dedent("""\
            held = bytearray(50_000_000)
            import time
            t = time.monotonic()
            while time.monotonic() - t < 1.6: pass"""),
    )
    run.until(m.Ended)
    samples = [event for event in run.of(m.Sampled) if isinstance(event, m.Sampled) and event.rank == 1]
    assert len(samples) >= 2
    assert samples[-1].rss_bytes > 50_000_000
    assert samples[-1].cpu_percent > 5
    assert samples[-1].gpu_memory_bytes is None
    with pytest.raises(queue.Empty):
        client.seen.get(timeout=1.3)
    client.close_group(group)


@pytest.mark.slow
def test_a_rank_in_c_code_with_pythons_lock_counts_for_the_hang_timeout(shared_notebook: Notebook) -> None:
    outcome = shared_notebook.fails(
        dedent("""\
            %%distributed --ranks 2 --hang-timeout 11
            import ctypes
            if rank == 1:
                ctypes.PyDLL(None).sleep(600)""")
    )

    assert "its --hang-timeout is 11 s. Rank 1 does nothing, in C code that does not release Python's lock" in (
        outcome.traceback
    )


@pytest.mark.slow
def test_a_wait_for_a_rank_that_has_left_ends_by_itself_after_a_minute(shared_notebook: Notebook) -> None:
    cell = "%%distributed --ranks 2 --strategy ddp\nimport torch, torch.distributed as dist\n"
    outcome = shared_notebook.cell(f"{cell}if rank == 0:\n    dist.all_reduce(torch.ones(1))", timeout_s=90)
    assert outcome.ename == "RunTimeout"
    assert "because a rank has waited 60 s for one that has left the cell" in outcome.evalue.replace("1 min", "60 s")
    assert "--hang-timeout" in outcome.evalue
    assert "Rank 1 has left the cell" in outcome.evalue
    assert outcome.wall_s > 60
    assert shared_notebook.ok(f"{cell}x = torch.ones(1)\ndist.all_reduce(x)\nfloat(x)").result == "ranks 0-1: 2.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", ["%run stalls.py", "import runpy\nrunpy.run_path('stalls.py', run_name='__main__')"], ids=["run", "runpy"]
)
def test_lines_of_a_program_that_a_cell_runs_are_its_own(shared_notebook: Notebook, tmp_path: Path, run: str) -> None:
    (tmp_path / "stalls.py").write_text(
        dedent("""\
            import os, torch, torch.distributed as dist
            model = torch.nn.Linear(2, 1)

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 2)).sum().backward()
            def meet():
                dist.all_reduce(torch.ones(1))
            if os.environ['RANK'] == '0':
                meet()
            else:
                dist.barrier()
        """)
    )
    shared_notebook.ok(
        dedent(f"""\
            import os
            here = os.getcwd()
            os.chdir({str(tmp_path)!r})""")
    )
    outcome = shared_notebook.fails(f"%%distributed --ranks 2 --strategy ddp --hang-timeout 6\n{run}")
    shared_notebook.ok("os.chdir(here)")
    assert "stalls.py, line 4" in outcome.view  # the optimizer's
    assert "calls all_reduce (stalls.py, line 7)" in outcome.evalue, outcome.evalue
    assert "calls barrier (stalls.py, line 11)" in outcome.evalue


@pytest.mark.slow
def test_a_loader_worker_that_hangs_is_named_and_a_stop_keeps_the_ranks(shared_notebook: Notebook) -> None:
    shared_notebook.ok("%%distributed --ranks 1 --keep kept\nkept = 5")
    cell = dedent("""\
        %%distributed --ranks 1
        import signal
        from torch.utils.data import DataLoader
        class Hangs:
            def __len__(self): return 4
            def __getitem__(self, i):
                for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)
                while True: signal.pause()
        for x in DataLoader(Hangs(), num_workers=1): pass""")
    shared_notebook.start(cell)
    outcome = shared_notebook.until("waits for a worker of its DataLoader (line 9)", timeout_s=40)
    assert 'multiprocessing_context="spawn"' in outcome.text
    shared_notebook.interrupt()
    assert "replaced" not in shared_notebook.finish().text
    assert shared_notebook.ok("%%distributed --ranks 1\nkept").result == "rank 0: 5"
