"""Runs the steps one after another, each in a process of its own with a limit, and goes on whatever becomes of it.

    python -m benchmarks.gpu_kit.run [--bed] [--only STEP ...] [--results FOLDER] [--total-s S] [--list]

`sh .ci/gpu` makes the environment for it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import processes
from benchmarks.gpu_kit import (
    machine,
    report,
    steps_dry,
    steps_figures,
    steps_habits,
    steps_libraries,
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

DECLARED = (
    steps_start,
    steps_memory,
    steps_stop,
    steps_training,
    steps_many,
    steps_libraries,
    steps_dry,
    steps_figures,
    steps_habits,
)
"""The files of steps; importing one declares what is in it."""
FIRST = ("M1", "K2", "K8b", "K9", "K8a", "K8c", "K10", "K11", "K4", "K15", "M2", "K23", "K24", "K25", "K26", "K27")
"""The steps that tell most come first, since a machine may be had for minutes only."""
LOGS = "gpu-kit-logs.tar.gz"
"""The archive with the logs of what failed."""
MOST_OF_A_LOG = 1 << 20
"""Bytes at the end of each log that are kept."""
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
        return _be(STEPS[options.step], Place(options.where, gpus, keep=True), options.findings)
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
    (folder / LOGS).unlink(missing_ok=True)
    rows: list[Row] = []
    for name in options.steps:
        left_s = total_s - (time.monotonic() - began_s)
        rows.append(run_step(STEPS[name], found.gpus, left_s, options.also, logs=folder / LOGS))
        if rows[-1].reason.startswith(NO_NCCL):
            os.environ[NO_NCCL_KNOWN] = rows[-1].reason
        print(f"{rows[-1].verdict} {name} ({rows[-1].took_s:.1f} s): {report.short(rows[-1])}", flush=True)
        page = report.save(folder, {**found.about, "took": f"{time.monotonic() - began_s:.0f} s"}, rows)
    print(f"\n{report.counted(rows)} in {time.monotonic() - began_s:.0f} s\n{page}")
    return int(any(row.verdict == "FAIL" for row in rows))


def in_order() -> list[str]:
    """Return the names of all steps: what tells most, then K1, K2, ..., K8a, ..., then what needs more GPUs."""

    def key(name: str) -> tuple[int, bool, int, str]:
        number, letter = re.findall(r"\d+|[a-z]$|$", name)[:2]
        place = FIRST.index(name) if name in FIRST else len(FIRST)
        return place, not name.startswith("K"), int(number), letter

    return sorted(STEPS, key=key)


def default_folder(*, on_gpu: bool) -> Path:
    """Return where the files go: $OUT, else among the results if a GPU was there."""
    if out := os.environ.get("OUT"):
        return Path(out)
    return machine.ROOT / ("benchmarks/results" if on_gpu else "artifacts")


def run_step(step: Step, gpus: Sequence[Gpu], left_s: float, also: str | None = None, *, logs: Path) -> Row:
    """Run one step in a process of its own, and end everything that it leaves; add to `logs` if it fails."""
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
        skipped, broke, output = _wait(process, limit_s)
    finally:
        left = _end(process, mark)
    took_s, checks = time.monotonic() - began_s, tuple(read(findings))
    if left:
        broke = f"{broke}; these processes do not end: {left}".removeprefix("; ")
    verdict = report.verdict(checks, broke, skipped)
    if verdict == "FAIL":
        (folder / "output").write_text(output)
        _keep_logs(step.name, folder, logs)
    shutil.rmtree(folder, ignore_errors=True)
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


def _keep_logs(name: str, folder: Path, archive: Path) -> None:
    """Add what a failed step has printed, and the ends of all its logs, to the archive."""
    found = {f"{name}/output": folder / "output"}
    for path in sorted(folder.glob("p-*/logs/**/*")):
        if path.is_file() and not path.is_symlink():
            found[f"{name}/{path.relative_to(folder)}"] = path
    new = archive.with_suffix(".new")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(new, "w:gz") as out:
        if archive.exists():
            with tarfile.open(archive) as old:
                for member in old:
                    out.addfile(member, old.extractfile(member))
        for member_name, path in found.items():
            content = path.read_bytes()[-MOST_OF_A_LOG:]
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    new.replace(archive)


def _wait(process: subprocess.Popen[str], limit_s: float) -> tuple[str, str, str]:
    """Wait for the end of a step. Return why it was left out, what it broke off with, and all that it printed."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        printed = late.output or b""
        output = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return "", f"not done within its limit of {limit_s:.0f} s", output
    said = output.rpartition(LAST_WORD)[2].strip() if LAST_WORD in output else output.strip()[-700:]
    match process.returncode:
        case 0:
            return "", "", output
        case _ if process.returncode == SKIPPED:
            return said, "", output
        case status:
            return "", said or f"status {status}", output


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
        traceback.print_exc()
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
