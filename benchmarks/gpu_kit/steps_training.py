"""Training: memory at the end of a cell, the same numbers as torch's own DDP, its speed, and its variants."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import pickle
import statistics
import subprocess
import sys
from ast import literal_eval
from collections.abc import Sequence

from benchmarks.gpu_kit.machine import ROOT
from benchmarks.gpu_kit.place import GIB, PID, Backend, Book, Place
from benchmarks.gpu_kit.step import Findings, Skipped, step
from benchmarks.gpu_kit.steps_stop import Group

MB = 1 << 20
LARGE = """
import resource, torch
{limit}
model = torch.nn.ParameterList([torch.zeros({count}, dtype=torch.bfloat16, device=device) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    sum((p * 2).sum() for p in model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
{value}
"""
PEAK = "next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM'))"


@step("K7", "the end of a ddp cell takes no memory beside what training takes", limit_s=70, without_gpu="cpu")
def end_of_cell(place: Place, find: Findings) -> None:
    size = min(2 * GIB, place.memory_bytes // 40) if place.on_gpu else 256 * MB
    group = Group(place=place, twice="gloo")
    # Weights, gradients, the buckets of torch's reducer, one temporary of a step; and what a context takes.
    share = (4.2 * size + 600 * MB) / place.memory_bytes if place.on_gpu else 0
    limit = f"torch.cuda.set_per_process_memory_fraction({share})" if place.on_gpu else ""
    code = LARGE.format(limit=limit, count=size // 16, value="7" if place.on_gpu else PEAK)
    with place.notebook(twice="gloo") as book:
        book.settled(group.options)
        outcome = book.cell(f"%%distributed {group.options} --out seven\n{code}", 60.0)
        find.that(
            f"a model of {size / GIB:.2f} GiB trains, and the cell ends well",
            outcome.status == "ok",
            outcome.text[-400:],
        )
        if outcome.status == "ok" and not place.on_gpu:
            inside = literal_eval(book.ok("print(list(seven))").stdout)
            after = book.values(place.ranks(2), PEAK)
            more = max(b - a for a, b in zip(inside, after, strict=True))
            find.that("the peak is inside the cell", more < size / 2, f"{more / MB:.0f} MB more at its end")


IN_CELL = """
import os, sys
from benchmarks.gpu_kit import models
models.losses(device, rank, lambda model: model)
"""


@step("K10", "20 steps of ddp give the losses of torch's own DistributedDataParallel", limit_s=90, without_gpu="cpu")
def same_losses(place: Place, find: Findings) -> None:
    backends: tuple[Backend, ...] = ("gloo", "nccl") if place.on_gpu else ("gloo",)
    for backend in backends:
        with find.going_on(backend):
            _same_losses(Group(place=place, twice=backend), find, backend)


def _same_losses(group: Group, find: Findings, backend: Backend) -> None:
    wanted = _plain(group, backend)
    with group.place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        got = book.values(group.options, IN_CELL)
    apart = max(abs(a - b) for mine, theirs in zip(got, wanted, strict=True) for a, b in zip(mine, theirs, strict=True))
    told = f"apart by at most {apart:.1e}; the last {got[0][-1]:.6f}, {wanted[0][-1]:.6f}"
    find.that(f"{backend}: every loss of every rank is the same", apart <= 1e-6, told)


def _plain(group: Group, backend: Backend) -> list[list[float]]:
    """The losses of each rank of a program without this package."""
    place, store = group.place, group.place.folder / f"store-{backend}"
    running = []
    for rank in range(group.count):
        device = ("cuda:0" if group.twice else f"cuda:{rank}") if place.on_gpu else "cpu"
        env = {**os.environ, **place.environment(**group.environment())}  # type: ignore[arg-type]
        env |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(group.count),
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if group.twice and place.on_gpu:
            env |= {"NCCL_HOSTID": f"kit{rank}", "CUDA_VISIBLE_DEVICES": place.gpus[0].uuid}
        command = [sys.executable, "-m", "benchmarks.gpu_kit.models", backend, str(store), device]
        running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
    out = []
    for process in running:
        told, _ = process.communicate(timeout=60 if place.on_gpu else 180)
        assert process.returncode == 0, f"the plain program ended with {process.returncode}"
        out.append(literal_eval(told.splitlines()[-1]))
    return out


PLAIN = "lambda model: model"
DDP = "torch.nn.parallel.DistributedDataParallel"
TIMED = """
import torch
from benchmarks.gpu_kit import models
{init}
models.timed({name!r}, device, {wrap}, {steps}, {full})
"""
INIT = """
import torch.distributed
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group({backend!r})
"""


@step(
    "K11",
    "a step of ddp is as fast as one of torch's own DDP, and never waits for the GPU",
    limit_s=110,
    without_gpu="cpu",
)
def speed(place: Place, find: Findings) -> None:
    check_speed(Group(place=place, count=1, twice=None), find, limit=1.02)


def check_speed(group: Group, find: Findings, limit: float) -> None:
    place = group.place
    turns, steps = (5, 10) if place.on_gpu else (2, 2)
    with place.notebook(all_gpus=group.count > 1) as book:
        book.settled(group.options)
        for name in ("resnet", "gpt"):
            with find.going_on(name):
                took = _turns(book, group, name, turns, steps)
                own, ddp, plain = (statistics.median(took[which]) for which in ("own", "ddp", "plain"))
                told = f"{own / ddp:.3f} of DDP ({1e3 * own:.2f}, {1e3 * ddp:.2f} ms; without either {1e3 * plain:.2f})"
                if place.on_gpu:
                    find.that(f"{name}: at most {limit} of DDP, without a sync", own <= limit * ddp, told)
                else:
                    find.that(f"{name}: trains", own > 0, told)
        with find.going_on("a branch that is not used"):
            code = "from benchmarks.gpu_kit import models\nmodels.syncs('branches', device, 20)"
            counts = book.values(group.options, code)
            find.that("with a branch that is not used, at most one sync a step", max(counts) <= 1.0, f"{counts}")


def _turns(book: Book, group: Group, name: str, turns: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each kind; they take turns, so that the machine's moods take no side."""
    took: dict[str, list[float]] = {"own": [], "ddp": [], "plain": []}
    full, ranks = group.place.on_gpu, group.place.ranks(group.count)
    init = INIT.format(backend=group.place.backend)
    for _ in range(turns):
        for kind, options, begin, wrap in (
            ("plain", ranks, "", PLAIN),
            ("ddp", ranks, init, DDP),
            ("own", group.options, "", PLAIN),
        ):
            code = TIMED.format(init=begin, name=name, wrap=wrap, steps=steps, full=full)
            took[kind].append(max(book.values(options, code)))
    return took


OFFLOADED = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = model(torch.ones(8, 64, device=device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
loss.item()
"""
DEFAULT_DEVICE = OFFLOADED.replace("import torch\n", "import torch\ntorch.set_default_device(device)\n", 1)


@step(
    "K13",
    "fsdp with weights in the CPU's memory, and ddp under set_default_device, train",
    limit_s=45,
    without_gpu="cpu",
)
def variants(place: Place, find: Findings) -> None:
    one = place.ranks()
    with place.notebook() as book:
        for options, code in (
            (f"{one} --strategy fsdp --cpu-offload", OFFLOADED),
            (f"{one} --strategy ddp", DEFAULT_DEVICE),
        ):
            outcome = book.cell(f"%%distributed {options}\n{code}", 30.0)
            find.that(
                f"{options} trains", outcome.status == "ok", outcome.text[-400:] if outcome.status != "ok" else ""
            )


GRAPH = """
import torch
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(8, 64, device=device)
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range({warm}):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
torch.cuda.current_stream().wait_stream(stream)
with torch.cuda.graph(graph):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
for _ in range(3):
    graph.replay()
loss.item()
"""
COMPILED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
model = torch.compile(model{how})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(8, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@step("K18", "ddp trains a step that is captured as a CUDA graph, and a compiled model", limit_s=80, without_gpu="cpu")
def graphs(place: Place, find: Findings) -> None:
    options = f"{place.ranks()} --strategy ddp"
    cells: list[tuple[str, str]] = [
        ("torch.compile", COMPILED.format(how="" if place.on_gpu else ", backend='aot_eager'"))
    ]
    if place.on_gpu:
        cells.insert(0, ("CUDA graph after 3 steps", GRAPH.format(warm=3)))
    with place.notebook() as book:
        if place.on_gpu:
            refused = book.cell(f"%%distributed {options}\n{GRAPH.format(warm=0)}", 60.0)
            find.that("CUDA graph after no step: it says what to do", "warm-up" in refused.text, refused.text[-400:])
        for what, code in cells:
            with find.going_on(what):
                outcome = book.cell(f"%%distributed {options}\n{code}", 60.0)
                find.that(
                    f"{what} trains", outcome.status == "ok", outcome.text[-400:] if outcome.status != "ok" else ""
                )


PROFILED = """
import time, torch
where = device if {on_gpu} else "cpu"
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20))).to(where)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began_s = time.monotonic()
for step in range({steps}):
    model(torch.ones(16, 32, device=where)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        {flag}
time.monotonic() - began_s
"""


@step(
    "K21",
    "--profile records kernels and the GPU's memory, and Stop in it is as fast as ever",
    limit_s=60,
    without_gpu="bed",
)
def profiled(place: Place, find: Findings) -> None:
    one = place.ranks()
    with place.notebook() as book:
        (pid,) = book.settled(one)
        code = PROFILED.format(on_gpu=place.on_gpu, steps=40, flag="pass")
        (plain_s,) = book.values(one, code)
        outcome = book.ok(f"%%distributed {one} --profile 5 --out took\n{code}")
        find.that("it says what is shown", "shows steps 4-8 on rank 0" in outcome.text, outcome.text[-300:])
        find.figure(
            "40 steps, without and with it", f"{plain_s:.2f} s, {book.ok('print(took[0])').stdout.strip()[:4]} s"
        )
        (path,) = place.folder.rglob("trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        kernels = sum(event.get("cat") == "kernel" for event in events)
        find.that("the trace has kernels", kernels > 100 or not place.on_gpu, f"{kernels} of {len(events)} events")
        counters = {event["name"] for event in events if event["ph"] == "C"}
        find.that("and a timeline of memory", ("memory of GPU 0" in counters) or not place.on_gpu, counters)
        (path,) = place.folder.rglob("memory-rank0.pickle")
        history = pickle.loads(path.read_bytes())["device_traces"]
        told = f"{sum(map(len, history))} entries in {path.stat().st_size / MB:.1f} MB"
        find.that("torch.cuda.memory has a history of the steps", any(history) or not place.on_gpu, told)
        endless = PROFILED.format(on_gpu=place.on_gpu, steps=10**6, flag=place.flag_line("profiled"))
        flags = place.flags("profiled", 1)
        took_s, outcome = book.stopped(f"%%distributed {one} --profile 900\n{endless}", flags, 1.0)
        find.that("Stop is a KeyboardInterrupt", outcome.ename == "KeyboardInterrupt", outcome.text[-300:])
        find.within("Stop", took_s, 3.0)
        same = book.values(one, PID) == [pid]
        find.that("on the same rank", same or not place.on_gpu, same)  # cores that others use may take longer than 2 s


ZERO = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
{device}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
x = torch.randn(8, 8, 16)
losses = []
for batch in x:
    loss = model(batch{to}).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
losses
"""


@step("K22", "--strategy deepspeed trains as the plain loop, and again after Stop", limit_s=80, without_gpu="cpu")
def deepspeed(place: Place, find: Findings) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise Skipped("DeepSpeed is not installed")
    one = place.ranks()
    to = ".to(device)" if place.on_gpu else ""
    code = ZERO.format(device=f"model = model{to}", to=to)
    with place.notebook() as book:
        (pid,) = book.settled(one)
        (wanted,) = book.values(one, code)
        for stage in (1, 3):
            with find.going_on(f"stage {stage}"):
                options = f"{one} --strategy deepspeed --zero {stage}"
                (got,) = book.values(options, code)
                apart = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
                find.that(f"stage {stage}: every loss is that of the plain loop", apart < 1e-4, f"apart by {apart:.1e}")
                flag = place.flag_line(f"zero{stage}")
                endless = code.replace("for batch in x:", f"{flag}\nwhile True:\n    batch = x[0]")
                flags = place.flags(f"zero{stage}", 1)
                took_s, outcome = book.stopped(f"%%distributed {options}\n{endless}", flags, 1.0)
                find.that("Stop is a KeyboardInterrupt", outcome.ename == "KeyboardInterrupt", outcome.text[-300:])
                find.within("Stop", took_s, 3.0)
                (again,) = book.values(options, code)
                find.that(f"stage {stage}: it trains again, with the same losses", again == got)
        find.that("on the same rank", book.values(one, PID) == [pid])


TESTS = ("tests/product/test_gpu.py", "tests/serialization/test_tensors.py")


@step("K19", "the tests that need a GPU pass", limit_s=150, without_gpu=None)
def tests(place: Place, find: Findings) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
    command += ["-W", "default"]  # the machine's torch is another one, and numpy need not be there
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    find.that("pytest -m gpu", done.returncode == 0, lines[-1])
    for line in _failed(lines):
        find.that(line.partition(" - ")[0], False, line.partition(" - ")[2])


def _failed(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith(("FAILED", "ERROR"))]
