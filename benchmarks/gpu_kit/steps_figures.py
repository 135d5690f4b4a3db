"""Figures of which nothing is asked: what starting, NCCL and the driver cost here."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.gpu_kit.machine import ROOT
from benchmarks.gpu_kit.place import PID, Book, Place
from benchmarks.gpu_kit.step import Findings, step
from benchmarks.gpu_kit.steps_stop import MEET
from benchmarks.gpu_kit.steps_training import PLAIN

MB = 1 << 20
PRODUCT = """
import time, torch
began_s = time.monotonic()
(torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item()
time.monotonic() - began_s
"""


@step("M1", "what it costs: a rank's start, a process group, the driver", limit_s=60, without_gpu="cpu")
def costs(place: Place, find: Findings) -> None:
    before = place.used_bytes() if place.on_gpu else 0
    one, group = place.ranks(), f"{place.ranks()} --strategy ddp"
    with place.notebook() as book:
        book.settled(one)
        started_s = [book.ok(f"%%distributed {one} --fresh\nNone").wall_s for _ in range(5)]
        find.figure("a cell on fresh ranks", _spread(started_s))
        warm_s = [book.ok(f"%%distributed {one}\nNone").wall_s for _ in range(30)]
        find.figure("a cell on warm ranks", _spread(warm_s))
        bare = _used(place, before)
        first_s = book.ok(f"%%distributed {group}\n{MEET}").wall_s
        find.figure("the first collective", f"{first_s:.2f} s")
        met_s = [book.ok(f"%%distributed {group}\n{MEET}").wall_s for _ in range(10)]
        find.figure("the next ones", _spread(met_s))
        find.figure("GPU memory: bare, with a process group", f"{bare}, {_used(place, before)} MB")
        again_s = [_regrouped(book, group) for _ in range(3)]
        find.figure("the first collective after a cell that failed", _spread(again_s))
        find.figure("GPU memory after three of them", f"{_used(place, before)} MB")
        find.figure(
            "the first product of matrices, on a rank that has idled or not", " or ".join(_first_products(book, one))
        )
        find.that("all of it ran", len(book.values(one, PID)) == 1)
    if place.on_gpu:
        find.figure("nvmlInit and a look at all GPUs", f"{1e3 * _nvml_s():.1f} ms")


BARE = "import torch; torch.zeros(1, device={device!r}).item()"


@step("M2", "beside a bare `python -c` and torchrun on this machine", limit_s=90, without_gpu="cpu")
def beside(place: Place, find: Findings) -> None:
    device = "cuda" if place.on_gpu else "cpu"
    bare_s = [_program(place, "-c", BARE.format(device=device))[0] for _ in range(3)]
    find.figure("python -c with one tensor", _spread(bare_s))
    with place.notebook() as book:
        first_s = book.ok(f"%%distributed {place.ranks()}\nimport torch\ntorch.zeros(1, device=device).item()").wall_s
        find.figure("the first cell with one tensor, after %load_ext", f"{first_s:.2f} s")
        steps, full = (20, "full") if place.on_gpu else (2, "small")
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        torchrun += ["--master-port", "29517", "-m", "benchmarks.gpu_kit.models", "timed"]
        for name in ("resnet", "gpt"):
            own, whole_s, theirs = [], [], []
            for _ in range(2):
                call = f"models.timed({name!r}, device, {PLAIN}, {steps}, {full == 'full'})"
                cell = f"from benchmarks.gpu_kit import models\n{call}"
                own += book.values(f"{place.ranks()} --strategy ddp", cell)
                took_s, told = _program(place, *torchrun, name, str(steps), full)
                whole_s.append(took_s)
                theirs.append(float(told.splitlines()[-1]))
            find.figure(f"{name}: the whole torchrun", _spread(whole_s))
            told = f"{min(own) / min(theirs):.3f} of torchrun's ({1e3 * min(own):.2f}, {1e3 * min(theirs):.2f} ms)"
            find.that(
                f"{name}: a step is at most 1.03 of torchrun's",
                min(own) <= 1.03 * min(theirs) or not place.on_gpu,
                told,
            )


def _program(place: Place, *arguments: str) -> tuple[float, str]:
    """Run Python with these arguments; return the seconds it took and what it printed."""
    env = {**os.environ, **place.environment(), "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]
    return time.monotonic() - began_s, done.stdout


def _regrouped(book: Book, group: str) -> float:
    book.fails(f"%%distributed {group}\nraise ValueError")
    return book.ok(f"%%distributed {group}\n{MEET}").wall_s


def _first_products(book: Book, one: str) -> list[str]:
    """Return how long they take: before the first cell comes, a rank has loaded what it needs."""
    found = []
    for idle_s in (2.0, 0.0):
        if idle_s:
            book.ok("%distributed_pool restart")
            time.sleep(idle_s)
        (took_s,) = book.values(one if idle_s else f"{one} --fresh", PRODUCT)
        found.append(f"{1e3 * took_s:.1f} ms")
    return found


def _used(place: Place, before: int) -> str:
    return f"{(place.used_bytes() - before) / MB:.0f}" if place.on_gpu else "none"


def _nvml_s() -> float:
    import pynvml

    began_s = time.monotonic()
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
    pynvml.nvmlShutdown()
    return time.monotonic() - began_s


def _spread(times_s: list[float]) -> str:
    return (
        f"{1e3 * min(times_s):.1f} ms (median {1e3 * statistics.median(times_s):.1f}, worst {1e3 * max(times_s):.1f})"
    )
