"""After Stop, an exception, a death or an error of CUDA, the next cell trains; and on the same ranks where that can be."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.gpu_bed.test_hosts import add_pool
from tests.notebook import Notebook
from tests.processes import wait_until

STOPS = int(os.environ.get("FEIGNED_CUDA_STOPS", "20"))
"""Number of random moments for Stop, in all trainings together: a tenth of a whole campaign."""
SEED = int(os.environ.get("FEIGNED_CUDA_SEED", random.randrange(1000)))
NEXT_S = 20.0
"""A cell after a stop takes at most this long, with the making of new groups, on a machine that others use."""
MOMENT_S = 0.6
"""Time in which a training builds its model, makes its groups, and takes a hundred steps."""


def ddp(steps: str) -> str:
    return trainings.cell("--strategy ddp", steps)


def fsdp(steps: str) -> str:
    return trainings.cell("--strategy fsdp", steps)


def on_two_hosts(steps: str) -> str:
    return trainings.cell("--pool far --strategy ddp", steps)


TRAININGS = (ddp, fsdp, trainings.pipeline, on_two_hosts)


@pytest.fixture(autouse=True, scope="module")
def warm(the_book: Notebook) -> None:
    """Have everything loaded that a training needs."""
    add_pool(the_book, more="--nodes 2")
    for training in TRAININGS:
        the_book.ok(training("range(5)"))


def pids(book: Notebook, options: str = "") -> list[int]:
    book.ok(f"%%distributed --gpus 2 {options} --out pids\nimport os\nos.getpid()")
    return [int(word) for word in re.findall(r"\d+", book.ok("print(list(pids))").stdout)]


def trains(book: Notebook, options: str = "--strategy ddp") -> None:
    found = book.ok(trainings.cell(options))
    assert "steps" in found.text
    assert found.wall_s < NEXT_S


@pytest.mark.timeout(60 + 10 * STOPS)
@pytest.mark.parametrize("training", TRAININGS)
def test_stop_at_any_moment_keeps_the_ranks(
    training: Callable[[str], str], machine: FeignedCuda, book: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    moments, pool = random.Random(SEED), "--pool far" if training is on_two_hosts else ""
    endless = training("itertools.count()").replace("\n", "\nprint('begins', flush=True)\n", 1)
    usual_s = book.ok(training("range(5)")).wall_s
    before = pids(book, pool)
    replaced, ended_s, next_s = [], [], []
    for number in range(STOPS // len(TRAININGS)):
        book.start(endless)
        book.until("begins")
        moment_s = moments.uniform(0, MOMENT_S)
        reached_s = time.monotonic() + moment_s
        wait_until(lambda reached_s=reached_s: time.monotonic() > reached_s, 1)
        book.interrupt()
        stopped_s = time.monotonic()
        stopped = book.finish()
        ended_s.append(time.monotonic() - stopped_s)
        story = f"seed {SEED}, stop {number} after {moment_s:.3f} s: {stopped.text}"
        assert stopped.ename == "KeyboardInterrupt", story
        assert "frame #" not in stopped.text, story
        after = book.cell(training("range(5)"))
        assert after.status == "ok", f"{story}\n\nnext: {after.text}"
        assert after.wall_s < NEXT_S, story
        next_s.append(after.wall_s)
        now = pids(book, pool)
        replaced += [story] * len(set(now) - set(before))
        before = now
    with capsys.disabled():
        print(
            f"\n{training.__name__}, seed {SEED}: {len(ended_s)} stops, {len(replaced)} ranks replaced; ended after "
            f"{_spread(ended_s)}; the next training took {_spread(next_s)}, before the first stop {usual_s:.2f} s"
        )
    assert not replaced, "\n\n".join(replaced)
    assert all(len(gpus) == 1 for gpus in machine.contexts().values())


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s (at most {max(seconds):.2f} s)"


def test_nothing_is_shown_of_what_torch_logs_about_the_abort(book: Notebook) -> None:
    """The watchdog of one group polls NCCL while another group is aborted, and logs its errors with frames of C++."""
    book.start("""%%distributed --gpus 2 --strategy ddp
