"""The sidebar, in a real browser over real kernels."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from playwright.sync_api import expect

from jupyter_distrib.system import gpu_devices
from tests.browser.conftest import Open
from tests.browser.lab import BAD, TOP, TRAINING, Lab, harmless, press_copy, until

COLLECTIVE = """%%distributed --ranks 2 --strategy ddp
import time
import torch.distributed as dist
print('in the cell', flush=True)
if rank == 0:
    dist.barrier()
while True:
    time.sleep(0.05)"""


TEXT_FITS = """node => {
    const style = getComputedStyle(node);
    const canvas = document.createElement('canvas').getContext('2d');
    canvas.font = style.font;
    const width = canvas.measureText(node.selectedOptions[0].textContent).width;
    return width <= node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
}"""


def interrupted(lab: Lab, index: int) -> None:
    expect(lab.output(index)).to_contain_text("KeyboardInterrupt")
    lab.wait_idle(index)


def test_a_kernel_without_the_extension_is_loaded_by_a_button(open_notebook: Open) -> None:
    lab = open_notebook("1", load=False)
    panel = lab.panel()

    expect(panel).to_contain_text("jupyter_distrib is not loaded in the kernel")
    lab.shoot("sidebar-not-loaded", panel)
    lab.wait_until_restored("jupyter-distrib-panel")
    lab.reload()
    panel.get_by_role("button", name="Load it").click()
    expect(panel.locator("code")).to_have_text("%%distributed")
    if not gpu_devices.may_exist():
        expect(panel.get_by_label("Ranks", exact=True).locator("option:checked")).to_have_text("auto: 2 on CPU")
        expect(panel).to_contain_text("No GPU here: ranks run on the CPU.")
    for inside in (
        panel.locator("code"),
        panel.locator(".jp-Distributed-pool").first,
        panel.get_by_text("Nothing has"),
    ):
        expect(inside).to_be_visible()  # the sections are open, although they were hidden when the page was left


def test_what_is_picked_is_used_by_the_next_run_and_can_be_written_into_the_cell(open_notebook: Open) -> None:
    lab = open_notebook(
        dedent("""\
            %%distributed
            import torch.distributed as dist
            print(dist.get_world_size(), 'in the group')""")
    )
    panel = lab.panel()

    panel.get_by_label("Strategy", exact=True).select_option("ddp")
    panel.get_by_label("Ranks", exact=True).select_option("ranks")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 2 --strategy ddp")
    panel.get_by_label("Number", exact=True).fill("3")
    panel.get_by_label("Number", exact=True).press("Enter")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 3 --strategy ddp")
    lab.run(1)
    expect(lab.output(1)).to_contain_text("3 in the group")
    expect(lab.output(1)).to_contain_text("from the sidebar")
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("done")
    expect(panel).to_contain_text("3 CPU ranks, idle")
    expect(panel).to_contain_text("No GPU here: ranks run on the CPU.")

    lab.select(1)
    panel.get_by_role("button", name="Insert").click()
    expect(lab.cell(1).locator(".cm-line").first).to_have_text("%%distributed --ranks 3 --strategy ddp")
    panel.get_by_role("button", name="Copy").click()
    assert lab.page.evaluate("() => navigator.clipboard.readText()") == "%%distributed --ranks 3 --strategy ddp"
    lab.shoot("sidebar-picked")

    panel.get_by_label("Number", exact=True).fill("0")
    panel.get_by_label("Number", exact=True).press("Enter")
    expect(panel.get_by_role("alert")).to_have_text("The number of ranks is 1 to 1000.")
    expect(panel.get_by_label("Number", exact=True)).to_have_value("3")
    panel.get_by_role("button", name="The notebook's own default").click()
    expect(panel.locator("code")).to_have_text("%%distributed")


def test_the_pool_that_is_picked_is_where_the_next_run_goes(open_notebook: Open) -> None:
    add = "%distributed_pool add other --kind local"
    lab = open_notebook(
        dedent("""\
            %%distributed
            import os
            print('in process', os.getpid())"""),
        "import os\nprint(os.getpid())",
        add,
    )
    panel = lab.panel()
    expect(panel.locator(".jp-Distributed-pool")).to_have_text([re.compile("^local"), re.compile("^inline")])
    lab.run(3)
    expect(panel.locator(".jp-Distributed-pool", has_text=re.compile("^other"))).to_be_visible()
    panel.get_by_label("Pool", exact=True).select_option("inline")
    expect(panel.locator("code")).to_have_text("%%distributed --pool inline")
    lab.run(1)
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("inline")
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("done")
    lab.run(2)
    kernel = lab.ended(2).inner_text().strip()  # the inline pool's ranks run in the kernel's own process
    expect(lab.output(1)).to_contain_text(f"in process {kernel}")


WAYS = ("sidebar", "palette", "widget")


def stop(lab: Lab, way: str) -> None:
    """Have the run of the second cell going, stop it, and see it end."""
    lab.run(1)
    run = lab.panel().locator(".jp-Distributed-run").first
    expect(run).to_contain_text("running")
    expect(lab.output(1)).to_contain_text("in the cell")
    match way:
        case "sidebar":
            run.get_by_role("button", name="Stop").click()
        case "palette":
            lab.palette("Stop the Distributed Run")
        case _:
            lab.output(1).locator(".jd-stop").click()
    expect(run).to_contain_text("interrupted")
    interrupted(lab, 1)


@pytest.mark.parametrize("way", WAYS)
def test_stop_ends_a_collective(open_notebook: Open, way: str) -> None:
    lab = open_notebook(COLLECTIVE, "%%distributed --ranks 2\nprint('alive')")
    stop(lab, way)
    lab.run(2)
    expect(lab.output(2)).to_contain_text("alive")


@pytest.mark.parametrize("way", WAYS)
def test_stop_works_with_every_ipykernel(open_notebook: Open, kernels: dict[str, object], way: str) -> None:
    if len(kernels) == 1:
        pytest.skip("no other ipykernel here: sh .ci/browser installs some")
    for kernel in kernels:
        lab = open_notebook(COLLECTIVE, kernel=kernel)
        stop(lab, way)
        lab.close()


def test_the_panel_in_both_themes_with_a_run_going_on(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook("%%distributed --ranks 4\n1 / 0", until(TRAINING, enough))
    panel = lab.panel()
    lab.run(1)
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("failed")
    lab.wait_idle(1)  # the panel knows before the cell has ended, and a kernel drops what was asked before a cell fails
    lab.run(2)
    run = panel.locator(".jp-Distributed-run").first
    expect(run).to_contain_text("running")
    expect(run.get_by_role("progressbar")).to_be_visible()
    run.locator("summary").click()
    expect(lab.page.locator(".jp-Distributed-statusbutton")).to_contain_text("4 CPU ranks")
    expect(panel).to_contain_text("CPU cores")
    expect(lab.page.locator(".jd-chart path.jd-first")).to_be_visible()
    assert min(lab.colour(panel, "backgroundColor")) > 200
    lab.shoot("sidebar-light")
    lab.dark()
    lab.shoot("sidebar-dark")
    assert max(lab.colour(panel, "backgroundColor")) < 90
    run.get_by_role("button", name="Stop").click()
    interrupted(lab, 2)


TOLD = f"""import json, pathlib
from jupyter_distrib.kernel.sidebar import bridge as frontend
told = json.loads(pathlib.Path({str(TOP / "tests/kernel/sidebar/golden_overview.json")!r}).read_text())
told["next"] |= {{"gpus": 1, "ranks": None}}
front = frontend._installed
front._overview = front._news._overview = lambda: {{**told, "route": "control", "doing": None, "trouble": None}}
front._news.changed()"""
"""From here on the kernel tells of a machine with a GPU."""


def test_gpus_are_shown_with_their_memory_and_who_holds_them(open_notebook: Open) -> None:
    lab = open_notebook(TOLD)
    panel = lab.panel()
    expect(panel).to_contain_text("No ranks are up")
    lab.run(1)
    expect(panel.locator("th", has_text="GPU 2")).to_be_visible()
    expect(panel.get_by_role("meter", name="Memory of GPU 2")).to_have_attribute("aria-valuenow", "36")
    expect(panel.get_by_label("GPU type", exact=True)).to_contain_text("A100")
    for sentence in (
        "31.0 GB / 85.9 GB",
        "busy: another process holds 31.0 GB",
        "b.ipynb (kernel 7) has 2 ranks, running Cell In[3]",
        "rank 2: KeyError: 'lr'",
    ):
        expect(panel).to_contain_text(sentence)
    lab.shoot("sidebar-gpus")


MOVING = """node => [node, ...node.querySelectorAll("*")].flatMap((each) => ["", "::before", "::after"].map((part) => getComputedStyle(each, part)))
    .some((style) => style.animationName !== "none" || style.transitionDuration.split(", ").some((time) => time !== "0s"))"""


def test_who_wants_less_motion_gets_none(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook(until(TRAINING, enough))
    run = lab.panel().locator(".jp-Distributed-run").first
    lab.run(1)
    expect(run.get_by_role("progressbar")).to_be_visible()
    expect(lab.page.locator(".jd-chart path.jd-first")).to_be_visible()
    lab.page.emulate_media(reduced_motion="no-preference")
    assert run.evaluate(MOVING)
    lab.page.emulate_media(reduced_motion="reduce")
    assert not run.evaluate(MOVING)
    assert not lab.page.locator(".jd-run").evaluate(MOVING)
    enough.touch()
    lab.wait_idle(1)


def test_the_panel_in_notebook_7(open_notebook: Open) -> None:
    lab = open_notebook(COLLECTIVE, classic=True)
    panel = lab.panel()
    lab.run(1)
    run = panel.locator(".jp-Distributed-run").first
    expect(run).to_contain_text("running")
    lab.shoot("notebook-7")
    run.get_by_role("button", name="Stop").click()
    interrupted(lab, 1)


def test_ranks_are_listed_where_everything_that_runs_is(open_notebook: Open) -> None:
    lab = open_notebook("%%distributed --ranks 2\nkept = 1", "%%distributed --ranks 2 --keep kept\nkept = 1")
    lab.run(2)
    lab.wait_idle(2)
    lab.do("running:show-panel")
    entry = lab.page.locator(".jp-RunningSessions-item", has_text="2 CPU ranks, idle")
    expect(entry).to_be_visible()
    dialog = lab.page.locator(".jp-Dialog")
    entry.hover()
    entry.locator(".jp-RunningSessions-itemShutdown").click()
    expect(dialog).to_contain_text("What they keep is lost: kept.")
    dialog.get_by_role("button", name="Cancel").click()
    expect(entry).to_be_visible()

    panel = lab.panel()
    expect(panel).to_contain_text("keep kept")
    panel.get_by_role("button", name="Stop ranks").click()
    expect(dialog).to_contain_text("What they keep is lost: kept.")
    dialog.get_by_role("button", name="Stop ranks").click()
    expect(panel).to_contain_text("No ranks are up")


def test_ranks_are_started_resized_restarted_and_ended_by_buttons(open_notebook: Open) -> None:
    lab = open_notebook("1")
    panel = lab.panel()
    panel.get_by_label("Ranks", exact=True).select_option("ranks")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 2")
    panel.locator(".jp-Distributed-pool").first.get_by_role("button", name="Start", exact=True).click()
    expect(panel).to_contain_text("2 CPU ranks, idle")

    panel.get_by_label("Number", exact=True).fill("3")
    panel.get_by_label("Number", exact=True).press("Enter")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 3")
    panel.get_by_role("button", name="Resize", exact=True).click()
    expect(panel).to_contain_text("3 CPU ranks, idle")

    panel.get_by_label("Number", exact=True).fill("999")
    panel.get_by_label("Number", exact=True).press("Enter")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 999")
    panel.get_by_role("button", name="Resize", exact=True).click()
    dialog = lab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("999 ranks on")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    lab.page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(panel).to_contain_text("3 CPU ranks, idle")
    panel.get_by_label("Number", exact=True).fill("3")
    panel.get_by_label("Number", exact=True).press("Enter")

    process = panel.locator(".jp-Distributed-pool .jp-Distributed-group td", has_text="pid").first
    before = process.text_content() or ""
    panel.get_by_role("button", name="Restart", exact=True).click()
    expect(process).not_to_have_text(before)
    expect(panel).to_contain_text("3 CPU ranks, idle")

    lab.do("running:show-panel")
    entry = lab.page.locator(".jp-RunningSessions-item", has_text="3 CPU ranks, idle")
    entry.hover()
    entry.locator(".jp-RunningSessions-itemShutdown").click()
    expect(entry).to_have_count(0)
    expect(lab.panel()).to_contain_text("No ranks are up")


def test_a_start_of_ranks_is_told_from_its_first_second_on(open_notebook: Open, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    start = tmp_path / "start"
    start.write_text(f'#!/bin/sh\nuntil [ -e {reached} ]; do sleep 0.1; done\nshift; exec "$@"\n')
    start.chmod(0o755)
    pool = (
        f"--kind command --hosts a --nodes 1 --ranks 1 --start '{start} {{host}} {{python}}' --python {sys.executable}"
    )
    lab = open_notebook(
        f"%distributed_pool add far {pool} --interface lo --environment off", "%%distributed --pool far\n'ran'"
    )
    panel = lab.panel()
    lab.load_extension(1)
    panel.get_by_label("Pool", exact=True).select_option("far")
    expect(panel).to_contain_text("No ranks are up; the next run starts them.")
    expect(panel).to_contain_text("Nothing has run yet.")

    lab.run(2)
    expect(panel.locator(".jp-mod-used")).to_contain_text(re.compile(r"Starting ranks for Cell In\[\d+\] · 0:0\d"))
    expect(panel.locator(".jp-Distributed-run")).to_contain_text(re.compile(r"Cell In\[\d+\] waits for ranks"))
    expect(lab.output(2)).to_contain_text(re.compile(r"Starting (ranks on far|1 rank).* · 0:0\d"))
    expect(panel).not_to_contain_text("No ranks are up")
    expect(panel).not_to_contain_text("Nothing has run yet")
    lab.shoot("sidebar-starting")

    reached.touch()
    expect(lab.ended(2)).to_contain_text("ran")
    expect(panel).not_to_contain_text("Starting ranks")
    expect(lab.page.locator(".jp-Distributed-starting")).to_have_count(0)


def test_the_settings_editor_has_an_entry_that_counts_at_once(open_notebook: Open) -> None:
    lab = open_notebook("%%distributed --ranks 2\nrank")
    lab.run(1)
    item = lab.page.locator(".jp-Distributed-statusbutton")
    expect(item).to_contain_text("2 CPU ranks")
    lab.do("settingeditor:open", query="Distributed")
    choice = lab.page.get_by_role("checkbox", name="Show in the status bar")
    choice.uncheck()
    expect(item).to_be_hidden()
    choice.check()
    expect(item).to_be_visible()


def test_a_log_is_shown_and_a_run_leads_to_its_cell(open_notebook: Open) -> None:
    said = f"print('said by rank', rank)\nprint({BAD!r})"
    lab = open_notebook("%%distributed --ranks 4\nrank", f"%%distributed --on 2,3\n{said}")
    for cell in (1, 2):
        lab.run(cell)
        lab.wait_idle(cell)
    runs = lab.panel().locator(".jp-Distributed-run")
    expect(runs).to_have_count(2)
    run = runs.first
    run.get_by_role("button", name="Log").click()
    log = lab.page.locator(".jp-Distributed-log")
    lines = log.locator(".jd-line")
    expect(lines.first).to_have_text("2said by rank 2")
    expect(lab.page.get_by_role("tab", name="Log of Cell In[3]")).to_be_visible()
    harmless(lab, ".jp-Distributed-log")
    log.get_by_label("Search the output").fill("SAID")
    expect(lines).to_have_text(["2said by rank 2", "3said by rank 3"])
    lab.shoot("log", log)
    log.get_by_role("button", name="Follow").click()
    lines.first.select_text()  # what is selected stands still, until something else is asked for
    log.get_by_label("Rank").select_option("3")
    expect(lines).to_have_text(["3said by rank 3"])
    press_copy(log.get_by_role("button", name="Copy"))
    assert lab.page.evaluate("() => navigator.clipboard.readText()") == "[3] said by rank 3"
    lab.select(0)
    run.get_by_role("button", name="Go to cell").click()
    expect(lab.cell(2)).to_have_class(re.compile("jp-mod-active"))


MOVED = "() => Promise.all(document.getAnimations().filter(each => each.effect.getComputedTiming().iterations !== Infinity).map(each => each.finished.catch(() => 0))).then(() => 0)"
"""Wait until what slides into the page is in its place."""


def test_the_end_of_a_detached_run_is_reported_and_the_title_of_a_hidden_page_marks_it(
    open_notebook: Open, enough: Path
) -> None:
    wait = dedent("""\
        import os, time
        while not os.path.exists('ENOUGH'):
            time.sleep(0.05)
        1 / 0 if rank else None""")
    lab = open_notebook(until(f"%%distributed --ranks 2 --detach\n{wait}", enough), "1")
    run = lab.panel().locator(".jp-Distributed-run").first
    lab.run(1)
    lab.wait_idle(1)
    expect(run).to_contain_text("running")
    lab.select(2)
    lab.page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true }); null")
    enough.touch()
    toast = lab.page.locator(".jp-toastContainer, .Toastify").get_by_role("alert")
    expect(toast).to_contain_text("Cell In[2]: failed after ")
    expect(toast).to_contain_text("rank 1: ZeroDivisionError")
    lab.page.wait_for_function("() => document.title.startsWith('✗ ')")
    lab.page.evaluate("document.title = 'saved - JupyterLab'; null")  # as JupyterLab does when it saves the layout
    lab.page.wait_for_function("() => document.title === '✗ saved - JupyterLab'")
    lab.page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); null")
    lab.page.wait_for_function("() => !document.title.startsWith('✗ ')")
    lab.page.evaluate(MOVED)
    lab.shoot("notification")
    toast.get_by_role("button", name="Go to cell").click()
    expect(lab.cell(1)).to_have_class(re.compile("jp-mod-active"))


LEARNED = """%%distributed --ranks 2 --timeout 60
import jupyter_distrib
lr = 1.0
for step in range(20):
    jupyter_distrib.report(loss=lr / (1 + step))
