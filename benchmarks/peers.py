"""The same things with the other systems that run cells on several processes, side by side with ours.

python benchmarks/peers.py --setup [PEER ...]

makes an environment for each in `.venv-bench/` (several GB; torch first, by itself, then the peer). Every step of a
peer has a time limit; what it started is ended afterwards. What fails or hangs is written down as that.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from driver import ROOT, Notebook, Outcome
from plan import Plan

VENVS = ROOT / ".venv-bench"
TORCH = "torch==2.13.0"
KERNEL = "ipykernel==7.4.0"
LIMIT_S = 60.0
"""For one step of a peer; the first one, which may start servers, gets twice that."""
MB = 1 << 20

_REDUCE = "import torch\nimport torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2"
_PRINTS = "for i in range(20000): print(f'line {i}')"
_HANG = """\
import os, time, torch, torch.distributed as dist
if os.environ['RANK'] == '0': dist.all_reduce(torch.ones(1))
time.sleep(600)"""
_SETUP = """\
    import os, torch.distributed as dist
    os.environ.update(RANK=str(r), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    dist.init_process_group('gloo')
"""
_PORT = "import socket; s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]; s.close()\n"


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How one system is told to do each thing; an empty cell: it cannot."""

    package: str
    start: str
    noop: str
    reduce: str
    push: str = ""
    """Use the notebook's `big` on both ranks."""
    give: str = ""
    """Make 64 MB on each rank and return it."""
    prints: str = ""
    hang: str = ""
    """One rank waits in an all_reduce that the other never joins."""
    module: str = ""
    """Run as the kernel instead of ipykernel."""
    interrupt_by_message: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.package.partition("==")[0].partition("[")[0]

    @property
    def python(self) -> str:
        return str(VENVS / self.name / "bin" / "python") if self.package != OURS else sys.executable


OURS = "jupyter_distrib"
_DDP = "%%distributed --ranks 2 --strategy ddp\n"
_LAUNCH = "_r = torchrunx.Launcher(hostnames=['localhost'], workers_per_host=2, backend='gloo').run"
_RAY = f"""\
import os
os.environ['RAY_DEDUP_LOGS'] = '0'
import ray
ray.init(num_cpus=2, include_dashboard=False)
@ray.remote(num_cpus=1)
class Rank:
    def setup(self, r, port):
{_indented(_SETUP)}
    def call(self, f, *a): return f(*a)
{_PORT}ranks = [Rank.remote() for _ in range(2)]
ray.get([each.setup.remote(r, port) for r, each in enumerate(ranks)])
def run(f, *a): return ray.get([each.call.remote(f, *a) for each in ranks])
"""


def _called(body: str, call: str) -> str:
    return f"def f():\n{_indented(body)}{call}"


_NOTEBOOK_LAUNCHER = "notebook_launcher(f, num_processes=2)"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            package=OURS,
            start="%load_ext jupyter_distrib",
            noop=_DDP + "pass",
            reduce=_DDP + _REDUCE,
            push=_DDP + "big.sum().item()",
            give=_DDP + f"import torch\ntorch.ones({16 * MB})",
            prints=_DDP + _PRINTS,
            hang=_DDP + _HANG,
        ),
        Peer(
            package="ipyparallel==9.2.0",
            start="import ipyparallel as ipp\ncluster = ipp.Cluster(n=2)\nrc = cluster.start_and_connect_sync()\n"
            f"view = rc[:]; view.block = True; view.activate()\n{_PORT}"
            f"def setup(r, port):\n{_SETUP}"
            "for each in [rc[r].apply_async(setup, r, port) for r in range(2)]: each.get()",
            noop="%%px\npass",
            reduce="%%px\n" + _REDUCE,
            push="view.push({'big': big}); _r = view.apply_sync(lambda: big.sum().item())",
            give=f"_r = view.apply_sync(lambda: __import__('torch').ones({16 * MB}))",
            prints="%%px\n" + _PRINTS,
            hang="%%px\n" + _HANG,
        ),
        Peer(
            package="nbdistributed==0.1.0",
            start="%load_ext nbdistributed\n%dist_init --num-processes 2",
            noop="%%distributed\npass",
            reduce="%%distributed\n" + _REDUCE,
            prints="%%distributed\n" + _PRINTS,
            hang="%%distributed\n" + _HANG,
        ),
        Peer(
            package="jupyter-distributed==0.1.1",
            module="jupyter_distributed.kernel",
            start="import torch.distributed as dist; dist.init_process_group('gloo')",
            noop="pass",
            reduce=_REDUCE,
            prints=_PRINTS,
            hang=_HANG,
            interrupt_by_message=True,
            env={"JUPYTER_DISTRIBUTED_WORLD_SIZE": "2"},
        ),
        Peer(
            package="accelerate==1.15.0",
            start="import os; os.environ['ACCELERATE_USE_CPU'] = 'true'\nfrom accelerate import notebook_launcher",
            noop=_called("pass", _NOTEBOOK_LAUNCHER),
            reduce=_called(
                "from accelerate import PartialState\nPartialState(cpu=True)\n" + _REDUCE, _NOTEBOOK_LAUNCHER
            ),
            prints=_called(_PRINTS, _NOTEBOOK_LAUNCHER),
            hang=_called("from accelerate import PartialState\nPartialState(cpu=True)\n" + _HANG, _NOTEBOOK_LAUNCHER),
        ),
        Peer(
            package="torchrunx==0.4.0",
            start="import torchrunx",
            noop=_called("pass", f"{_LAUNCH}(f)"),
            reduce=_called(_REDUCE, f"{_LAUNCH}(f)"),
            push=f"{_LAUNCH}(lambda b: b.sum().item(), big)",
            give=f"{_LAUNCH}(lambda: __import__('torch').ones({16 * MB}))",
            prints=_called(_PRINTS, f"{_LAUNCH}(f)"),
            hang=_called(_HANG, f"{_LAUNCH}(f)"),
        ),
        Peer(
            package="ray[default]==2.60.0",
            start=_RAY,
            noop=_called("pass", "_r = run(f)"),
            reduce=_called(_REDUCE, "_r = run(f)"),
            push="_ref = ray.put(big)\n_r = run(lambda b: b.sum().item(), _ref)",
            give=f"_r = run(lambda: __import__('torch').ones({16 * MB}))",
            prints=_called(_PRINTS, "_r = run(f)"),
            hang=_called(_HANG, "_r = run(f)"),
        ),
    )
}


