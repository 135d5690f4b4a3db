"""Ranks that die or hang, and what many runs leave behind."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import processes
from driver import Notebook, Outcome
from plan import Plan
from report import Figure, spread
from rows_data import wait_for
from rows_start import GROUP

LINE = "%%distributed --ranks {ranks} --strategy ddp"
KILLED = """\
import os, pathlib, signal, time, torch
x = torch.ones(1)
torch.distributed.all_reduce(x)
if rank == 2:
    time.sleep(0.2)  # the others wait by then
    pathlib.Path("{mark}").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.all_reduce(x)
"""
RESTARTED = """\
import os, pathlib, signal, time, torch, jupyter_distrib
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
began_s = time.monotonic()
plain = jupyter_distrib.resume("{folder}", model=model, optimizer=optimizer)
loaded_s = time.monotonic() - began_s
for step in range(plain.get("step", 0), 3):
    model(torch.ones(8, 1000)).sum().backward()
    optimizer.step()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        break
    jupyter_distrib.save("{folder}", model=model, optimizer=optimizer, step=step)
    if rank == 1 and step == 1:
        pathlib.Path("{mark}").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
(time.monotonic(), loaded_s)
"""
KEEP = "%%distributed --ranks 2 --strategy ddp --keep kept\nkept = [rank]\nimport os; os.getpid()"
CHECK = "%%distributed --ranks 2 --strategy ddp\n" + GROUP + "\nimport os; (os.getpid(), kept == [rank])"

_HERE = 'import pathlib, time, torch\nready = lambda: pathlib.Path("{mark}-%d" % rank).touch()\n'
HANGS = {
    "all_reduce that one rank never joins": """\
ready()
if rank == 0:
    torch.distributed.all_reduce(torch.ones(1))
time.sleep(600)
""",
    "DDP backward": """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
for step in range(10**9):
    model(torch.ones(8, 100)).sum().backward()
    if step == 5:
        ready()
    if step == 5 and rank == 1:
        time.sleep(600)
""",
    "FSDP2 step": """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
