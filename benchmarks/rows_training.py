"""Training in a cell beside the same script under torchrun."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from driver import Notebook
from plan import Plan
from report import Figure

SCRIPT = Path(__file__).resolve().parent / "train.py"
STEPS = {"cnn": 1000, "mlp": 60}
LABELS = {"ddp": "hand-written DDP", "prepare": "prepare()", "unchanged": "unchanged single-device code"}
NAMES = {"cnn": "CNN of the size of the digits", "mlp": "MLP with 4.2 million parameters"}


def training(plan: Plan) -> Iterator[Figure]:
    """Steps a second of 2 CPU ranks, interleaved."""
    rates: dict[tuple[str, str], list[float]] = {}
    with plan.warm("--ranks 2 --strategy ddp") as notebook:
        for _ in plan.times(20, 1):
            for model in STEPS:
                rates.setdefault((model, "torchrun"), []).append(_torchrun(model))
                rates.setdefault((model, "ddp"), []).append(_cell(notebook, model, "ddp"))
                for how in ("prepare", "unchanged"):
                    rates.setdefault((model, how), []).append(_cell(notebook, model, how))
    for model, name in NAMES.items():
        for how, label in LABELS.items():
            mine, other = rates[model, how], rates[model, "torchrun"]
            ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
            yield Figure(
                what=f"DDP training, {name}, {label}, against torchrun",
                measured=f"x{ratio:.3f} (median of pairs); {statistics.median(mine):.0f} against "
                f"{statistics.median(other):.0f} steps/s",
                target=">= 0.98",
                ok=ratio >= 0.98,
                numbers={"steps_per_s": mine, "torchrun_steps_per_s": other},
            )


def _torchrun(model: str) -> float:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # what our ranks get
    env = {
        **os.environ,
        "BENCH_MODEL": model,
        "BENCH_STEPS": str(STEPS[model]),
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    return _rate(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def _cell(notebook: Notebook, model: str, how: str) -> float:
    text = SCRIPT.read_text()
    for name, value in (("MODEL", model), ("STEPS", STEPS[model]), ("HOW", how)):
        text = re.sub(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.MULTILINE)
    return _rate(notebook.good(f"%%distributed --ranks 2 --strategy ddp\n{text}").all_text)


def _rate(text: str) -> float:
    found = re.search(r"steps/s: ([\d.]+)", text)
    assert found, text
    return float(found[1])
