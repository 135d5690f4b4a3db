"""What the live view sends to a browser, and what it costs the training that it shows."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from plan import Plan
from report import Figure

WIDGET = {"JUPYTER_DISTRIB_VIEW": "widget"}
FLOOD_S = 4
FLOOD = f"""
import time
end = time.monotonic() + {FLOOD_S}
step = 0
while time.monotonic() < end:
    print(f"step {{step}} of rank {{rank}}: loss 0.123456, accuracy 0.98765, lr 0.0003, grad norm 1.2345, 812 samples")
    step += 1
"""
TRAIN = """
import time, torch, jupyter_distrib
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = jupyter_distrib.prepare(model, optimizer)
x, y = torch.randn(128, 256), torch.randint(10, (128,))
for step in jupyter_distrib.progress(range(20), label="warm up"):
    torch.nn.functional.cross_entropy(model(x), y).backward()
began = time.perf_counter()
for step in jupyter_distrib.progress(range({steps}), label="step"):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    jupyter_distrib.report(loss=loss.item(), lr=0.01)
    if step % 20 == 0:
        print("step", step, "loss", round(loss.item(), 4))
print("steps/s:", {steps} / (time.perf_counter() - began))
"""
SWITCH = """
import jupyter_distrib.widget as _w
_w.LiveView.__call__ = {call}
"""


def flood(plan: Plan) -> Iterator[Figure]:
    """Every rank prints as fast as it can."""
    for ranks in (2, 8, 64):
        with plan.warm(f"--ranks {ranks}", env=WIDGET) as notebook:
            outcome = notebook.good(f"%%distributed --ranks {ranks}{FLOOD}")
            notebook.good("import jupyter_distrib.session as _s")
            lines = int(notebook.value("_s.current().history[-1].record.line_count"))
        rate, size = outcome.messages / outcome.wall_s, outcome.size_bytes / outcome.wall_s
        yield Figure(
            what=f"live view while {ranks} ranks print as fast as they can for {FLOOD_S} s",
            measured=f"{rate:.1f} messages/s, {size / 1e3:.0f} kB/s to the browser; "
            f"{lines / outcome.wall_s:,.0f} lines/s printed",
            target="<= 10 messages/s",
            ok=rate <= 10,
            numbers={"messages": outcome.messages, "size_bytes": outcome.size_bytes, "wall_s": outcome.wall_s},
        )


def watched(plan: Plan) -> Iterator[Figure]:
    """A training loop that reports every step, with the view and without it, in turn."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    cell = "%%distributed --ranks 2 --strategy ddp" + TRAIN.format(steps=600 if plan.quick else 2000)
    with plan.warm("--ranks 2 --strategy ddp", env=WIDGET) as notebook:
        notebook.good(SWITCH.format(call="_w.LiveView.__call__") + "_call = _w.LiveView.__call__")
        notebook.good(cell)
        ways = [
            ("with", "_call"),
            ("without", "lambda view, record, _: _call(view, record, _) if record.ended else 1.0"),
        ]
        for number in plan.times(16, 3):
            for how, call in ways if number % 2 else reversed(ways):
                notebook.good(SWITCH.format(call=call))
                found = re.search(r"steps/s: ([\d.]+)", notebook.good(cell).all_text)
                assert found
                rates[how].append(float(found[1]))
    ratio = statistics.median(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
    yield Figure(
        what="training that reports every step, 2 ranks: with the live view against without it",
        measured=f"x{ratio:.3f} (median of pairs); {statistics.median(rates['with']):.0f} against "
        f"{statistics.median(rates['without']):.0f} steps/s",
        target=">= 0.99",
        ok=ratio >= 0.99,
        numbers={f"{how}_steps_per_s": found for how, found in rates.items()},
    )
