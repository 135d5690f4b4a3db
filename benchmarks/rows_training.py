"""Training in a cell beside the same script under torchrun, and what a rank holds of a model."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import turns
from plan import Plan
from report import Figure

_BYTES = r"bytes: (\d+) (-?\d+)"
_TOOK = r"took: ([\d.]+)"
STEPS = {"cnn": 20, "mlp": 2}
"""Of one turn."""
LABELS = {"ddp": "hand-written DDP", "prepare": "prepare()", "unchanged": "unchanged single-device code"}
NAMES = {"cnn": "CNN of the size of the digits", "mlp": "MLP with 4.2 million parameters"}


MODEL = """
import ctypes, gc, torch
from torch import nn

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free, but kept by the allocator of C
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

begin = anonymous()
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(8, 1024)).pow(2).mean().backward()
    optimizer.step()
state = [value for each in optimizer.state.values() for value in each.values()]
held = [local(each) for each in (*model.parameters(), *(each.grad for each in model.parameters()), *state)]
print("bytes:", sum(each.nbytes for each in held), anonymous() - begin)
"""


def memory(plan: Plan) -> Iterator[Figure]:
    """Bytes that each of 2 CPU ranks holds after three steps of AdamW, of a model with 33.6 million parameters."""
    found: dict[str, list[tuple[float, float]]] = {"ddp": [], "fsdp": []}
    for _ in plan.times(5, 1):
        for strategy, sizes in found.items():
            with plan.warm(f"--ranks 2 --strategy {strategy}") as notebook:
                text = notebook.good(f"%%distributed --ranks 2 --strategy {strategy}\n{MODEL}").all_text
            sizes += [(int(held) / 1e6, int(resident) / 1e6) for held, resident in re.findall(_BYTES, text)]
    held, resident = (
        {name: statistics.median(each[i] for each in sizes) for name, sizes in found.items()} for i in (0, 1)
    )
    yield Figure(
        what="memory of a rank, fsdp against ddp: 33.6 million parameters, gradients, AdamW's state",
        measured=f"{held['fsdp']:.0f} against {held['ddp']:.0f} MB; resident {resident['fsdp']:.0f} against "
        f"{resident['ddp']:.0f} MB, when the allocator of C has given back what is free",
        target="half",
        ok=held["fsdp"] <= 0.55 * held["ddp"] and resident["fsdp"] < resident["ddp"],
        numbers={
            f"{name}_{kind}_mb": [each[i] for each in sizes]
            for name, sizes in found.items()
            for i, kind in enumerate(("held", "resident"))
        },
    )


PRODUCTS = """
import time
import numpy
matrix = numpy.random.rand(300, 300)
matrix @ matrix
began = time.perf_counter()
for _ in range(200):
    matrix @ matrix
print("took:", time.perf_counter() - began)
"""


def linear_algebra(plan: Plan) -> Iterator[Figure]:
    """numpy's matrix products on 2 ranks at once, beside two plain processes that are given half of the cores each, by
    turns."""
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    env = {**os.environ, "OMP_NUM_THREADS": str(share)}
    times: dict[str, list[float]] = {"ranks": [], "processes": []}
    with plan.warm() as notebook:
        for _ in plan.times(10, 2):
            text = notebook.good(f"%%distributed --ranks 2 --strategy none\n{PRODUCTS}").all_text
            times["ranks"].append(max(map(float, re.findall(_TOOK, text))))
            command = [sys.executable, "-c", PRODUCTS]
            both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
            texts = [each.communicate()[0] for each in both]
            times["processes"].append(max(float(took) for text in texts for took in re.findall(_TOOK, text)))
    ratio = statistics.median(mine / other for mine, other in zip(*times.values(), strict=True))
    yield Figure(
        what="matrix products with numpy on 2 ranks at once, against 2 processes with half of the cores each",
        measured=f"x{ratio:.2f}",
        target="<= 1.1",
        ok=ratio <= 1.1,
        numbers={f"{name}_s": found for name, found in times.items()},
    )


def one_rank(plan: Plan) -> Iterator[Figure]:
    """A step of one rank under ddp and without a strategy, by turns."""
    compared = turns.Compared()
    with plan.warm("--ranks 1 --strategy ddp") as first, plan.warm("--ranks 1") as second:
        mine, other = (
            partial(
                turns.in_a_cell, notebook, f"--ranks 1 --strategy {strategy} --fresh", model="tiny", how="unchanged"
            )
            for notebook, strategy in ((first, "ddp"), (second, "none"))
        )
        for number in plan.times(8, 2):
            with turns.both(mine, other, number=number) as pair:
                compared.add(*turns.rates(*pair, steps=200, pairs=plan.times(30, 20)))
    yield Figure(
        what="training on one rank, a tiny model: under ddp against no strategy",
        measured=str(compared),
        target=">= 0.98",
        ok=compared.ratio >= 0.98,
        numbers={"ratios": compared.ratios, "ddp_steps_per_s": compared.mine, "none_steps_per_s": compared.other},
    )


def training(plan: Plan) -> Iterator[Figure]:
    """Steps a second of 2 CPU ranks, by turns."""
    line = "--ranks 2 --strategy ddp"
    with plan.warm(line) as notebook:
        for model, name in NAMES.items():
            for how, label in LABELS.items():
                compared = turns.Compared()
                cell = partial(turns.in_a_cell, notebook, f"{line} --fresh", model=model, how=how)
                script = partial(turns.under_torchrun, model=model)
                for number in plan.times(8, 1):
                    with turns.both(cell, script, number=number) as pair:
                        compared.add(*turns.rates(*pair, steps=STEPS[model], pairs=plan.times(30, 20)))
                yield Figure(
                    what=f"DDP training, {name}, {label}, against torchrun",
                    measured=str(compared),
                    target=">= 0.98",
                    ok=compared.ratio >= 0.98,
                    numbers={
                        "ratios": compared.ratios,
                        "steps_per_s": compared.mine,
                        "torchrun_steps_per_s": compared.other,
                    },
                )