print('learned')"""


def test_the_palette_has_every_command_and_cells_a_menu_entry(open_notebook: Open) -> None:
    lab = open_notebook("%%distributed --ranks 2\nprint('said')", "1 + 1")
    lab.panel()
    for _ in range(2):
        lab.run(1)
        lab.wait_idle(1)
    lab.palette("Compare Saved Runs")
    expect(lab.page.locator(".jp-Distributed-compared")).to_be_visible()
    lab.palette("Show the Log of a Run")
    expect(lab.page.locator(".jp-Distributed-log")).to_contain_text("said")
    lab.palette("Go to the Cell of a Run")
    expect(lab.cell(1)).to_have_class(re.compile("jp-mod-active"))
    lab.cell(2).click(button="right")
    lab.page.locator(".lm-Menu-item", has_text="Insert the Magic Line").click()
    expect(lab.cell(2)).to_contain_text("%%distributed")


def test_with_four_sections_the_form_is_whole_and_a_sweep_is_one_thing(open_notebook: Open) -> None:
    sweep = dedent("""\
        %%distributed --ranks 1 --sweep "lr=[1, 2, 3, 4, 5, 6]"
        import jupyter_distrib
        for step in range(30): jupyter_distrib.report(loss=lr / (step + 1))""")
    lab = open_notebook(sweep, "%%distributed --ranks 2\nrank")
    lab.page.set_viewport_size({"width": 1400, "height": 950})
    panel = lab.panel()
    for cell in (1, 2):
        lab.run(cell)
        lab.wait_idle(cell)
    lab.page.locator("#jupyter-distrib-panel .jp-AccordionPanel-title", has_text="History").click()
    runs = panel.get_by_role("list", name="The last 20 runs")
    group = runs.get_by_role("listitem").filter(has_text="Sweep of Cell In")
    expect(group.locator(".jp-Distributed-point").first).to_have_text("lr=1")
    expect(group).to_contain_text("6 of 6")
    expect(runs.locator("> li")).to_have_count(2)
    for control in (
        panel.get_by_label("Ranks", exact=True),
        panel.get_by_role("button", name="Insert"),
        panel.get_by_role("button", name="Copy"),
    ):
        expect(control).to_be_in_viewport(ratio=1)
    caret = panel.get_by_label("Pool", exact=True).evaluate(
        "node => node.parentElement.querySelector('svg') !== null || getComputedStyle(node).backgroundImage !== 'none'"
    )
    assert caret
    lab.shoot("sidebar-four-sections")
    lab.dark()
    lab.shoot("sidebar-four-sections-dark")


QUEUE = """import jupyter_distrib
@jupyter_distrib.distributed(ranks=1, pool="two")
def work(number):
    import os, time
    while not os.path.exists("ENOUGH"):
        time.sleep(0.05)
    return number
