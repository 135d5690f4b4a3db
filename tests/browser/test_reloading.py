"""What a cell shows of a run that its page, or its kernel, has not seen through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Open
from tests.browser.lab import TRAINING, Lab, Server, until

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
    said.distributed(number)
'the end'"""
TALKING = """%%distributed --ranks 2
import os, time, jupyter_distrib
print('hello from', rank)
for step in jupyter_distrib.progress(range(100_000)):
    jupyter_distrib.report(loss=1 / (1 + step))
    if step % 10 == 0:
        print('at step', step)
    time.sleep(0.05)
    if os.path.exists("ENOUGH"):
        break
print('ended')
rank"""
KEPT = "from jupyter_distrib.kernel.sidebar import bridge as frontend\nprint('kept:', len(frontend.handle({'op': 'settled'})['settled']))"


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


def moves(lab: Lab, index: int) -> None:
    """The cell's live view does, again and again."""
    expect(lab.output(index).locator(".jd-run")).to_have_count(1)
    step = lab.output(index).locator(".jd-steps").first
    for _ in range(2):
        expect(step).not_to_have_text(step.inner_text())


def kinds(outputs: list[Any]) -> list[str]:
    """The types of a cell's outputs, but for the picture of its charts, which stands after the settled view."""
    return [each.output_type for each in outputs if "image/png" not in each.get("data", {})]


def is_settled(lab: Lab, index: int) -> None:
    expect(lab.output(index)).to_contain_text("[0-1] ended")
    expect(lab.output(index)).to_contain_text("rank 11")  # a row of the value, which comes after the view
    expect(lab.output(index).locator(".jd-run")).to_have_count(0)
    outputs = lab.save().cells[index].outputs
    assert kinds(outputs) == ["display_data", "execute_result"]
    assert outputs[0]["data"].keys() == {"text/plain", "text/html"}


@pytest.mark.parametrize("classic", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_the_live_view_is_back_in_its_cell_after_each_reload(
    open_notebook: Open, enough: Path, saved: bool, classic: bool
) -> None:
    lab = open_notebook(until(TALKING, enough), classic=classic)
    lab.run(1)
    moves(lab, 1)
    if saved:
        lab.save()
    for _ in range(2):
        lab.reload()
        moves(lab, 1)
    first = lab.output(1).locator(".jd-rank").first
    first.locator("button").click()
    expect(first.locator(".jd-output")).to_contain_text("hello from 0")
    expect(first.locator(".jd-output")).to_contain_text("at step 0")
    expect(lab.output(1)).not_to_contain_text("Loading widget", use_inner_text=True)
    name = f"reloaded-{'saved' if saved else 'unsaved'}-{'notebook' if classic else 'lab'}"
    lab.shoot(name)
    if not classic:
        lab.dark()
        lab.shoot(f"{name}-dark")
    in_file = nbformat.read(lab.path, as_version=4).cells[1].outputs
    saved_now = lab.save().cells[1].outputs
    assert [each.metadata for each in saved_now] == [
        each.metadata for each in in_file
    ]  # nothing of it gets into the notebook
    assert all("seen last" in each["data"]["text/plain"] for each in saved_now)
    enough.touch()
    is_settled(lab, 1)


def test_stop_in_the_view_of_a_reloaded_page_stops_the_run(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TALKING, enough))
    lab.run(1)
    moves(lab, 1)
    lab.reload()
    moves(lab, 1)
    lab.output(1).locator(".jd-stop").click()

    expect(lab.output(1)).to_contain_text("KeyboardInterrupt")
    expect(lab.output(1).locator(".jd-run")).to_have_count(0)
    assert kinds(lab.save().cells[1].outputs) == ["display_data", "error"]


def test_a_notebook_that_is_closed_and_opened_again_in_mid_run_is_live(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TALKING, enough))
    lab.run(1)
    moves(lab, 1)
    lab.save()
    expect(lab.page.locator(".jp-mod-dirty")).to_have_count(0)  # the page knows it later than the file; else it asks
    lab.do("application:close")
    expect(lab.page.locator(".jp-Notebook")).to_have_count(0)
    lab.do("docmanager:open", path=lab.name)
    lab.wait_for_notebook()

    moves(lab, 1)
    enough.touch()
    is_settled(lab, 1)


