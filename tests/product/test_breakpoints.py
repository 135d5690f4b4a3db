"""Breakpoints in a cell, by a real kernel whose client answers its requests for input."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow
ON_TWO = "%%distributed --ranks 2\n"
TRAINS = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = 1.0
for step in range(4):
    data = torch.full((2, 4), float(step + rank))
    {stop}
    loss = model(data * scale).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
[round(value, 6) for value in model.weight.flatten().tolist()]"""
ON_DDP = "%%distributed --ranks 2 --strategy ddp\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def asking(prompt: str) -> int:
    """The rank of a prompt."""
    return int(prompt.split()[1])


def test_a_training_that_stops_in_one_rank_ends_with_the_same_weights(book: Notebook) -> None:
    undisturbed = book.ok(ON_DDP + TRAINS.format(stop="pass")).result
    book.start(ON_DDP + TRAINS.format(stop="if rank == 1 and step == 2: breakpoint()"), keyboard=True)
    book.types("p step, data.shape", "scale = 1.0", "n", "p loss.item() > 0", "c", prompt="rank 1 (Pdb) ")
    outcome = book.finish()

    assert outcome.status == "ok", outcome.text
    assert "rank 1 is stopped at line 10" in outcome.stdout
    assert "(2, torch.Size([2, 4]))" in outcome.stdout
    assert "True" in outcome.stdout
    assert outcome.result == undisturbed


def test_a_changed_local_is_what_the_rank_goes_on_with(book: Notebook) -> None:
    cell = ON_TWO + dedent("""\
        def f(x):
            import pdb; pdb.set_trace()
            return x + 1
        f(rank)""")
    book.start(cell, keyboard=True)
    answers = {0: ["c", "x = 41"], 1: ["c", "x"]}
    while any(answers.values()):
        book.client.input(answers[asking(book.asked("(Pdb) "))].pop())
    outcome = book.finish()

    assert "42" in outcome.result, outcome.text
    assert "\n1\n" in outcome.stdout
    assert "-> return x + 1" in outcome.stdout


def test_one_prompt_serves_several_ranks_and_rank_n_switches(book: Notebook) -> None:
    book.start(
        ON_TWO
        + dedent("""\
            x = rank * 10
            breakpoint()
            x += 1
            x"""),
        keyboard=True,
    )
    first = asking(book.asked("(Pdb) "))
    other = 1 - first
    book.client.input("rank 7")
    while asking(book.asked("(Pdb) ")) != other:  # until that one is there, too
        book.client.input(f"rank {other}")
    book.client.input("p x")
    book.types("all p x + 5", "all c", prompt=f"rank {other} (Pdb) ")
    outcome = book.finish()

    assert "rank 7 is not stopped in the debugger; rank" in outcome.stdout
    assert "[0] 5\n" in outcome.stdout
    assert "[1] 15\n" in outcome.stdout
    assert outcome.status == "ok", outcome.text


def test_a_step_over_a_collective_leaves_the_prompt_to_the_other_rank(book: Notebook) -> None:
    cell = ON_DDP + dedent("""\
        import torch
        t = torch.ones(1)
        breakpoint()
        torch.distributed.all_reduce(t)
        t.item()""")
    book.start(cell, keyboard=True)
    first = asking(book.asked("(Pdb) "))
    book.client.input("n")  # waits for the other rank
    book.types("c", prompt=f"rank {1 - first} (Pdb) ")
    book.types("p t", "c", prompt=f"rank {first} (Pdb) ")
    outcome = book.finish()

    assert "tensor([2.])" in outcome.stdout
    assert outcome.status == "ok", outcome.text


@pytest.mark.parametrize("leave", ["q", "\x04"])
def test_quit_and_the_end_of_input_stop_the_run(book: Notebook, leave: str) -> None:
    book.start(
        ON_TWO
        + dedent("""\
            if rank == 1:
                breakpoint()
            import time
            time.sleep(60)"""),
        keyboard=True,
    )
    book.types(leave, prompt="rank 1 (Pdb) ")
    outcome = book.finish()

    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert book.ok(ON_TWO + "rank").result