import os, signal, torch, torch.distributed as dist
os.environ["FEIGNED_CUDA_ABORT_MS"] = "300"
groups = [dist.group.WORLD, dist.new_group([0, 1])]
t = torch.ones(2, device=device)
for group in groups: dist.all_reduce(t, group=group)
torch.cuda.synchronize()
works = [dist.all_reduce(t, group=group, async_op=True) for group in groups if rank == 0]
print("waits", rank, flush=True)
torch.cuda.synchronize() if rank == 0 else signal.pause()
""")
    book.until("waits 0")
    book.until("waits 1")
    book.interrupt()
    stopped = book.finish()
    assert stopped.ename == "KeyboardInterrupt"
    after = book.ok(trainings.cell("--strategy ddp"))
    assert "ProcessGroupNCCL" not in stopped.text + after.text
    assert "frame #" not in stopped.text + after.text


def test_the_exception_of_one_rank_is_reported_at_once(book: Notebook) -> None:
    trains(book)
    before = pids(book)
    raises = "if number == 50 and rank == 1: raise ValueError('of rank 1')"
    failed = book.fails(trainings.cell("--strategy ddp", "itertools.count()", raises))
    assert failed.ename == "ValueError"
    assert "Rank 1 raised it" in failed.text
    trains(book)
    assert pids(book) == before


def test_a_script_that_destroys_its_group_holds_up_nobody(book: Notebook) -> None:
    """The usual end of a script for torchrun, while a collective waits for a rank that has raised."""
    script = """%%distributed --gpus 2 --keep w
import torch, torch.distributed as dist
w = torch.ones(2, device=device)
dist.init_process_group("nccl", device_id=device)
try:
    t = torch.ones(2, device=device)
    dist.all_reduce(t)
    for number in range(100):
        if number == 20 and rank == 1: {at_20}
        dist.all_reduce(t)
    torch.cuda.synchronize()
finally:
    dist.destroy_process_group()
"""
    book.ok(
        dedent("""\
            %%distributed --gpus 2 --keep w
            import torch
            w = torch.ones(2, device=device)""")
    )
    before = pids(book)
    failed = book.fails(script.format(at_20="raise ValueError('of rank 1')"))
    assert failed.ename == "ValueError"
    assert failed.wall_s < 3
    assert pids(book) == before
    book.start(script.format(at_20="print('waits', flush=True); __import__('signal').pause()"))
    book.until("waits")
    book.interrupt()
    stopped = book.finish()
    assert stopped.ename == "KeyboardInterrupt"
    assert pids(book) == before
    trains(book)


def test_a_killed_rank_is_replaced(book: Notebook) -> None:
    trains(book)
    before = pids(book)
    book.start(trainings.cell("--strategy ddp", "itertools.count()"))
    book.until("steps")
    os.kill(before[1], signal.SIGKILL)
    failed = book.finish()
    assert failed.ename == "RankLost"
    assert "rank 1" in failed.text
    trains(book)


def test_a_kernel_that_never_ends_costs_its_rank_alone(machine: FeignedCuda, book: Notebook) -> None:
    trains(book)
    before = pids(book)
    book.start(
        dedent("""\
            %%distributed --gpus 2
            import torch
            if rank == 1:
                torch.cuda._sleep(1 << 50)
                print('spins', flush=True)
                torch.ones(1, device=device).item()""")
    )
    book.until("spins")
    book.interrupt()
    stopped = book.finish()
    assert stopped.ename == "KeyboardInterrupt"
    trains(book)
    after = pids(book)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_context_that_is_lost_is_reported_and_its_rank_replaced(strategy: str, book: Notebook) -> None:
    trains(book)
    before = pids(book)
    failed = book.fails(
        dedent(f"""\
            %%distributed --gpus 2 --strategy {strategy}
            import os, torch
            if rank == 1: os.environ['FEIGNED_CUDA_BREAK'] = 'ndex'
            t = torch.zeros(3, device=device)[torch.tensor([1], device=device)]
            torch.cuda.synchronize()
        """)
    )
    assert "illegal memory access" in failed.text
    assert "this broke the GPU context of rank 1" in failed.text
    assert re.search(r"Cell In\[\d+\], line [45]", failed.text)  # CUDA reports errors late
    trains(book)
    after = pids(book)
    assert after[1] != before[1]


def test_a_watchdog_that_meets_a_lost_context_says_so_in_one_line(book: Notebook) -> None:
    failed = book.fails("""%%distributed --gpus 2 --strategy ddp