def test_two_pages_show_the_same_run(open_notebook: Open, browser: Browser, server: Server, enough: Path) -> None:
    lab = open_notebook(until(TALKING, enough))
    lab.run(1)
    moves(lab, 1)
    lab.save()
    other = Lab(browser, server, lab.name)
    moves(other, 1)
    moves(lab, 1)
    enough.touch()

    is_settled(lab, 1)
    expect(other.output(1)).to_contain_text("[0-1] ended")
    expect(other.output(1).locator(".jd-run")).to_have_count(0)
    expect(other.page.locator(".jp-mod-dirty")).to_have_count(0)  # it is the first page's to save
    other.close()
    assert other.errors == []


def test_a_cell_that_was_waiting_for_its_turn_at_the_reload_is_live_and_settled(
    open_notebook: Open, enough: Path, tmp_path: Path
) -> None:
    turn = tmp_path / "turn"
    first = until(
        dedent("""\
            import os, time
            while not os.path.exists('ENOUGH'):
                time.sleep(0.05)"""),
        turn,
    )
    lab = open_notebook(first, until(TALKING, enough))
    lab.run(1)
    lab.select(2)
    lab.do("notebook:run-cell")
    expect(lab.cell(2).locator(".jp-InputPrompt").first).to_have_text("[*]:")
    lab.reload()
    turn.touch()

    moves(lab, 2)
    enough.touch()
    is_settled(lab, 2)


def test_a_kernel_that_ends_after_a_reload_leaves_what_was_seen_last(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TALKING, enough), "import os; print(os.getpid())")
    lab.run(2)
    kernel = int(lab.ended(2).inner_text())
    lab.run(1)
    moves(lab, 1)
    lab.reload()
    moves(lab, 1)
    os.kill(kernel, signal.SIGKILL)

    expect(lab.output(1)).to_contain_text("The kernel has ended, or was restarted, in the middle of this run.")
    expect(lab.output(1).locator(".jd-run")).to_have_count(0)
    (left,) = lab.save().cells[1].outputs
    assert left["data"].keys() == {"text/plain", "text/html"}


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
    assert kinds(saved.outputs) == ["display_data", "execute_result"]
    assert saved.execution_count == 2
    convert = [sys.executable, "-m", "nbconvert", "--to", "html", "--stdout", str(lab.path)]
    page = subprocess.run(convert, capture_output=True, text=True, check=True).stdout
    assert "[0-1] ended" in page
    assert "widget-view" not in page
    lab.run(2)
    expect(lab.output(2)).to_contain_text("kept: 0")  # what is taken out of a saved notebook does not come back


ASLEEP = """
const sockets = [], Socket = window.WebSocket;
window.asleep = false;
window.WebSocket = class extends Socket {
    constructor(url, ...rest) {
        super(window.asleep ? "ws://127.0.0.1:9/" : url, ...rest);
        if (String(url).includes("/channels")) sockets.push(this);
    }
};
window.sleep = () => { window.asleep = true; sockets.forEach((each) => each.close()); };
"""
"""Lets a page sleep: it loses its connections to kernels, and has none until `asleep` is taken back."""


def test_a_page_that_slept_over_the_end_of_its_run_shows_the_end(
    open_notebook: Open, browser: Browser, server: Server, enough: Path
) -> None:
    lab = open_notebook(load=False)
    server.notebook(lab.name, ["%load_ext jupyter_distrib", until(TALKING, enough)])
    lab.page.add_init_script(ASLEEP)
    lab.open()
    lab.load_extension()
    lab.run(1)
    moves(lab, 1)
    lab.save()
    other = Lab(browser, server, lab.name)  # with another page the server keeps nothing for the one that sleeps
    moves(other, 1)
    lab.page.evaluate("window.sleep()")
    enough.touch()
    expect(other.output(1)).to_contain_text("[0-1] ended")
    other.close()
    assert "ended" not in lab.output(1).inner_text()
    lab.page.evaluate("window.asleep = false")

    is_settled(lab, 1)
    lab.wait_idle(1)
    expect(lab.output(1)).to_contain_text("rank 11")  # a row of the value


def test_a_second_page_that_reaches_the_kernel_after_the_end_was_saved_shows_the_end(
    open_notebook: Open, browser: Browser, server: Server, enough: Path
) -> None:
    lab = open_notebook(until(TALKING, enough))
    lab.run(1)
    moves(lab, 1)
    lab.save()
    other = Lab(browser, server, lab.name)
    other.page.add_init_script(f"{ASLEEP} window.asleep = true;")
    other.open()
    expect(other.output(1)).to_contain_text("Loading widget")  # the file of before
    enough.touch()
    is_settled(lab, 1)
    other.page.evaluate("window.asleep = false")

    expect(other.output(1)).to_contain_text("[0-1] ended")
    expect(other.output(1)).to_contain_text("rank 11")  # a row of the value
    other.wait_idle(1)
    other.close()
    assert other.errors == []


