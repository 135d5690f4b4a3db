"""What a cell shows of a run that its page, or its kernel, has not seen through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
from playwright.sync_api import expect

from tests.browser.conftest import Open
from tests.browser.lab import TRAINING, until

WAITING = """%%distributed --ranks 2
import os, time
print('begun', flush=True)
while not os.path.exists("ENOUGH"):
    time.sleep(0.05)
print('ended')
rank"""
LOOP = """import jupyter_distrib
@jupyter_distrib.distributed(ranks=2)
def said(number):
    import os, time
    print('run', number, flush=True)
    while number == 1 and not os.path.exists("ENOUGH"):
        time.sleep(0.05)
for number in range(3):
    said(number)
'the end'"""
KEPT = "from jupyter_distrib import frontend\nprint('kept:', len(frontend.handle({'op': 'settled'})['settled']))"


def test_a_page_reloaded_in_mid_run_sees_it_and_gets_its_output(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TRAINING, enough))
    panel = lab.panel()
    lab.run(1)
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("running")
    lab.wait_until_restored("jupyter-distrib-panel")
    lab.reload()

    expect(panel).to_be_visible()  # as it was left
    run = panel.locator(".jp-Distributed-run").first
    expect(run).to_contain_text("running")
    expect(run.get_by_role("progressbar")).to_be_visible()
    lab.shoot("reloaded-in-mid-run")
    enough.touch()
    expect(run.locator(".jp-Distributed-state")).to_have_text("done")
    expect(lab.output(1)).to_contain_text("trained")
    expect(lab.output(1)).to_contain_text("True")
    saved = lab.save().cells[1].outputs
    assert saved[0].metadata["jupyter_distrib"]["settled"]
    assert "trained" in saved[0]["data"]["text/plain"]
    assert saved[-1].output_type == "execute_result"


def test_a_page_opened_after_the_end_of_a_run_shows_what_was_never_saved(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(WAITING, enough), KEPT)
    lab.run(1)
    expect(lab.output(1)).to_contain_text("begun")
    lab.leave()
    enough.touch()
    lab.server.wait_until_idle()
    assert not nbformat.read(lab.path, as_version=4).cells[1].outputs
    lab.open()

    for text in ("begun", "ended", "rank 1"):
        expect(lab.output(1)).to_contain_text(text)
    expect(lab.cell(1).locator(".jp-InputPrompt").first).to_have_text("[2]:")
    saved = lab.save().cells[1]
    assert [output.output_type for output in saved.outputs] == ["display_data", "execute_result"]
    assert saved.execution_count == 2
    convert = [sys.executable, "-m", "nbconvert", "--to", "html", "--stdout", str(lab.path)]
    page = subprocess.run(convert, capture_output=True, text=True, check=True).stdout
    assert "[0-1] ended" in page
    assert "widget-view" not in page
    lab.run(2)
    expect(lab.output(2)).to_contain_text("kept: 0")  # what is taken out of a saved notebook does not come back


def test_all_views_of_a_cell_come_back_in_their_order(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(LOOP, enough))
    lab.run(1)
    expect(lab.output(1)).to_contain_text("run 1")
    lab.save()
    lab.reload()
    expect(lab.panel().locator(".jp-Distributed-run")).to_have_count(2)
    enough.touch()

    expect(lab.output(1)).to_contain_text("the end")
    outputs = lab.save().cells[1].outputs
    texts = [output["data"]["text/plain"] for output in outputs]
    assert [f"run {number}" in text for number, text in enumerate(texts[:3])] == [True, True, True]
    assert texts[3:] == ["'the end'"]


def test_a_cell_whose_kernel_has_ended_in_mid_run_says_so(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TRAINING, enough), "import os; print(os.getpid())")
    panel = lab.panel()
    lab.run(2)
    kernel = int(lab.ended(2).inner_text())
    lab.run(1)
    expect(lab.output(1).locator(".jd-rank")).to_have_count(4)
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("running")
    os.kill(kernel, signal.SIGKILL)

    expect(lab.output(1)).to_contain_text("The kernel has ended, or was restarted, in the middle of this run.")
    expect(lab.output(1)).to_contain_text("4 CPU ranks · ddp")
    expect(lab.output(1).locator(".jd-run")).to_have_count(0)
    (left,) = [each for each in lab.save().cells[1].outputs if each.output_type == "display_data"]
    assert left["data"].keys() == {"text/plain", "text/html"}
