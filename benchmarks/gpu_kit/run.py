"""Runs the steps one after another, each in a process of its own with a limit, and goes on whatever becomes of it.

    python -m benchmarks.gpu_kit.run [--bed] [--only STEP ...] [--results FOLDER] [--total-s S] [--list]

`sh .ci/gpu` makes the environment for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import processes
from benchmarks.gpu_kit import (
    machine,
    report,
    steps_figures,
    steps_many,
    steps_memory,
    steps_start,
    steps_stop,
    steps_training,
)
from benchmarks.gpu_kit.machine import Gpu
from benchmarks.gpu_kit.place import MARK, NO_NCCL, NO_NCCL_KNOWN, Place
from benchmarks.gpu_kit.report import Row
from benchmarks.gpu_kit.step import STEPS, Findings, Skipped, Step, Where, read

DECLARED = (steps_start, steps_memory, steps_stop, steps_training, steps_many, steps_figures)
"""The files of steps; importing one declares what is in it."""
TOTAL_S, TOTAL_WITHOUT_GPU_S = 510.0, 1800.0
SLOWER_WITHOUT_GPU = 3.0
"""The factor for the limits of steps where there is no GPU: on a few shared cores, nobody pays for the minutes."""
BEGAN = "GPU_KIT_BEGAN"
"""The variable with the time, in seconds since 1970, at which `.ci/gpu` began: making the environment counts."""
LEAST_S = 8.0
"""A step is not begun with less than this left."""
SKIPPED = 77
"""The exit status of a step that has said why it was left out."""
LAST_WORD = "the step says:"
"""What stands before the reason, behind all that kernels have printed."""


def main() -> int:
    """Run what was asked for; return the exit status."""
    options = _options()
    if options.step:
        gpus = tuple(Gpu(**gpu) for gpu in json.loads(options.gpus))
        return _be(STEPS[options.step], Place(options.where, gpus), options.findings)
    if options.list:
        print(
            "\n".join(
                f"{step.name:5} {step.limit_s:4.0f} s  {step.title}" for step in map(STEPS.__getitem__, options.steps)
            )
        )
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    began_s = time.monotonic() - max(0.0, time.time() - float(os.environ.get(BEGAN, time.time())))
    found = machine.look()
    if options.bed:
        found = replace(found, gpus=(), why_no_gpu="--bed", about={**found.about, "gpus": ""})
    if not found.gpus:
        print(f"No GPU ({found.why_no_gpu}): feigned GPUs and CPU ranks instead.", flush=True)
    total_s = options.total_s or (TOTAL_S if found.gpus else TOTAL_WITHOUT_GPU_S)
    folder = options.results or default_folder(on_gpu=bool(found.gpus))
    rows: list[Row] = []
    for name in options.steps:
        left_s = total_s - (time.monotonic() - began_s)
        rows.append(run_step(STEPS[name], found.gpus, left_s, options.also))
        if rows[-1].reason.startswith(NO_NCCL):
            os.environ[NO_NCCL_KNOWN] = rows[-1].reason
        print(f"{rows[-1].verdict} {name} ({rows[-1].took_s:.1f} s): {report.short(rows[-1])}", flush=True)
        page = report.save(folder, {**found.about, "took": f"{time.monotonic() - began_s:.0f} s"}, rows)
    print(f"\n{report.counted(rows)} in {time.monotonic() - began_s:.0f} s\n{page}")
    return int(any(row.verdict == "FAIL" for row in rows))


def in_order() -> list[str]:
    """Return the names of all steps: K1, K2, ..., K8a, ..., then what needs more GPUs."""

    def key(name: str) -> tuple[bool, int, str]:
        number, letter = re.findall(r"\d+|[a-z]$|$", name)[:2]
        return not name.startswith("K"), int(number), letter

    return sorted(STEPS, key=key)


def default_folder(*, on_gpu: bool) -> Path:
    """Return where the files go: $OUT, else among the results if a GPU was there."""
    if out := os.environ.get("OUT"):
        return Path(out)
    return machine.ROOT / ("benchmarks/results" if on_gpu else "artifacts")


def run_step(step: Step, gpus: Sequence[Gpu], left_s: float, also: str | None = None) -> Row:
    """Run one step in a process of its own, and end everything that it leaves."""
    where, reason = place_of(step, len(gpus))
    if where is None:
        return _row(step, step.without_gpu or "gpu", "SKIP", reason)
    if left_s < LEAST_S:
        return _row(step, where, "SKIP", "no time left")
    limit_s = min(step.limit_s * (1.0 if where == "gpu" else SLOWER_WITHOUT_GPU), left_s)
    mark, folder = secrets.token_hex(6), Path(tempfile.mkdtemp(prefix="kit-"))
    findings, began_s = folder / "findings", time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_kit.run", "--step", step.name, "--where", where]
    command += ["--gpus", json.dumps([asdict(gpu) for gpu in gpus])]
    command += ["--also", also] if also else []
    process = subprocess.Popen(
        [*command, "--findings", str(findings)],
        cwd=machine.ROOT,
        env={**os.environ, MARK: mark, "TMPDIR": str(folder), "PYTHONPATH": _path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        skipped, broke = _wait(process, limit_s)
    finally:
        left = _end(process, mark)
    took_s, checks = time.monotonic() - began_s, tuple(read(findings))
    shutil.rmtree(folder, ignore_errors=True)
    if left:
        broke = f"{broke}; these processes do not end: {left}".removeprefix("; ")
    verdict = report.verdict(checks, broke, skipped)
    return replace(_row(step, where, verdict, broke or skipped), took_s=round(took_s, 1), checks=checks)


def place_of(step: Step, gpus: int) -> tuple[Where | None, str]:
    """Return where a step runs on a machine with so many GPUs; or None, and why it does not."""
    if gpus >= step.gpus:
        return "gpu", ""
    if gpus:
        return None, f"needs {step.gpus} GPUs, and {gpus} {'is' if gpus == 1 else 'are'} here"
    if step.without_gpu is None:
        return None, "needs a GPU"
    return step.without_gpu, ""


def _path() -> str:
    return os.pathsep.join(filter(None, (str(machine.ROOT), os.environ.get("PYTHONPATH"))))


def _wait(process: subprocess.Popen[str], limit_s: float) -> tuple[str, str]:
    """Wait for the end of a step. Return why it was left out, and what it broke off with."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "", f"not done within its limit of {limit_s:.0f} s"
    said = output.rpartition(LAST_WORD)[2].strip() if LAST_WORD in output else output.strip()[-700:]
    match process.returncode:
        case 0:
            return "", ""
        case _ if process.returncode == SKIPPED:
            return said, ""
        case status:
            return "", said or f"status {status}"