HOLD = """
const after = window.setTimeout;
const ours = () => !new Error().stack.includes("jlab_core"); // which waits for half a second again and again
window.held = [];
window.setTimeout = (call, ms, ...rest) => (ms === 500 && ours() ? window.held.push(call) : after(call, ms, ...rest));
window.release = () => {
    window.setTimeout = after;
    window.held.forEach((call) => call());
    return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
};
"""
"""Holds back what our extension does half a second later: so long it gives outputs to come on the ordinary way."""


def test_a_cell_that_is_run_again_at_once_is_not_given_the_output_that_was_missed(
    open_notebook: Open, enough: Path
) -> None:
    lab = open_notebook(until(WAITING, enough))
    lab.run(1)
    expect(lab.output(1)).to_contain_text("begun")
    lab.leave()
    enough.touch()
    lab.server.wait_until_idle()
    lab.page.add_init_script(HOLD)
    lab.open()
    lab.page.wait_for_function("window.held.length")  # the page knows what it has missed
    enough.unlink()
    lab.run(1)
    expect(lab.output(1)).to_contain_text("begun")
    lab.page.evaluate("window.release()")

    assert "ended" not in lab.output(1).inner_text()
    enough.touch()
    expect(lab.output(1)).to_contain_text("[0-1] ended")
    lab.wait_idle(1)
    assert kinds(lab.save().cells[1].outputs) == ["display_data", "execute_result"]


def test_all_views_of_a_cell_come_back_in_their_order(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(LOOP, enough))
    lab.run(1)
    expect(lab.output(1)).to_contain_text("run 1")
    lab.save()
    lab.reload()
    expect(lab.panel().locator(".jp-Distributed-run")).to_have_count(2)
    expect(lab.output(1).locator(".jd-run")).to_contain_text("run 1")
    enough.touch()

    expect(lab.output(1)).to_contain_text("the end")
    expect(lab.output(1).locator(".jd-run")).to_have_count(0)
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


def test_a_notebook_saved_in_mid_run_tells_what_was_seen_last_when_its_kernel_has_gone(
    open_notebook: Open, enough: Path
) -> None:
    lab = open_notebook(until(TALKING, enough))
    panel = lab.panel()
    lab.run(1)
    moves(lab, 1)
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("running")
    (view,) = lab.save().cells[1].outputs
    assert "It was seen last at" in view["data"]["text/plain"]
    moves(lab, 1)  # what the page shows is as it was
    convert = [sys.executable, "-m", "nbconvert", "--to", "html", "--stdout", str(lab.path)]
    assert "It was seen last at" in subprocess.run(convert, capture_output=True, text=True, check=True).stdout

    lab.leave()
    lab.server.end_kernels()
    lab.open()
    expect(lab.output(1)).to_contain_text("It was seen last at")
    expect(lab.output(1)).to_contain_text("rank 1")
    assert "model not found" not in lab.page.content()
    assert "Error displaying widget" not in lab.page.content()
    lab.shoot("saved-in-mid-run")


def test_a_kernel_that_is_shut_down_in_mid_run_leaves_no_error_in_the_panel(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TALKING, enough))
    panel = lab.panel()
    lab.run(1)
    moves(lab, 1)
    lab.do("kernelmenu:shutdown")
    expect(panel.get_by_role("button", name="Choose a kernel")).to_be_visible()
    expect(lab.output(1).locator(".jd-run")).to_have_count(0)
    expect(panel.get_by_role("alert")).to_have_count(0)


def test_a_copy_that_is_made_of_a_running_cell_shows_the_end_of_its_run(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TALKING, enough))
    lab.run(1)
    moves(lab, 1)
    lab.select(1)
    lab.do("notebook:copy-cell")
    lab.do("notebook:paste-cell-below")
    moves(lab, 2)
    enough.touch()
    expect(lab.output(2)).to_contain_text("[0-1] ended")
    is_settled(lab, 1)
    (copied,) = lab.save().cells[2].outputs
    assert copied["data"].keys() == {"text/plain", "text/html"}
