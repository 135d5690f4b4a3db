"""The debugger's prompt and a flame graph as people see them: in the output of a cell, in both themes."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.lab import Lab

STOPS = """%%distributed --ranks 2
def scaled(x):
    factor = 2
    breakpoint() if rank == 1 else None
    return factor * x
scaled(rank + 10)"""
SAMPLED = """%%distributed --ranks 2 --detach --out job
import time
def slow_step():
    time.sleep(0.05)
while True:
    slow_step()"""
FLAME = """from jupyter_distrib.kernel.notebook import magic_answers
magic_answers.FLAME_S = 0.5
%distributed_flame"""
ASKED = """() => {
    const fields = document.querySelectorAll('.jp-Stdin-input');
    return fields.length === 1 && fields[0].value === '' && document.activeElement === fields[0];
}"""
"""One field, which is empty and has the focus: the one before it stays for a moment."""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_rank_is_stopped_and_changed_in_the_notebook_and_a_flame_graph_is_seen(
    open_notebook: Open, dark: bool
) -> None:
    lab: Lab = open_notebook(STOPS, SAMPLED, FLAME, "job.cancel(force=True)")
    theme = "dark" if dark else "light"
    if dark:
        lab.dark()
    lab.run(1)
    output, field = lab.output(1), lab.page.locator(".jp-Stdin-input")
    for typed in ("p factor", "factor = 7"):
        lab.page.wait_for_function(ASKED)
        field.fill(typed)
        field.press("Enter")
        expect(output).to_contain_text(f"rank 1 (Pdb)  {typed}")
    lab.page.wait_for_function(ASKED)
    lab.shoot(f"debugger-{theme}")
    field.fill("c")
    field.press("Enter")
    expect(lab.ended(1)).to_contain_text("77")

    lab.run(2)
    lab.wait_idle(2)
    lab.run(3)
    picture = lab.ended(3).locator("img")
    expect(picture).to_have_js_property("complete", value=True)
    assert picture.evaluate("image => image.naturalWidth") > 100
    lab.shoot(f"flame-{theme}", lab.output(3))
    lab.run(4)
    lab.wait_idle(4)
