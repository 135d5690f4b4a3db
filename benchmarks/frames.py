"""Counts the frames of the live view of 64 ranks in a real browser and prints them as JSON.

    .venv-browser/bin/python benchmarks/frames.py SECONDS      # started by the row `frames`

All ranks move, report and print before each of ten updates a second. A program of its own for the same reason as
`clicks.py`. The browser has no GPU here, so that its processor paints as well.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402 - found by the line above

from jupyter_distrib.kernel.views import page_code  # noqa: E402
from jupyter_distrib.kernel.views.state import StateDelta  # noqa: E402
from tests.browser import lab  # noqa: E402
from tests.browser.test_run_view import MOUNT, a_record, move  # noqa: E402

RANKS = 64
UPDATES_PER_S = 10
COUNT = """() => {
    window.frames_ms = [];
    const count = (at_ms) => { window.frames_ms.push(at_ms); requestAnimationFrame(count); };
    requestAnimationFrame(count);
}"""


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=lab.chromium(), args=lab.CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.set_content("<!DOCTYPE html><body>")
        page.add_style_tag(content=page_code.style(page_code.RUN))
        record, pieces = a_record(RANKS), StateDelta("local")
        held = {**pieces.changed(record, 0.0), "clock": {"elapsed_s": 0}}
        page.evaluate(MOUNT, [page_code.script(page_code.RUN), held])
        page.evaluate(COUNT)
        began_s = time.monotonic()
        for step in range(1, int(float(sys.argv[1]) * UPDATES_PER_S)):
            for rank in range(RANKS):
                move(record, rank, step)
            changed = pieces.changed(record, step / UPDATES_PER_S)
            page.evaluate("text => window.bring(JSON.parse(text))", json.dumps(changed))  # as a message comes
            time.sleep(max(0.0, began_s + step / UPDATES_PER_S - time.monotonic()))
        at_ms = page.evaluate("window.frames_ms")
        browser.close()
    print(json.dumps({"frames_ms": [later - earlier for earlier, later in pairwise(at_ms)]}))


if __name__ == "__main__":
    main()