runs = [work.submit(number) for number in range(5)]"""


def test_the_queue_is_shown_in_its_order_and_moved_and_stopped(open_notebook: Open, enough: Path) -> None:
    lab = open_notebook("%distributed_pool add two --kind local --ranks 2", until(QUEUE, enough), "1 + 1")
    panel = lab.panel()
    for cell in (1, 2):
        lab.run(cell)
        lab.wait_idle(cell)
    points = panel.locator(".jp-Distributed-points > li")
    numbers = lambda *found: [re.compile(rf"work\({number}\)") for number in found]  # noqa: E731
    expect(points).to_contain_text(numbers(0, 1, 2, 3, 4))
    expect(panel.locator(".jp-Distributed-queue")).to_contain_text("2 running, 3 queued")
    expect(lab.page.locator(".jp-Distributed-statusbutton")).to_have_text("2 running, 3 queued")
    expect(points.nth(4)).to_contain_text("place 3")
    panel.get_by_role("button", name="Move work(4) up").click()
    expect(points).to_contain_text(numbers(0, 1, 2, 4, 3))
    lab.shoot("sidebar-queue", panel)
    points.nth(4).get_by_role("button", name="Stop").click()
    expect(panel.locator(".jp-Distributed-queue")).to_contain_text("2 running, 2 queued")
    lab.select(3)
    panel.get_by_role("button", name="Go to cell").first.click()
    expect(lab.cell(2)).to_have_class(re.compile("jp-mod-active"))

    panel.locator(".jp-Distributed-queue").get_by_role("button", name="Stop all").click()
    lab.page.get_by_role("dialog").get_by_role("button", name="Stop all runs").click()
    expect(panel.locator(".jp-Distributed-queue")).to_have_count(0)
    expect(panel.locator(".jp-Distributed-run").first).to_contain_text("5 interrupted")
    lab.dark()
    lab.shoot("sidebar-queue-stopped-dark", panel)


def test_saved_runs_are_searched_and_compared(open_notebook: Open) -> None:
    other = LEARNED.replace("60", "90").replace("1.0", "3.0").replace("range(20)", "range(30)")
    lab = open_notebook(LEARNED, other, "%%distributed --ranks 2\nrank")
    panel = lab.panel()
    for cell in (1, 2, 3):
        lab.run(cell)
        lab.wait_idle(cell)
    ranks = panel.get_by_label("Ranks", exact=True)
    expect(ranks).to_contain_text("2 on CPU")
    assert ranks.evaluate(TEXT_FITS), "the choice is cut"
    lab.page.locator("#jupyter-distrib-panel .jp-AccordionPanel-title", has_text="History").click()
    saved = panel.get_by_role("list", name="Saved runs").get_by_role("listitem")
    expect(saved.first).to_contain_text("done")
    panel.get_by_label("Search saved runs").fill("report learned")
    expect(saved).to_have_count(2)
    expect(saved.first).to_contain_text("loss 0.1")
    expect(panel.get_by_role("button", name="Show", exact=True)).to_be_disabled()
    for one in saved.all():
        one.get_by_role("checkbox").check()
    lab.shoot("history-light")
    panel.get_by_role("button", name="Compare").click()
    compared = lab.page.locator(".jp-Distributed-compared")
    expect(compared.get_by_role("img", name="loss over steps").locator("path")).to_have_count(2)
    expect(compared.get_by_role("row", name="option.timeout_s")).to_contain_text("90")
    expect(compared.locator(".jp-mod-removed", has_text="range(20)")).to_be_visible()
    expect(compared.locator(".jp-mod-added", has_text="range(30)")).to_be_visible()
    lab.shoot("compared-light")
    lab.page.set_viewport_size({"width": 600, "height": 860})
    loss = compared.get_by_role("row", name=re.compile("^loss")).get_by_role("cell").last
    loss.evaluate("node => { node.textContent = '0.00118978' }")
    assert loss.evaluate("node => node.clientHeight < 2 * parseFloat(getComputedStyle(node).fontSize) + 6"), (
        "a number is broken"
    )
    lab.dark()
    lab.shoot("compared-dark")


def test_saved_runs_are_a_table_that_is_sorted_by_what_they_report(open_notebook: Open) -> None:
    sweep = dedent("""\
        %%distributed --ranks 1 --sweep "lr=[0.1, 1e-3, 0.02]"
        import jupyter_distrib
        sorted_by_this_test = [jupyter_distrib.report(loss=lr * (5 - step)) for step in range(5)]""")
    lab = open_notebook(sweep)
    panel = lab.panel()
    lab.run(1)
    lab.wait_idle(1)
    lab.page.locator("#jupyter-distrib-panel .jp-AccordionPanel-title", has_text="History").click()
    panel.get_by_role("button", name="Table").click()
    table = lab.page.get_by_role("table", name="Saved runs")
    lab.page.locator(".jp-Distributed-tablesearch").get_by_label("Search saved runs").fill("sorted_by_this_test")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(3)
    head = table.get_by_role("columnheader", name="loss")
    for click, losses in (("ascending", ["0.001", "0.02", "0.1"]), ("descending", ["0.1", "0.02", "0.001"])):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", click)
        expect(rows).to_contain_text(losses)
    lab.shoot("runs-table")
    for row in rows.all()[:2]:
        row.get_by_role("checkbox").check()
    lab.page.get_by_role("main").get_by_role("button", name="Compare").click()
    expect(lab.page.locator(".jp-Distributed-compared").last.get_by_role("img", name="loss over steps")).to_be_visible()
    lab.page.get_by_role("tab", name="Saved runs").click()
    rows.first.get_by_role("button").click()
    expect(lab.page.locator(".jp-Distributed-compared").last).to_contain_text("sorted_by_this_test")
    lab.page.get_by_role("tab", name="Saved runs").click()
    lab.dark()
    lab.page.set_viewport_size({"width": 900, "height": 700})
    lab.shoot("runs-table-dark-narrow")


def test_a_kernel_that_restarts_is_connected_again(open_notebook: Open) -> None:
    lab = open_notebook("%%distributed --ranks 2\nrank")
    panel = lab.panel()
    lab.run(1)
    expect(panel).to_contain_text("2 CPU ranks, idle")
    lab.do("kernelmenu:restart")
    lab.page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(panel).to_contain_text("jupyter_distrib is not loaded")
    lab.run(0)
    expect(panel.get_by_text("Next runs")).to_be_visible()


def test_the_panel_is_used_by_keyboard_and_named_for_screen_readers(open_notebook: Open) -> None:
    lab = open_notebook("1")
    panel = lab.panel()
    expect(panel).to_have_role("region")
    expect(panel).to_have_accessible_name("Distributed")
    panel.get_by_label("Pool", exact=True).focus()
    for label in ("Strategy", "Ranks"):
        lab.page.keyboard.press("Tab")
        expect(panel.get_by_label(label, exact=True)).to_be_focused()
        expect(panel.get_by_label(label, exact=True)).to_have_css("outline", re.compile("solid 2px"))
    lab.page.keyboard.press("Shift+Tab")
    expect(panel.get_by_label("Strategy", exact=True)).to_be_focused()
    lab.page.keyboard.type("d")
    expect(panel.locator("code")).to_have_text(re.compile("--strategy d"))
    expect(panel.get_by_label("Strategy", exact=True)).to_be_focused()  # a repaint leaves the focus where it is


def test_the_panel_follows_the_notebook_and_the_console_that_are_shown(open_notebook: Open) -> None:
    lab = open_notebook("%%distributed --ranks 2\nrank")
    panel = lab.panel()
    lab.run(1)
    expect(panel).to_contain_text("2 CPU ranks, idle")
    lab.server.notebook("other.ipynb", ["1"])
    lab.do("docmanager:open", path="other.ipynb")
    expect(panel).to_contain_text("jupyter_distrib is not loaded in the kernel of other.ipynb")
    lab.do("docmanager:open", path=lab.name)
    expect(panel).to_contain_text("2 CPU ranks, idle")
    lab.do("console:create", kernelPreference={"name": "python3"})
    expect(panel).to_contain_text("jupyter_distrib is not loaded in the kernel of Console 1")

    panel.get_by_role("button", name="Load it").click()
    lab.page.locator(".jp-CodeConsole-promptCell .cm-content").fill("%%distributed --pool inline\nprint('here')")
    lab.do("console:run-forced")
    run = panel.locator(".jp-Distributed-run").first
    expect(run).to_contain_text("done")
    expect(run.get_by_role("button", name="Go to cell")).to_have_count(0)
    lab.do("kernelmenu:shutdown")
    panel.get_by_role("button", name="Choose a kernel").click()
    lab.page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(panel).to_contain_text("jupyter_distrib is not loaded in the kernel of Console 1")


def test_colours_come_from_the_theme() -> None:
    style = (TOP / "labextension" / "style" / "base.css").read_text()
    values = re.findall(r"(?:color|background|border(?:-\w+)*):([^;}]*)", style)
    assert [value for value in values if re.search(r"#|\brgb|hsl|white|black|gr[ae]y|red|green|blue", value)] == []


def test_the_panel_lives_on_the_other_side_too(open_notebook: Open) -> None:
    lab = open_notebook("1")
    panel = lab.panel()
    lab.page.locator(".jp-SideBar [data-id=jupyter-distrib-panel]").click(button="right")
    lab.page.locator(".lm-Menu-item", has_text="Switch Sidebar Side").click()
    expect(lab.page.locator("#jp-right-stack #jupyter-distrib-panel")).to_be_attached()
    expect(lab.panel().locator("code")).to_have_text("%%distributed")
    panel.get_by_label("Strategy", exact=True).select_option("ddp")
    expect(panel.locator("code")).to_have_text("%%distributed --strategy ddp")


def test_every_command_says_what_it_is_and_what_it_takes(open_notebook: Open) -> None:
    lab = open_notebook("1")
    told = lab.page.evaluate(
        """async () => {
            const { commands } = window.jupyterapp ?? window.jupyterlab;
            const ours = commands.listCommands().filter(id => id.startsWith('jupyter-distrib:'));
            return Promise.all(ours.map(async id => [
                id, commands.label(id), commands.caption(id), Boolean(commands.icon(id)), (await commands.describedBy(id)).args
            ]));
        }"""
    )
    assert len(told) >= 12
    for name, label, caption, has_icon, arguments in told:
        assert label, name
        assert caption, name
        assert has_icon, name
        assert arguments["type"] == "object", name


WHOLE = """node => {
    node.scrollIntoView({ block: 'nearest' });
    const { left, top, right, bottom } = node.getBoundingClientRect();
    const hits = [[left + 3, top + 3], [right - 3, bottom - 3], [(left + right) / 2, (top + bottom) / 2]];
    return hits.every(([x, y]) => node.contains(document.elementFromPoint(x, y)) || node.getRootNode() !== document);
}"""


@pytest.mark.parametrize("height", [900, 600, 450])
def test_everything_in_the_sidebar_can_be_pressed_whatever_the_height(open_notebook: Open, height: int) -> None:
    lab = open_notebook("%%distributed --ranks 2\nrank", "%%distributed --ranks 2\n-rank")
    panel = lab.panel()
    for cell in (1, 2):
        lab.run(cell)
        lab.wait_idle(cell)
    for size in (860, height):  # the window is made lower with all sections open
        lab.page.set_viewport_size({"width": 1280, "height": size})
        if not panel.locator(".jp-Distributed-history").is_visible():
            panel.get_by_text("History", exact=True).click()
        expect(panel.locator(".jp-Distributed-saved").first).to_be_visible()
    add = panel.get_by_role("button", name="Add pool")
    assert add.evaluate(
        """async node => {
            const section = node.closest('.jp-Distributed-section');
            for (let tries = 0; tries < 100; tries += 1) {
                if (node.getBoundingClientRect().bottom <= section.getBoundingClientRect().bottom) return true;
                await new Promise(requestAnimationFrame);
            }
            return false;
        }"""
    ), "Add pool is cut"
    lab.shoot(f"sidebar-{height}-high")
    for control in panel.locator("button, select, input, summary").all():
        if control.is_visible():
            assert control.evaluate(WHOLE), f"cut: {control.evaluate('node => node.outerHTML')[:200]}"


def test_buttons_of_the_form_of_a_pool_can_be_pressed_in_a_low_window(open_notebook: Open) -> None:
    lab = open_notebook("1")
    panel = lab.panel()
    lab.page.set_viewport_size({"width": 1280, "height": 450})
    panel.get_by_role("button", name="Add pool").click()
    form = panel.get_by_role("form", name="Add a pool")
    expect(form.get_by_label("Kind", exact=True)).to_be_visible()
    for control in form.locator("button, select, input, summary").all():
        if control.is_visible():
            assert control.evaluate(WHOLE), f"cut: {control.evaluate('node => node.outerHTML')[:200]}"
    lab.shoot("pool-form-450-high", panel)

    foot, section = (
        form.locator(".jp-Distributed-foot"),
        panel.locator(".jp-Distributed-section", has=lab.page.locator(".jp-Distributed-form")),
    )
    fields = "([section, foot]) => foot.getBoundingClientRect().top - section.getBoundingClientRect().top"
    shown = lab.page.evaluate(fields, [section.element_handle(), foot.element_handle()])
    assert shown >= 180, f"{shown} px of fields above the buttons"
    panel.evaluate("node => { node.style.width = '250px'; }")
    tops = foot.locator("button").evaluate_all("nodes => nodes.map(node => node.getBoundingClientRect().top)")
    assert len(tops) == 3
    assert len(set(tops)) == 1, "the buttons take more than one row"
    assert foot.evaluate("node => node.scrollWidth <= node.clientWidth")
