"""Large values and a lot of output."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import processes
from driver import Notebook
from plan import Plan
from report import Figure, spread

MB = 1 << 20
CLONE = """\
import time as _t
_b = _t.perf_counter(); _x = big.clone(); _clone_s = _t.perf_counter() - _b
del _x
"""
PRINTS = "for i in range({count}): print('line', i)"
TO_FILE = """\
import sys, time
began = time.perf_counter()
with open(sys.argv[1], "w", buffering=1) as sys.stdout:
    {prints}
sys.stdout = sys.__stdout__
print(time.perf_counter() - began)
"""


def captured(plan: Plan) -> Iterator[Figure]:
    """512 MB of the notebook, read by every rank."""
    use = "%%distributed --ranks 2 --cache 0\nbig.sum().item()"
    with plan.warm() as notebook:
        notebook.good(f"import torch\nbig = torch.ones({512 * MB // 4})")
        notebook.good(use)
        clones, cells = [], []
        for _ in plan.times(5, 3):
            notebook.good(CLONE)
            clones.append(notebook.value("_clone_s"))
            cells.append(notebook.good(use).wall_s)
        copies = _copies(notebook)
    yield Figure(
        what="512 MB captured tensor, used by both ranks",
        measured=f"{spread(cells)} = {min(cells) / min(clones):.1f} clones (one is {spread(clones)})",
        target="<= 3 x one clone()",
        ok=min(cells) <= 3 * min(clones),
        numbers={"times_s": cells, "clone_s": clones},
    )
    yield Figure(
        what="512 MB captured tensor: memory outside the kernel while both ranks use it",
        measured=f"{copies:.2f} copies for 2 ranks",
        target="one copy per node",
        ok=copies <= 1.05,
        numbers={"copies": copies},
    )


def _copies(notebook: Notebook) -> float:
    """How often the tensor is in the memory of the machine, besides the notebook's own."""
    before = processes.pss_bytes(notebook.processes())
    mark = notebook.runtime / "both-have-it"
    cell = f"""%%distributed --ranks 2
import pathlib, time
total = big.sum().item()
pathlib.Path("{mark}-%d" % rank).touch()
time.sleep(3)
"""
    sent = notebook.send(cell)
    wait_for([Path(f"{mark}-{rank}") for rank in range(2)])
    during = processes.pss_bytes(notebook.processes())
    notebook.finish(sent)
    return (during - before) / (512 * MB)


def wait_for(paths: list[Path], limit_s: float = 60.0) -> None:
    """Until the ranks have made these files."""
    deadline = time.monotonic() + limit_s
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {paths}")
        time.sleep(0.002)


def returned(plan: Plan) -> Iterator[Figure]:
    """64 MB from each rank to the notebook."""
    with plan.warm() as notebook:
        times = []
        for _ in plan.times(8, 5):
            times.append(
                notebook.good(f"%%distributed --ranks 2 --out got\nimport torch\ntorch.ones({16 * MB})").wall_s
            )
            assert notebook.value("[value.sum().item() for value in got]") == [16.0 * MB] * 2
            notebook.good("del got, _\nOut.clear()\nimport gc; gc.collect()")
    yield Figure(
        what="64 MB tensor made and returned by each of 2 ranks",
        measured=spread(times[1:]),
        target="<= 0.1 s",
        ok=min(times) <= 0.1,
        numbers={"times_s": times},
    )


def prints(plan: Plan) -> Iterator[Figure]:
    """20,000 lines from each rank."""
    count = 20_000
    times, messages, complete = [], [], []
    with plan.warm() as notebook:
        for _ in plan.times(6, 4):
            outcome = notebook.good("%%distributed --ranks 2\n" + PRINTS.format(count=count))
            times.append(outcome.wall_s)
            messages.append(outcome.messages)
            complete.append(logs_complete(notebook, count))
    yield Figure(
        what="20,000 printed lines per rank, 2 ranks",
        measured=f"{spread(times[1:])}, {max(messages)} messages, {told_lines(complete)} in the log",
        target="<= 0.3 s, <= 30 messages, every line in the log",
        ok=min(times) <= 0.3 and max(messages) <= 30 and all(complete),
        numbers={"times_s": times, "messages": messages},
    )


def million(plan: Plan) -> Iterator[Figure]:
    """1,000,000 lines from each rank, beside the same prints into files."""
    count = 1_000_000
    times, plain, growth, messages, complete = [], [], [], [], []
    with plan.warm() as notebook:
        for _ in plan.times(5, 2):
            plain.append(_to_files(notebook.runtime, count))
            before = processes.peak_bytes(notebook.pid, reset=True)
            outcome = notebook.good("%%distributed --ranks 2\n" + PRINTS.format(count=count), timeout_s=300)
            growth.append((processes.peak_bytes(notebook.pid) - before) / MB)
            times.append(outcome.wall_s)
            messages.append(outcome.messages)
            complete.append(logs_complete(notebook, count))
    ratio = statistics.median(mine / other for mine, other in zip(times, plain, strict=True))
    yield Figure(
        what="1,000,000 printed lines per rank, 2 ranks, against the same into files",
        measured=f"{spread(times)} against {spread(plain)}: x{ratio:.2f}; {max(messages)} messages, "
        f"{told_lines(complete)} in the log",
        target="<= 2 x",
        ok=ratio <= 2 and all(complete),
        numbers={"times_s": times, "to_files_s": plain, "messages": messages},
    )
    yield Figure(
        what="1,000,000 printed lines per rank: highest memory of the kernel",
        measured=f"+{max(growth):.1f} MB",
        target="<= +50 MB",
        ok=max(growth) <= 50,
        numbers={"growth_mb": growth},
    )


def _to_files(folder: Path, count: int) -> float:
    """Two plain interpreters at once, each printing line by line into a file of its own."""
    code = TO_FILE.format(prints=PRINTS.format(count=count))
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(folder / f"plain{n}")], stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    return max(float(process.communicate()[0]) for process in running)


def logs_complete(notebook: Notebook, count: int, ranks: int = 2) -> bool:
    """Whether the log of each rank of the last run is exactly what it printed."""
    run = max((notebook.runtime / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
    wanted = "".join(f"line {i}\n" for i in range(count))
    return all((run / f"rank{rank}.log").read_text() == wanted for rank in range(ranks))


def told_lines(complete: list[bool]) -> str:
    return "every line" if all(complete) else "NOT every line"
