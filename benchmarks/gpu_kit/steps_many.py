"""What needs two or more GPUs, each rank with its own. Without them the same cells run on CPU ranks or feigned GPUs."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu_kit import steps_stop, steps_training
from benchmarks.gpu_kit.place import PID, Place
from benchmarks.gpu_kit.step import Findings, step
from benchmarks.gpu_kit.steps_stop import Group


def all_of(place: Place) -> Group:
    """Return ranks on all GPUs, or two on the CPU."""
    return Group(place=place, count=len(place.gpus) if place.on_gpu else 2, twice=None)


TUTORIAL = """
import torch
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 8).to(device)).sum().backward()
    optimizer.step()
(next(model.parameters()).device.index or 0) if torch.cuda.is_available() else rank
"""


@step(
    "D1",
    "`cuda:0` in an unchanged cell, and a captured device, mean each rank's own GPU",
    limit_s=45,
    without_gpu="cpu",
    gpus=2,
)
def tutorial(place: Place, find: Findings) -> None:
    group = all_of(place)
    with place.notebook(all_gpus=True) as book:
        made = TUTORIAL.replace(
            'torch.device("cuda:0"', 'torch.device("cuda", 0)' if place.on_gpu else 'torch.device("cpu"'
        )
        cells = (
            ("written in the cell", TUTORIAL),
            ("made in the cell", made),
            ("captured", TUTORIAL.replace("device = torch", "unused = torch")),
        )
        for what, code in cells:
            with find.going_on(what):
                if what == "captured":
                    book.ok("import torch\ndevice = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')")
                got = book.values(group.options, code)
                find.that(f"{what}: each on its own", got == list(range(group.count)), got)


@step("D2", "Stop in collectives and in training, with a GPU for each rank", limit_s=120, without_gpu="cpu", gpus=2)
def stops(place: Place, find: Findings) -> None:
    for run in (steps_stop.check_collective, steps_stop.check_raises, steps_stop.check_stall, steps_stop.check_kept):
        with find.going_on(run.__name__):
            run(all_of(place), find)
    with find.going_on("training"):
        steps_stop.check_training(all_of(place), find, rounds=5 if place.on_gpu else 2)


@step(
    "D3",
    "a rank that is killed in a collective is told at once, and the next cell trains",
    limit_s=45,
    without_gpu="cpu",
    gpus=2,
)
def killed(place: Place, find: Findings) -> None:
    group = all_of(place)
    with place.notebook(all_gpus=True) as book:
        pids = book.settled(group.options)
        flags = place.flags("killed", group.count)
        book.start(f"%%distributed {group.options}\n{steps_stop.LOOPS.format(flag=place.flag_line('killed'))}")
        steps_stop.until_all(flags)
        time.sleep(0.3)
        began_s = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        outcome = book.finish(20.0)
        find.within("the cell ends", time.monotonic() - began_s, 3.0)
        find.that("rank 1 is the cause", "rank 1" in outcome.text.lower(), outcome.text[-300:])
        steps_stop.check_trains(book, group, find, "after it")


@step("D4", "one rank leaves by sys.exit, and those that wait for it are told", limit_s=45, without_gpu="cpu", gpus=2)
def leaves(place: Place, find: Findings) -> None:
    group = all_of(place)
    wait = "; torch.cuda.synchronize()" if place.on_gpu else ""
    code = (
        "import sys, torch\nt = torch.ones(1, device=device)\ntorch.distributed.all_reduce(t)\n"
        f"if rank == 1: sys.exit(0)\ntorch.distributed.all_reduce(t){wait}"
    )
    with place.notebook(all_gpus=True) as book:
        book.settled(group.options)
        book.start(f"%%distributed {group.options}\n{code}")
        try:
            outcome = book.finish(12.0)
            find.within("the others are told", outcome.wall_s, 8.0)
            find.that("rank 1 is named", "rank 1" in outcome.text.lower(), outcome.text[-300:])
        except AssertionError as hangs:
            find.that("the others are told", False, str(hangs)[-300:])
            book.interrupt()
            book.finish(20.0)
        steps_stop.check_trains(book, group, find, "after it")


@step("D5", "a step of ddp is as fast as one of torch's own DDP on all GPUs", limit_s=120, without_gpu="cpu", gpus=2)
def speed(place: Place, find: Findings) -> None:
    steps_training.check_speed(all_of(place), find, limit=1.03)


@step(
    "D6",
    "two notebooks share the GPUs, and one that needs all of them gets those of the idle one",
    limit_s=60,
    without_gpu="bed",
    gpus=2,
)
def shared(place: Place, find: Findings) -> None:
    if place.bed is not None:
        place.bed.gpus = [place.bed.gpu(index) for index in range(8)]
        place.bed.write()
    count = 8 if place.bed is not None else len(place.gpus)
    half, every = f"--gpus {count // 2}", f"--gpus {count}"
    visible = "import os\nos.environ['CUDA_VISIBLE_DEVICES']"
    with place.notebook(all_gpus=True) as first, place.notebook(all_gpus=True) as second:
        mine = first.values(half, visible)
        theirs = second.values(half, visible)
        both = {*mine[0].split(","), *theirs[0].split(",")}
        find.that("each has its own half", len(both) == count // 2 * 2, f"{mine[0]}; {theirs[0]}")
        outcome = first.cell(f"%%distributed {every}\nrank")
        find.that(f"{every} gets those of the idle notebook", outcome.status == "ok", outcome.text[-300:])
        again = first.cell(f"%%distributed {every} --fresh\nrank")
        find.that(f"{every} --fresh", again.status == "ok", again.text[-300:])
        first.ok(f"%%distributed {every} --keep w\nw = rank")
        refused = second.cell(f"%%distributed {half}\nrank")
        find.that("what is kept holds them", "keeps w" in refused.text, refused.text[-300:])


@step("D7", "fsdp weights are finite after Stop", limit_s=60, without_gpu="cpu", gpus=2)
def sharded(place: Place, find: Findings) -> None:
    group = all_of(place)
    options = f"{place.ranks(group.count)} --strategy fsdp --keep model,optimizer"
    with place.notebook(all_gpus=True) as book:
        pids = book.settled(group.options)
        book.ok(f"%%distributed {options}\n{steps_stop.TRAINS}")
        flags = place.flags("sharded", group.count)
        for number in range(1, 4):
            code = f"%%distributed {options}\nimport torch\n{steps_stop.endless(place, 'sharded')}"
            book.stopped(code, flags, 0.1 * number)
            check = "import torch\nall(bool(torch.isfinite(p.to_local()).all()) for p in model.parameters())"
            outcome = book.cell(f"%%distributed {options} --out finite\n{check}", 20.0)
            kept = book.cell("print(list(finite))").stdout.strip()
            find.that(f"stop {number}: all weights are finite", "False" not in kept and outcome.status == "ok", kept)
        now = book.values(group.options, PID)
        find.figure("ranks that stayed", f"{len(set(pids) & set(now))} of {group.count}")


PIPELINE = """
import torch
from jupyter_distrib.parallel import Pipeline
torch.manual_seed(2)
stages = [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh()), torch.nn.Linear(8, 2)]
torch.manual_seed(0)
x, y = torch.randn(5, 16, 6), torch.randn(5, 16, 2)
{make}
optimizer = torch.optim.SGD(parameters, lr=0.1)
losses = []
for inputs, target in zip(x, y):
    losses.append(float(step(inputs, target)))
    optimizer.step()
    optimizer.zero_grad()
