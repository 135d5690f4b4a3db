"""What the live view sends to a browser, and what it costs the training that it shows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import turns
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
UNSEEN = """
import jupyter_distrib.kernel.notebook.live_view as _w
_draw, _observe = _w.LiveView.draw, _w.LiveView.observe
def _at_end(view, record, elapsed_s):
    view._again_s = 1.0
    if record.ended:
        _draw(view, record, elapsed_s)
_w.LiveView.draw = _at_end
_w.LiveView.observe = lambda view, event, record: _observe(view, event, record) if record.ended else None
"""


def flood(plan: Plan) -> Iterator[Figure]:
    """Every rank prints as fast as it can."""
    for ranks in (2, 8, 64):
        with plan.warm(f"--ranks {ranks}", env=WIDGET) as notebook:
            outcome = notebook.good(f"%%distributed --ranks {ranks}{FLOOD}")
            notebook.good("import jupyter_distrib.kernel.session.session as _s")
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
    """A training loop that reports every step, with the view and the shares of its time, and without both, by turns."""
    line = "--ranks 2 --strategy ddp"
    compared, costs = turns.Compared(), [0.0, 0.0]
    with plan.warm(line, env=WIDGET) as seen, plan.warm(line, env=WIDGET) as unseen:
        unseen.good(UNSEEN)
        first, second = (
            partial(turns.in_a_cell, notebook, f"{line} --fresh", how="unchanged", reports=True, shares=shares)
            for notebook, shares in ((seen, True), (unseen, False))
        )
        for number in plan.times(8, 1):
            with turns.both(first, second, number=number) as pair:
                before_s = [each.cpu_s for each in (seen, unseen)]
                compared.add(*turns.rates(*pair, steps=100, pairs=plan.times(14, 10), pause_s=0.3))
                now_s = [each.cpu_s for each in (seen, unseen)]
            costs = [cost + now - before for cost, now, before in zip(costs, now_s, before_s, strict=True)]
    rates = (compared.mine, compared.other)
    used = [cost / sum(100 / rate for rate in each) for cost, each in zip(costs, rates, strict=True)]
    yield Figure(
        what="training that reports every step, 2 ranks: with the live view and the shares of time, against without",
        measured=f"{compared}; the kernel uses {used[0]:.1%} of a core against {used[1]:.1%}",
        target=">= 0.99",
        ok=compared.ratio >= 0.99,
        numbers={
            "ratios": compared.ratios,
            "with_steps_per_s": compared.mine,
            "without_steps_per_s": compared.other,
            "kernel_shares": used,
        },
    )
