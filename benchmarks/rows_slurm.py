"""The slurm pool on a Slurm of two nodes on loopback, beside `srun` itself, and 64 simulated hosts behind real pipes.
Needs what `tests/slurm/bed.py` needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import rows_data
import rows_ssh
from driver import Notebook
from plan import LOAD, Plan, imports_of_torch_s
from report import HERE, Figure, spread

if TYPE_CHECKING:
    from tests.slurm.bed import SlurmBed

_LINE = "%%distributed --ranks 4"
_REDUCE = """\
import torch, torch.distributed
torch.distributed.all_reduce(torch.ones(1))"""
_POOLS = """\
pool = "cluster"
[pools.cluster]
kind = "slurm"
interface = "lo"
python = "{python}"
nodes = 2
"""
_BIG = 512 * rows_data.MB


@contextmanager
def _bed() -> Iterator[SlurmBed]:
    from tests.slurm.bed import SlurmBed

    bed = SlurmBed()
    try:
        yield bed
    finally:
        bed.close()


def _skipped() -> Figure | None:
    sys.path.insert(0, str(HERE.parent))
    from tests.slurm.bed import missing

    return Figure(what="the slurm pool", measured=f"not measured: {missing()}") if missing() else None


@contextmanager
def _notebook(plan: Plan, bed: SlurmBed, more: str = "") -> Iterator[Notebook]:
    """One whose pools file names the cluster, with these lines more."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pools.toml"
        file.write_text(_POOLS.format(python=sys.executable) + more)
        env = {"JUPYTER_DISTRIB_CONFIG": str(file), "PYTHONPATH": rows_ssh.alone(plan, folder), **bed.environment}
        with plan.notebook(env=env) as notebook:
            rows_ssh.load(notebook)
            yield notebook


def _give_back(bed: SlurmBed, notebook: Notebook) -> None:
    notebook.good("%distributed_pool stop")
    while bed.jobs():  # its nodes stay for ten seconds
        time.sleep(0.2)


def _run(bed: SlurmBed, *words: str, **keywords: object) -> float:
    began_s = time.perf_counter()
    subprocess.run(words, env={**os.environ, **bed.environment}, check=True, stdout=subprocess.DEVNULL, **keywords)  # type: ignore[call-overload]
    return time.perf_counter() - began_s


def granted(plan: Plan) -> Iterator[Figure]:
    """From the request for an allocation to the end of a cell with an all_reduce, beside what it has to take."""
    if skipped := _skipped():
        yield skipped
        return
    times, steps, imports = [], [], []
    with _bed() as bed, _notebook(plan, bed) as notebook:
        for _ in plan.times(5, 2):
            imports.append(imports_of_torch_s(2))
            steps.append(_run(bed, "srun", "-N2", "hostname"))
            times.append(notebook.good(f"{_LINE} --strategy ddp\n{_REDUCE}", timeout_s=120).wall_s)
            _give_back(bed, notebook)
    limit_s = min(steps) + min(imports) + 0.7
    yield Figure(
        what="new allocation of 2 nodes and first all_reduce of 4 ranks, by Slurm",
        measured=spread(times),
        target=f"<= {limit_s:.2f} s (srun hostname {min(steps):.2f} s + import torch on both nodes, which share this "
        f"machine, {min(imports):.2f} s + 0.7 s)",
        ok=min(times) <= limit_s,
        numbers={"times_s": times, "srun_s": steps, "import_torch_s": imports},
    )


def value(plan: Plan) -> Iterator[Figure]:
    """512 MB of the notebook on four ranks of two nodes, and `srun -u` with the same to both side by side, by turns;
    with and without the notebook's folder on the nodes."""
    if skipped := _skipped():
        yield skipped
        return
    with _bed() as bed, tempfile.TemporaryFile() as file:
        for _ in range(512):
            file.write(os.urandom(rows_data.MB))
        for said, more in (("by the folder that they share", ""), ("by srun alone", "copy_files = true\n")):
            times, bare = [], []
            with _notebook(plan, bed, more) as notebook:
                notebook.good(f"{_LINE}\npass", timeout_s=120)
                notebook.good(f"import torch\nbig = torch.ones({_BIG // 4})")
                for _ in plan.times(5, 2):
                    times.append(notebook.good(f"{_LINE} --cache 0\nbig[-1].item()", timeout_s=120).wall_s)
                    bare.append(_piped_s(bed, file.fileno()))
                _give_back(bed, notebook)
            yield Figure(
                what=f"512 MB captured tensor to 4 ranks on 2 nodes of Slurm, {said}",
                measured=f"{spread(times)}; `srun -u cat` of the same to both side by side {spread(bare)}",
                target="<= 1.2 x that",
                ok=min(times) <= 1.2 * min(bare),
                numbers={"times_s": times, "srun_s": bare},
            )


def _piped_s(bed: SlurmBed, file: int) -> float:
    env = {**os.environ, **bed.environment}
    began_s = time.perf_counter()
    pipes = []
    for node in ("n1", "n2"):
        with open(f"/proc/self/fd/{file}", "rb") as again:
            words = ["srun", "-u", "-N1", "-n1", "-w", node, "sh", "-c", "cat >/dev/null"]
            pipes.append(subprocess.Popen(words, env=env, stdin=again))
    for pipe in pipes:
        pipe.wait()
    return time.perf_counter() - began_s


def piped(plan: Plan) -> Iterator[Figure]:
    """What 512 ranks on 64 hosts cost the kernel, behind real pipes."""
    sys.path.insert(0, str(HERE.parent))
    from tests.pools.command import test_many_hosts as many

    shares = []
    for _ in plan.times(3, 1):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pools.toml"
            file.write_text(many.pool())
            env = {"JUPYTER_DISTRIB_CONFIG": str(file), "JUPYTER_DISTRIB_VIEW": "widget"}
            with plan.notebook(env=env) as notebook:
                notebook.good(LOAD)
                notebook.good("%distributed_pool start")
                before = notebook.value(many.COST)
                notebook.good("%%distributed\npass", timeout_s=300)
                after = notebook.value(many.COST)
        shares.append((after[0] - before[0]) / (after[1] - before[1]))
    yield Figure(
        what=f"kernel while {many.RANKS} ranks on {many.HOSTS} hosts report 5 steps/s each "
        "(simulated hosts, real pipes)",
        measured=", ".join(f"{100 * share:.0f}%" for share in shares) + " of a core",
        target="< 50% of a core",
        ok=max(shares) < 0.5,
        numbers={"shares": shares},
    )
