"""How long a user waits for ranks and for a cell that does nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from plan import LOAD, Plan, import_torch_s
from report import Figure, spread

GROUP = "import torch\nx = torch.ones(1)\ntorch.distributed.all_reduce(x)\nassert x.item() == world_size"


def noop(plan: Plan) -> Iterator[Figure]:
    """A warm cell that does nothing, beside a plain cell that does nothing."""
    cells = {"cell": "%%distributed --ranks 2\npass", "cell that returns values": "%%distributed --ranks 2\nrank"}
    with plan.warm(runs=5) as notebook:
        times: dict[str, list[float]] = {name: [] for name in ("plain", *cells)}
        for _ in plan.times(60, 20):
            times["plain"].append(notebook.good("pass").wall_s)
            for name, code in cells.items():
                times[name].append(notebook.good(code).wall_s)
    for name in cells:
        pairs = list(zip(times[name], times["plain"], strict=True))
        best = min(times[name]) - min(times["plain"])
        median = statistics.median(mine - plain for mine, plain in pairs)
        ratio = statistics.median(mine / plain for mine, plain in pairs)
        yield Figure(
            what=f"warm no-op {name} against a plain `pass` cell, 2 ranks",
            measured=f"+{1000 * best:.1f} ms (median of pairs +{1000 * median:.1f} ms, x{ratio:.2f}); "
            f"plain {1000 * min(times['plain']):.1f} ms",
            target="<= +3 ms" if name == "cell" else "",
            ok=best <= 0.003 if name == "cell" else None,
            numbers={"times_s": times[name], "plain_s": times["plain"]},
        )


def first(plan: Plan) -> Iterator[Figure]:
    """`%load_ext` and the first cell of a kernel, with no agent on the machine."""
    times: dict[int, list[float]] = {2: [], 8: []}
    imports = []
    import_torch_s()  # into the page cache
    for _ in plan.times(5, 2):
        imports.append(import_torch_s())
        for ranks, measured in times.items():
            with plan.notebook() as notebook:
                measured.append(
                    notebook.good(LOAD).wall_s + notebook.good(f"%%distributed --ranks {ranks}\npass").wall_s
                )
    for ranks, measured in times.items():
        limit_s = 1.2 * min(imports) + 0.3 + (0.2 if ranks == 8 else 0)
        yield Figure(
            what=f"first cell of a fresh kernel, nothing running, {ranks} ranks (with %load_ext)",
            measured=f"{spread(measured)}; one `import torch` {min(imports):.2f} s",
            target=f"<= {limit_s:.2f} s (1.2 x import torch + {0.3 if ranks == 2 else 0.5} s)",
            ok=min(measured) <= limit_s,
            numbers={"times_s": measured, "import_torch_s": imports},
        )


def restart(plan: Plan) -> Iterator[Figure]:
    """The first cell after the restart button."""
    loads, cells = [], []
    with plan.warm() as notebook:
        for _ in plan.times(5, 3):
            notebook.restart()
            loads.append(notebook.good(LOAD).wall_s)
            cells.append(notebook.good("%%distributed --ranks 2\npass").wall_s)
    yield Figure(
        what="first cell after a kernel restart, after %load_ext",
        measured=f"{spread(cells)}; %load_ext itself {spread(loads)}",
        target="<= 0.4 s",
        ok=min(cells) <= 0.4,
        numbers={"times_s": cells, "load_s": loads},
    )


def fresh(plan: Plan) -> Iterator[Figure]:
    """New processes and a new gloo group for one cell."""
    for ranks, limit_s in ((4, 0.1), (8, 0.15)):
        line = f"--ranks {ranks} --strategy ddp"
        with plan.warm(line, GROUP) as notebook:
            times = [notebook.good(f"%%distributed {line} --fresh\n{GROUP}").wall_s for _ in plan.times(10, 5)]
        yield Figure(
            what=f"--fresh cell with a gloo group and an all_reduce, {ranks} ranks",
            measured=spread(times),
            target=f"<= {limit_s} s",
            ok=min(times) <= limit_s,
            numbers={"times_s": times},
        )


def imported(plan: Plan) -> Iterator[Figure]:
    """`import jupyter_distrib` in a fresh interpreter."""
    code = (
        "import sys, time; t = time.perf_counter(); import jupyter_distrib;"
        "print(time.perf_counter() - t, 'torch' in sys.modules, 'IPython' in sys.modules)"
    )
    lines = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=plan.package, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(6)
    ]
    times = [float(line[0]) for line in lines][1:]
    torch = any(line[1] == "True" for line in lines)
    yield Figure(
        what="import jupyter_distrib",
        measured=f"{spread(times)}; torch {'IS' if torch else 'is not'} loaded",
        target="<= 50 ms, without torch",
        ok=min(times) <= 0.05 and not torch,
        numbers={"times_s": times},
    )