for part in (*model, model):
    fully_shard(part, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10**9):
    model(torch.ones(8, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        ready()
    if step == 5 and rank == 1:
        time.sleep(600)
""",
    "DataLoader": """\
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        time.sleep(600)
loader = torch.utils.data.DataLoader(Slow(), num_workers=2)
ready()
for batch in loader:
    pass
""",
    "training loop of both ranks": """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
for step in range(10**9):
    model(torch.ones(8, 100)).sum().backward()
    if step == 5:
        ready()
""",
}


def killed(plan: Plan) -> Iterator[Figure]:
    """A rank of 4 is killed while the others wait for it in an all_reduce."""
    line = LINE.format(ranks=4)
    back, again = [], []
    with plan.warm("--ranks 4 --strategy ddp", GROUP) as notebook:
        mark = notebook.runtime / "killed-at"
        for _ in plan.times(10, 5):
            outcome = notebook.cell(f"{line}\n{KILLED.format(mark=mark)}", timeout_s=60)
            assert outcome.ename == "RankLost", outcome.all_text
            at_s = float(mark.read_text())
            following = notebook.good(f"{line}\n{GROUP}")
            back.append(outcome.ended_s - at_s)
            again.append(following.ended_s - at_s)
    yield Figure(
        what="rank killed with SIGKILL inside a collective, 4 ranks: cell back",
        measured=spread(back),
        target="0.25 s",
        ok=min(back) <= 0.25,
        numbers={"times_s": back},
    )
    yield Figure(
        what="... and the next cell (an all_reduce, sent at once) good, since the kill",
        measured=spread(again),
        target="0.5 s",
        ok=min(again) <= 0.5,
        numbers={"times_s": again},
    )


def restarted(plan: Plan) -> Iterator[Figure]:
    """A rank of 2 is killed in a training with a checkpoint, which --max-restarts goes on with."""
    line = LINE.format(ranks=2) + " --max-restarts 1 --out ends"
    times_s = []
    with plan.warm("--ranks 2 --strategy ddp", GROUP) as notebook:
        for number in plan.times(10, 5):
            mark, folder = notebook.runtime / "killed-at", notebook.runtime / f"checkpoint-{number}"
            notebook.good(f"{line}\n{RESTARTED.format(mark=mark, folder=folder)}")
            first_s, loaded_s = ast.literal_eval(notebook.good("max(ends)").text.strip())
            times_s.append(first_s - loaded_s - float(mark.read_text()))
    yield Figure(
        what="rank killed with SIGKILL in a training, 2 ranks: first step of the next attempt, without load",
        measured=spread(times_s),
        target="1 s",
        ok=min(times_s) <= 1.0,
        numbers={"times_s": times_s},
    )


def interrupted(plan: Plan) -> Iterator[Figure]:
    """The kernel's interrupt while ranks hang in different places; then the same ranks go on."""
    back: dict[str, list[float]] = {name: [] for name in HANGS}
    again: list[float] = []
    good, troubles = 0, []
    with plan.warm() as notebook:
        pids = _keep(notebook)
        for number in plan.times(50, 10):
            name = list(HANGS)[number % len(HANGS)]
            after_s = _interrupt(notebook, name, number)
            following = notebook.cell(CHECK, timeout_s=60)
            trouble = _trouble(notebook, after_s, following, pids)
            good += not trouble
            if after_s is not None:
                back[name].append(after_s)
                again.append(following.wall_s)
            if trouble:
                troubles.append(f"{name}: {trouble}")
                pids = _keep(notebook)
    total = len(plan.times(50, 10))
    everything = [each for times in back.values() for each in times]
    for name, times in back.items():
        yield Figure(
            what=f"interrupt, {name}: cell back",
            measured=spread(times),
            target="0.3 s",
            ok=bool(times) and max(times) <= 0.3,
            numbers={"times_s": times},
        )
    yield Figure(
        what="interrupt: cell back in time, next all_reduce good, same processes, kept values there",
        measured=f"{good} of {total}; next cell {spread(again)}" + "".join(f"; {each}" for each in troubles[:5]),
        target=f"{total} of {total}",
        ok=good == total and max(everything) <= 0.3,
        numbers={"good": good, "total": total, "next_s": again, "troubles": troubles},
    )


def _keep(notebook: Notebook) -> list[int]:
    notebook.good(KEEP)
    return notebook.value("list(_)")  # type: ignore[no-any-return]


def _interrupt(notebook: Notebook, name: str, number: int) -> float | None:
    """Seconds from the interrupt to the end of the cell; None if it did not come in a minute."""
    mark = notebook.runtime / f"hang-{number}"
    body = _HERE.replace("{mark}", str(mark)) + HANGS[name]
    sent = notebook.send(f"{LINE.format(ranks=2)}\n{body}")
    wait_for([Path(f"{mark}-{rank}") for rank in range(2)])
    time.sleep(0.2)
    at_s = time.monotonic()
    notebook.interrupt()
    outcome = notebook.finish(sent, timeout_s=60)
    return outcome.ended_s - at_s if outcome.ename == "KeyboardInterrupt" else None


def _trouble(notebook: Notebook, after_s: float | None, following: Outcome, pids: list[int]) -> str:
    if after_s is None:
        return "the cell did not end with KeyboardInterrupt"
    if after_s > 0.3:
        return f"{after_s:.2f} s"
    if following.status != "ok":
        return f"the next cell: {following.all_text[-200:]}"
    seen = notebook.value("[tuple(each) for each in _]")
    if [pid for pid, _ in seen] != pids:
        return f"other processes: {seen}, were {pids}"
    return "" if all(kept for _, kept in seen) else "kept values lost"


def growth(plan: Plan) -> Iterator[Figure]:
    """What is left of many runs on one pool."""
    runs = len(plan.times(500, 50))
    plain = "import math\nprint(math.pi)\nmath.pi"
    cell = "%%distributed --ranks 2 --strategy ddp\n" + GROUP + "\nprint(rank)\nx.item()"
    with plan.warm("--ranks 2 --strategy ddp", GROUP + "\nprint(rank)\nx.item()", runs=100) as notebook:
        for _ in range(30):
            notebook.good(plain)
        start = processes.census(notebook.processes())
        for _ in range(runs):
            notebook.good(plain)
        before = processes.census(notebook.processes())
        parts = {pid: processes.census([pid]).memory_bytes for pid in notebook.processes()}
        for _ in range(runs // 2):
            notebook.good(cell)
        between = processes.census(notebook.processes())
        for _ in range(runs // 2):
            notebook.good(cell)
        after = processes.census(notebook.processes())
        grown = {
            "kernel" if pid == notebook.pid else str(pid): (processes.census([pid]).memory_bytes - was) / runs / 1024
            for pid, was in parts.items()
        }
    counts = ("processes", "threads", "descriptors", "shared_files")
    more = {name: getattr(after, name) - getattr(before, name) for name in counts}
    kb = (after.memory_bytes - before.memory_bytes) / runs / 1024
    late_kb = (after.memory_bytes - between.memory_bytes) / (runs // 2) / 1024
    plain_kb = (before.memory_bytes - start.memory_bytes) / runs / 1024
    yield Figure(
        what=f"{runs} runs on one pool: processes, threads, descriptors, shared memory",
        measured=", ".join(f"{name.replace('_', ' ')} {count:+}" for name, count in more.items()),
        target="no growth",
        ok=not any(count > 0 for count in more.values()),
        numbers=dict(more),
    )
    yield Figure(
        what=f"{runs} runs on one pool: memory of all processes together",
        measured=f"{kb:+.1f} kB a run ({', '.join(f'{name} {each:+.1f}' for name, each in grown.items())}), "
        f"{late_kb:+.1f} in the second half; "
        f"plain cells with the same output {plain_kb:+.1f} kB each",
        target="<= 10 kB a run",
        ok=kb <= 10,
        numbers={"kb_per_run": kb, "late_kb_per_run": late_kb, "plain_kb_per_cell": plain_kb, "by_process_kb": grown},
    )