def _end(process: subprocess.Popen[str], mark: str) -> list[int]:
    """Kill the step, and all that it has started and left. Return what does not end, as in a driver that hangs."""

    def find() -> list[int]:
        marked = processes.marked(MARK, mark)
        return sorted({*marked, *processes.descendants(marked)})

    process.kill()
    processes.end(find)
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
    return find()


def _row(step: Step, where: Where, verdict: report.Verdict, reason: str) -> Row:
    return Row(step=step.name, title=step.title, verdict=verdict, where=where, reason=reason, took_s=0.0, checks=())


def _be(step: Step, place: Place, findings: Path) -> int:
    """Be the process of one step. Its last line says why it was left out, or what went wrong."""
    try:
        with place:
            step.run(place, Findings(findings))
    except Skipped as skipped:
        print(LAST_WORD, skipped)
        return SKIPPED
    except Exception as error:
        print(LAST_WORD, f"{type(error).__name__}: {error}"[-700:])
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bed", action="store_true", help="as if there were no GPU: feigned GPUs and CPU ranks")
    add("--only", nargs="+", metavar="STEP", help=f"some of: {', '.join(STEPS)}")
    add("--results", type=Path, help="folder of the two files (default: $OUT, or benchmarks/results)")
    add("--total-s", type=float, help=f"seconds for everything (default: {TOTAL_S:.0f} where there is a GPU)")
    add("--list", action="store_true", help="list the steps and their limits")
    add("--also", metavar="MODULE", help="a module with more steps, which are run by --only")
    add("--step", help=argparse.SUPPRESS)
    add("--where", choices=["gpu", "bed", "cpu"], help=argparse.SUPPRESS)
    add("--findings", type=Path, help=argparse.SUPPRESS)
    add("--gpus", default="[]", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.only or in_order()
    if options.also:
        importlib.import_module(options.also)
    if unknown := [name for name in options.steps if name not in STEPS]:
        parser.error(f"no such step: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
