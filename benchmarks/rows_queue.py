"""How long a user waits for submitting a run, what a queued run costs, and how soon a script begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from plan import Plan
from report import Figure, spread

SETUP = """\
import json, time
from jupyter_distrib import distributed
@distributed(ranks=1)
def work(seconds=0.0):
    import time
    time.sleep(seconds)
%distributed_pool add two --kind local --ranks 2
%distributed_pool use two
_ = [run.result() for run in [work.submit() for _ in range(4)]]
"""
SUBMIT = """\
busy = [work.submit(3.0) for _ in range(2)]
took = []
for _ in range(20):
    began = time.perf_counter()
    work.submit()
    took.append(time.perf_counter() - began)
for run in reversed(jupyter_distrib.runs(active=True)): run.cancel()
for run in busy: run.wait_ended(10)
print(json.dumps(took))
"""
MANY = """\
began = time.perf_counter()
runs = [work.submit() for _ in range(100)]
for run in runs: run.result()
print(json.dumps((time.perf_counter() - began) / 100))
"""
SCRIPT = """\
open("begin.py", "w").write("import sys, time; print(time.time() - float(sys.argv[1]))")
import jupyter_distrib, time
took = []
for _ in range(6):
    began = time.time()
    run = get_ipython().run_line_magic("distributed_run", f"--ranks 2 --detach begin.py {began}")
    run.result()
    took.append(max(float(run.logs(rank)) for rank in range(2)))
print(json.dumps(took[1:]))
"""


def queued(plan: Plan) -> Iterator[Figure]:
    """Runs of one rank, over the two slots of a pool."""
    with plan.warm("--ranks 1") as notebook:
        notebook.good(SETUP)
        notebook.good("import jupyter_distrib")
        submitting = _json_in(notebook.good(SUBMIT).text)
        many = [_json_in(notebook.good(MANY).text) for _ in plan.times(5, 2)]
    yield Figure(
        what="submit() of a function on a busy pool",
        measured=spread(submitting),
        target="<= 20 ms (median)",
        ok=sorted(submitting)[len(submitting) // 2] <= 0.02,
        numbers={"times_s": submitting},
    )
    yield Figure(
        what="100 queued runs of one rank that do nothing, over 2 slots, each",
        measured=spread(many),
        target="<= 10 ms",
        ok=min(many) <= 0.01,
        numbers={"times_s": many},
    )


def _json_in(text: str) -> Any:
    """The last line that is JSON, of a cell that may have shown other things too."""
    lines = [line.strip() for line in text.splitlines()]
    return json.loads(next(line for line in reversed(lines) if line[:1] in "[0123456789" and line))


def script(plan: Plan) -> Iterator[Figure]:
    """The first line of a script on warm ranks, from the line magic on."""
    with plan.warm() as notebook:
        notebook.good("import json")
        times = _json_in(notebook.good(SCRIPT).text)
    yield Figure(
        what="a script begins on 2 warm ranks after",
        measured=spread(times),
        target="<= 0.1 s",
        ok=min(times) <= 0.1,
        numbers={"times_s": times},
    )
