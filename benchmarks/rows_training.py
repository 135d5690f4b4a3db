"""Training in a cell beside the same script under torchrun, and what a rank holds of a model."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from functools import partial

import turns
from plan import Plan
from report import Figure

_BYTES = r"bytes: (\d+) (-?\d+)"
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