def test_stop_at_the_prompt_stops_the_run(book: Notebook) -> None:
    book.start(
        ON_TWO
        + dedent("""\
            if rank == 1:
                breakpoint()
            import time
            time.sleep(60)"""),
        keyboard=True,
    )
    book.asked("rank 1 (Pdb) ")
    book.interrupt()
    outcome = book.finish()

    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert book.ok(ON_TWO + "rank").result


def test_a_prompt_is_withdrawn_when_another_rank_ends_the_run(book: Notebook, tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    leave = f"    open({str(gate)!r}).close()\n    os._exit(3)"
    book.start(f"{ON_TWO}import os\nif rank == 1:\n    breakpoint()\nelse:\n{leave}", keyboard=True)
    book.asked("rank 1 (Pdb) ")
    gate.write_text("")  # blocks until rank 0 is there

    outcome = book.finish()
    assert outcome.ename == "RankLost", outcome.text
    assert book.ok(ON_TWO + "rank").result


def test_the_limits_of_time_stand_still_while_a_rank_is_stopped(book: Notebook) -> None:
    cell = "--ranks 2 --strategy ddp --timeout 4 --hang-timeout 3\nimport torch, time\nt = torch.ones(1)\n"
    waits = dedent("""\
        if rank == 1:
            breakpoint()
        torch.distributed.all_reduce(t)
        t.item()""")
    book.start(f"%%distributed {cell}{waits}", "cell-1", keyboard=True)
    book.asked("rank 1 (Pdb) ")
    book.until("Rank 1 is stopped in the debugger at line 6.")
    book.client.input("time.sleep(6)")
    book.types("c")
    outcome = book.finish()

    assert outcome.status == "ok", outcome.text


WAIT_IN_GROUP = """\
import torch, time
from datetime import timedelta
t = torch.ones(1)
group = torch.distributed.new_group(timeout=timedelta(seconds=1))
torch.distributed.breakpoint(rank=1)
torch.distributed.all_reduce(t, group=group)
"""
# By the store, NCCL's ranks find each other at the first collective.
WAIT_IN_STORE = """\
import torch, time
from datetime import timedelta
torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=1))
store = torch.distributed.distributed_c10d._get_default_store()
if rank == 1:
    breakpoint()
    store.set("found", "")
store.get("found")
"""


@pytest.mark.parametrize("cell", [ON_DDP + WAIT_IN_GROUP, ON_TWO + WAIT_IN_STORE], ids=["group", "store"])
def test_a_stopped_rank_is_waited_for_longer_than_the_timeout(book: Notebook, cell: str) -> None:
    book.start(cell, keyboard=True)
    book.types("time.sleep(3)", "c", prompt="rank 1 (Pdb) ")
    outcome = book.finish()
    assert outcome.status == "ok", outcome.text

    limits = "torch.distributed.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    assert "1800.0" in book.ok(f"{ON_DDP}import torch\n{limits}").result


def test_a_breakpoint_outside_the_cell_tells_how_long_the_others_wait(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "stops_here.py").write_text(
        dedent("""\
            def look():
                breakpoint()
                return 5
        """)
    )
    book.ok(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    book.start(ON_DDP + "import stops_here\nstops_here.look() if rank == 1 else 0", keyboard=True)
    book.types("c", prompt="rank 1 (Pdb) ")
    shown = book.finish().stdout

    assert "Other ranks give up waiting for this one in a collective after 30 min" in shown
    assert "stops_here.py(3)look()\n-> return 5" in shown


def test_a_kernel_that_dies_at_the_prompt_leaves_no_rank(notebook: Notebook) -> None:
    notebook.start(ON_TWO + "breakpoint()", keyboard=True)
    notebook.asked("(Pdb) ")
    os.kill(notebook.pid, signal.SIGKILL)  # the fixture waits for the end of the ranks


def test_a_detached_run_skips_breakpoints(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            breakpoint()
            rank"""),
        keyboard=True,
    )
    book.finish()
    assert book.ok("[*job.result(timeout_s=30)]").result == "[0, 1]"
    assert book.ok("job.logs(1).count('the breakpoint is skipped, because the run is detached')").result == "1"