def compare(plan: Plan, names: list[str] | None = None) -> list[dict[str, str]]:
    """Measure each peer that is set up; a mapping from what was measured to what came out."""
    columns = []
    for name in names or PEERS:
        peer = PEERS[name]
        column = {"2 ranks": peer.package}
        columns.append(column)
        if not Path(peer.python).exists():
            column["first cell with an all_reduce, fresh kernel"] = "not set up: benchmarks/peers.py --setup"
            continue
        try:
            _measure(plan, peer, column)
        except Exception as error:
            column["broken"] = f"{type(error).__name__}: {error}"[:200]
        print("\n".join(f"{name}: {what}: {text}" for what, text in column.items()), flush=True)
    return columns


def _measure(plan: Plan, peer: Peer, column: dict[str, str]) -> None:
    argv = [peer.python, "-m", peer.module, "-f", "{connection_file}"] if peer.module else None
    package = plan.package if peer.package == OURS else None
    path = {"PATH": f"{Path(peer.python).parent}:/usr/bin:/bin"}
    with Notebook(python=peer.python, package=package, argv=argv, env={**path, **peer.env}) as notebook:
        if peer.interrupt_by_message:
            notebook.manager.kernel_spec.interrupt_mode = "message"
        start = notebook.cell(peer.start, 2 * LIMIT_S)
        first = notebook.cell(peer.reduce, LIMIT_S)
        what = "first cell with an all_reduce, fresh kernel"
        column[what] = _told(first, start.wall_s + first.wall_s) if start.status == "ok" else "start: " + _told(start)
        if first.status != "ok":  # one more chance: some are only slow to start
            first = notebook.cell(peer.reduce, LIMIT_S)
            column[what] += f"; again: {_told(first)}"
        if first.status != "timeout":
            _warm(plan, peer, notebook, column)


def _warm(plan: Plan, peer: Peer, notebook: Notebook, column: dict[str, str]) -> None:
    notebook.cell("import torch\nbig = torch.ones(512 * 2**20 // 4)") if peer.push else None
    few = 2 if plan.quick else 5
    many = 5 if plan.quick else 20
    for what, code, count in (
        ("warm no-op cell", peer.noop, many),
        ("warm all_reduce cell", peer.reduce, many),
        ("512 MB captured, used by both", peer.push, few),
        ("64 MB returned by each", peer.give, few),
        ("20,000 lines per rank", peer.prints, 1),
    ):
        column[what] = _best(notebook, code, count) if code else "not supported"
        if "hangs" in column[what]:
            return
    column["interrupt of a hung all_reduce"] = _interrupt(peer, notebook) if peer.hang else "not supported"


def _best(notebook: Notebook, code: str, count: int) -> str:
    times: list[float] = []
    while len(times) < count and sum(times) < LIMIT_S / 2:
        outcome = notebook.cell(code, 2 * LIMIT_S)
        if outcome.status != "ok":
            return _told(outcome)
        times.append(outcome.wall_s)
    text = _seconds(min(times)) + (f" (median {_seconds(statistics.median(times))})" if len(times) > 1 else "")
    if _PRINTS.splitlines()[-1].strip() in code:
        whole = len(re.findall(r"\bline \d+\s", outcome.all_text + "\n"))
        text += f", {outcome.messages:,} messages, {whole:,} of 40,000 lines whole in the notebook"
    return text


def _interrupt(peer: Peer, notebook: Notebook) -> str:
    """What a press of the stop button does, and whether the next cell works."""
    sent = notebook.send(peer.hang)
    time.sleep(8 if peer.name == "torchrunx" else 3)
    began_s = time.monotonic()
    notebook.interrupt()
    outcome = notebook.finish(sent, LIMIT_S / 2)
    if outcome.status == "timeout":
        return f"cell hangs (> {LIMIT_S / 2:.0f} s)"
    after = notebook.cell(peer.reduce, LIMIT_S / 2)
    return f"cell back after {_seconds(outcome.ended_s - began_s)}; next cell: {_told(after)}"


def _told(outcome: Outcome, seconds: float | None = None) -> str:
    if outcome.status == "timeout":
        return f"hangs (> {outcome.wall_s:.0f} s)"
    if outcome.status != "ok":
        return f"fails: {outcome.ename or outcome.status} {outcome.text.strip().splitlines()[-1:]}"[:160]
    return _seconds(outcome.wall_s if seconds is None else seconds)


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def setup(names: list[str]) -> None:
    """Make the environments of these peers, or of all."""
    for name in names or PEERS:
        peer = PEERS[name]
        if peer.package == OURS:
            continue
        print(f"{peer.package} in {VENVS / name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENVS / name)], check=True)
        for packages in ([TORCH], [KERNEL, "numpy", peer.package]):
            subprocess.run([peer.python, "-m", "pip", "install", "-q", *packages], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--setup", nargs="*", choices=[name for name in PEERS if name != OURS], required=True, metavar="PEER"
    )
    setup(parser.parse_args().setup)