losses
"""
IN_STAGES = """
pipeline = Pipeline(mesh, stages, loss=torch.nn.functional.mse_loss, microbatches=4, schedule="1f1b")
parameters, step = pipeline.parameters(), pipeline.step
"""
WHOLE = """
whole = torch.nn.Sequential(*stages)
parameters = whole.parameters()
def step(inputs, target):
    loss = torch.nn.functional.mse_loss(whole(inputs), target)
    loss.backward()
    return loss
"""


@step("D8", "a model in two stages trains as the whole", limit_s=60, without_gpu="cpu", gpus=2)
def pipeline(place: Place, find: Findings) -> None:
    options = place.ranks(2)
    with place.notebook(all_gpus=True) as book:
        wanted = book.values("--ranks 1", PIPELINE.format(make=WHOLE))[0]
        got = book.values(f"{options} --strategy tp --mesh pp=2", PIPELINE.format(make=IN_STAGES))
        apart = max(abs(a - b) for mine in got for a, b in zip(mine, wanted, strict=True))
        find.that("every loss is that of the whole", apart < 1e-3, f"apart by at most {apart:.1e}")
        pids = book.settled(f"{options} --strategy ddp")
        flags = place.flags("stages", 2)
        endless = f"{place.flag_line('stages')}\nwhile True:\n    step(x[0], y[0])"
        code = PIPELINE.format(make=IN_STAGES).replace("losses = []", endless)
        took_s, outcome = book.stopped(f"%%distributed {options} --strategy tp --mesh pp=2\n{code}", flags, 0.3)
        find.that("Stop ends it", outcome.ename == "KeyboardInterrupt", outcome.text[-300:])
        find.within("Stop", took_s, 3.0)
        find.that("the ranks stay", book.values(f"{options} --strategy ddp", PID) == pids)
