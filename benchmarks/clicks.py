"""Presses Stop of the sidebar in a real JupyterLab and prints, as JSON, how long each rank took to react.

    .venv-browser/bin/python benchmarks/clicks.py REPETITIONS      # started by the row `stop`

A program of its own, because the browser has an environment of its own (`sh .ci/browser` makes it), with a kernel of
every ipykernel in it. Rank 0 sits in a collective, rank 1 in a loop; both write down when they leave it. The click's
time is that of the browser's own event, by the same clock.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser, expect  # noqa: E402 - found by the line above

from tests.browser import lab  # noqa: E402

CELL = """%%distributed --ranks 2 --strategy ddp
import time
import torch.distributed as dist
print("in the cell", flush=True)
try:
    if rank == 0:
        dist.barrier()
    while True:
        time.sleep(0.01)
finally:
    print(f"left at {time.time():.4f}", flush=True)"""
NOTE_CLICKS = """() => document.addEventListener("click", event => {
    window.clickedS = (performance.timeOrigin + event.timeStamp) / 1000;
}, true)"""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    others = {path.name: path for path in sorted((ROOT / ".venv-browser").glob("ipykernel-*"))}
    kernels: dict[str, Path | None] = {**others, "python3": None}
    with lab.serving(kernels) as (browser, server):
        found = [measure(browser, server, kernel, int(sys.argv[1])) for kernel in kernels]
    print(json.dumps(found))


def measure(browser: Browser, server: lab.Server, kernel: str, repetitions: int) -> dict[str, object]:
    name = f"{kernel}.ipynb"
    server.notebook(name, ["%load_ext jupyter_distrib", "import ipykernel; print(ipykernel.__version__)", CELL], kernel)
    page = lab.Lab(browser, server, name)
    page.load_extension()
    panel = page.panel()
    page.page.evaluate(NOTE_CLICKS)
    page.run(1)
    version = page.ended(1).inner_text().strip()
    times_s = []
    for _ in range(repetitions):
        page.run(2)
        run = panel.locator(".jp-Distributed-run").first
        expect(run).to_contain_text("running")
        expect(page.output(2)).to_contain_text("in the cell")
        run.get_by_role("button", name="Stop").click()
        expect(page.output(2)).to_contain_text("KeyboardInterrupt")
        expect(run).to_contain_text("stopped")
        page.wait_idle(2)
        left_s = [float(each) for each in re.findall(r"left at ([\d.]+)", page.output(2).inner_text())]
        times_s.append(max(left_s) - page.page.evaluate("window.clickedS"))
    page.close()
    return {"ipykernel": version, "times_s": times_s}


if __name__ == "__main__":
    main()