import contextlib, os, torch, torch.distributed as dist
from jupyter_distrib.worker.pytorch import private
t, number = torch.ones(3, device=device), torch.tensor([1], device=device)
dist.all_reduce(t)
torch.cuda.synchronize()
if rank == 1:
    work = dist.all_reduce(t.clone(), async_op=True)
    os.environ["FEIGNED_CUDA_BREAK"] = "ndex"
    with contextlib.suppress(torch.AcceleratorError): t[number]
    while private._watchdogs(): os.sched_yield()
    t.sum().item()
""")
    assert "watchdog thread terminated with exception: CUDA error: an illegal memory access" in failed.text
    assert "frame #" not in failed.text
    trains(book)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_whose_gpu_breaks_is_started_again(strategy: str, book: Notebook) -> None:
    breaks = (
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        if number == 20 and rank == 1: os.environ['FEIGNED_CUDA_BREAK'] = 'unctor'\n"
        "    elif number == 30: break"
    )
    again = book.ok(
        trainings.cell(
            f"--strategy {strategy} --max-restarts 1", "itertools.count()", breaks, f"import os\n{trainings.MODEL}"
        )
    )
    assert "attempt 2 of 2, since rank 1 lost its GPU (AcceleratorError, line " in again.text
    trains(book)


UNTIL_AGAIN = "if number == 200 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': break"


@pytest.mark.parametrize("others", [True, False])
def test_a_rank_whose_gpu_is_lost_gets_another_if_there_is_one(machine: FeignedCuda, others: bool) -> None:
    with machine.notebook(**({} if others else {"CUDA_VISIBLE_DEVICES": "6,7"})) as book:
        trains(book)
        (lost,) = machine.contexts()[pids(book)[1]]
        options = "--strategy ddp --max-restarts 2 --restart-on error"
        book.start(trainings.cell(options, "itertools.count()", UNTIL_AGAIN, f"import os\n{trainings.MODEL}"))
        book.until("steps")
        machine.lose(lost)
        try:
            ended = book.finish()
            if others:
                assert ended.status == "ok", ended.text
                assert f"from now on: GPU {lost} " in ended.text
                (found,) = machine.contexts()[pids(book)[1]]
                assert found not in (lost, *machine.contexts()[pids(book)[0]])
            else:
                assert ended.ename == "PoolError"
                assert "GPU 7 cannot be used (GPU is lost), and no other is free for rank 1: ask for" in ended.text
                assert "Traceback (most" not in ended.text
        finally:
            machine.lose(lost, on=False)
        trains(book)


@pytest.mark.parametrize("gpus", [6, 5])
@pytest.mark.parametrize("restarts", [0, 1])
def test_two_gpus_are_lost_at_once(gpus: int, restarts: int) -> None:
    """With two others, and with only one."""
    model, enough = f"import os\n{trainings.MODEL}", gpus == 6
    short = trainings.cell("--strategy ddp", model=model).replace("--gpus 2", "--gpus 4")
    options = "--strategy ddp" + restarts * " --max-restarts 1"
    endless = trainings.cell(options, "itertools.count()", UNTIL_AGAIN, model).replace("--gpus 2", "--gpus 4")
    with FeignedCuda(gpus=gpus) as machine, machine.notebook() as book:
        book.ok(short)
        book.start(endless)
        book.until("steps")
        for lost in (1, 2):
            machine.lose(lost)
        ended = book.finish()
        if restarts and enough:
            assert ended.status == "ok", ended.text
        else:
            assert ended.ename == ("PoolError" if restarts else "AcceleratorError"), ended.text
        if restarts and not enough:
            assert re.search(
                r"GPU [12] cannot be used \(GPU is lost\), and no other is free for rank [12]: ask", ended.text
            )
        if enough:
            book.ok(short)
            held = sorted(number for numbers in machine.contexts().values() for number in numbers)
            assert held == [0, 3, 4, 5]
        else:
            refused = book.fails(short)
            assert re.search(r"GPU [12] cannot be used \(GPU is lost\)", refused.evalue), refused.text
            trains(book)


LEAVES = "if number == 20 and rank == 1: raise SystemExit(0)"


@pytest.mark.parametrize("options", ["--strategy ddp", "--pool far --strategy ddp"])
def test_ranks_do_not_wait_for_one_that_has_left_with_success(options: str, book: Notebook) -> None:
    """NCCL tells nobody that a rank has ended the cell."""
    trains(book, options)
    pool = options.partition("--strategy")[0]
    before = pids(book, pool)
    failed = book.fails(trainings.cell(options, "itertools.count()", LEAVES))
    assert failed.ename == "KeyboardInterrupt" or "ank 1" in failed.text, failed.text
    trains(book, options)
    assert pids(book, pool) == before


READS = """\
%%distributed --gpus 2 --strategy ddp
model
rank"""
TORN = "`model` was in the middle of a step"


def test_a_kept_model_is_said_to_be_torn_if_its_step_was_aborted(machine: FeignedCuda, book: Notebook) -> None:
    book.ok(trainings.cell("--strategy ddp --keep model,optimizer"))
    waits = "if number == 20 and rank == 1: print('waits', flush=True), __import__('signal').pause()"
    book.start(trainings.cell("--strategy ddp", "itertools.count()", waits, "import itertools, torch\n"))
    book.until("waits")
    aborts = len(machine.calls("aborts"))
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"
    assert TORN in book.ok(READS).text
    assert len(machine.calls("aborts")) == aborts + 2


def test_a_kept_model_is_whole_if_the_gpus_have_finished_its_step(machine: FeignedCuda, book: Notebook) -> None:
    book.ok(trainings.cell("--strategy ddp --keep model,optimizer"))
    waits = "if number == 20: torch.cuda.synchronize(), print('waits', rank, flush=True), __import__('signal').pause()"
    book.start(trainings.cell("--strategy ddp", "itertools.count()", waits, "import itertools, torch\n"))
    book.until("waits 0")
    book.until("waits 1")
    aborts = len(machine.calls("aborts"))
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"
    assert TORN not in book.ok(READS).text
    assert len(machine.calls("aborts")) == aborts


def test_what_nobody_has_received_before_a_stop_is_not_received_after_it(book: Notebook) -> None:
    """A send is done as soon as the other GPU can take it, so that both ranks have come equally far."""
    cell = """%%distributed --gpus 2 --strategy ddp
import signal, torch, torch.distributed as dist
t = torch.full((2,), {value}, device=device)
dist.all_reduce(torch.ones(1, device=device))
operation = dist.P2POp(dist.isend, t, 1) if rank == 0 else dist.P2POp(dist.irecv, t.zero_(), 0)
{then}"""
    pauses = dedent("""\
        if rank == 0: dist.batch_isend_irecv([operation])[0].wait()
        torch.cuda.synchronize()
        print('waits', rank, flush=True)
        signal.pause()""")
    book.start(cell.format(value=1.0, then=pauses))
    book.until("waits 0")
    book.until("waits 1")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"
    receives = "dist.batch_isend_irecv([operation])[0].wait()\nt.tolist()"
    assert "ranks 0-1: [2.0, 2.0]" in book.ok(cell.format(value=2.0, then=receives)).text


def test_a_stop_between_the_sends_of_one_batch(book: Notebook) -> None:
    """NCCL holds back what a thread asks for until it has ended the group of calls that it had begun."""
    head = """%%distributed --gpus 2 --strategy ddp
import signal, torch, torch.distributed as dist
t = torch.full((2,), 3.0, device=device)
operation = dist.P2POp(dist.isend, t, 1) if rank == 0 else dist.P2POp(dist.irecv, t.zero_(), 0)
"""
    pauses = dedent("""\
        with dist._coalescing_manager(device=device, async_ops=True):
            print('waits', rank, flush=True)
            signal.pause()""")
    book.start(head + pauses)
    book.until("waits 0")
    book.until("waits 1")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"
    receives = "dist.batch_isend_irecv([operation])[0].wait()\nt.tolist()"
    assert "ranks 0-1: [3.0, 3.0]" in book.ok(head + receives).text
