"""Pages of runs in the main area: one run, going on or saved; several compared; and what draws them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_distrib.kernel.views import page_code
from tests.browser.conftest import Open
from tests.browser.lab import BAD, Lab, harmless, until
from tests.browser.test_strips import DARK

MOUNT = """async ([script, style, state, name]) => {
    document.head.appendChild(document.createElement('style')).textContent = style;
    const module = await import(URL.createObjectURL(new Blob([script], { type: 'text/javascript' })));
    const root = document.body.appendChild(document.createElement('div'));
    root.className = 'jd-run';
    const inner = root.appendChild(document.createElement('section'));
    if (name === 'heat') {
        inner.className = 'jd-timeline';
        new module.Heat(inner).paint(state);
    } else {
        inner.className = 'jd-charts';
        const charts = new module.Charts(inner, () => charts.paint(state), { name: rank => `run ${rank}` });
        charts.paint(state);
    }
}"""


def mount(page: Page, state: dict[str, Any], name: str) -> None:
    page.set_content("<!DOCTYPE html><body>")
    page.evaluate(MOUNT, [page_code.script(page_code.PAGE), page_code.style(page_code.PAGE), state, name])


def points(path: str) -> list[tuple[float, float]]:
    numbers = [float(each) for each in re.findall(r"[\d.]+", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def a_line(run: int, values: list[Any], odd: list[Any] | None = None) -> dict[str, Any]:
    columns = {"step": list(range(len(values))), "=loss": values, "left": 0, "not_finite": {"loss": odd} if odd else {}}
    return {"rank": run, "state": "done", "columns": columns}


def test_a_line_for_each_of_twenty_runs_is_read_back_and_has_values_under_the_cursor(blank: Page) -> None:
    runs = [a_line(100 + run, [1.0 + run, 10.0, 100.0]) for run in range(20)]
    runs[3] = a_line(103, [4.0, None, None], ["nan", 1, 2, True])
    mount(blank, {"ranks": runs}, "charts")

    lines = blank.locator(".jd-chart path[data-line]")
    expect(lines).to_have_count(20)
    drawn = {each.get_attribute("data-line"): points(each.get_attribute("d") or "") for each in lines.all()}
    assert drawn["rank 100"] == [(4.0, 90.0), (150.0, 82.4), (296.0, 6.0)]
    assert drawn["rank 119"] == [(4.0, 73.9), (150.0, 82.4), (296.0, 6.0)]
    styles = lines.evaluate_all(
        "all => all.map(node => getComputedStyle(node).stroke + getComputedStyle(node).strokeDasharray)"
    )
    assert len(set(styles)) == 20, "runs cannot be told apart"
    legend = blank.locator(".jd-runs li")
    expect(legend.nth(3)).to_have_text("run 103nan from step 1")
    expect(legend.nth(19)).to_have_text("run 119100")
    expect(blank.locator(".jd-ups span")).to_have_text(["100", "50.5", "1"])
    expect(blank.locator(".jd-marks .jd-turned")).to_have_count(1)

    blank.locator(".jd-chart svg").first.hover(position={"x": 20, "y": 40})
    expect(legend.nth(19)).to_have_text("run 11920")
    expect(blank.locator(".jd-chart-foot")).to_have_text("step 0")
    blank.get_by_role("button", name="log scale").click()
    expect(lines.first).to_have_attribute("d", re.compile(r"M4.0 90.0L150.0 48.0L296.0 6.0"))
    blank.screenshot(path="artifacts/browser/compared-20.png")


def over_time(ranks: int, columns: int = 60) -> dict[str, Any]:
    """Rank 5 falls back, so its row comes first, and the others wait for it."""
    order = [5, *(rank for rank in range(ranks) if rank != 5)]
    behind = "".join(str(min(9, column // 6)) for column in range(columns))
    return {
        "seconds": 120.0,
        "ranks": order,
        "gpus": True,
        "colors": [f"#{level}{level}8899" for level in range(10)],
        "rows": {
            "behind": [behind if rank == 5 else "0" * columns for rank in order],
            "busy": [("9" if rank == 5 else "4") * columns for rank in order],
            "memory": ["5" * (columns - 1) + "." for _ in order],
            "waiting": [("0" if rank == 5 else "6") * columns for rank in order],
        },
        "most": {"busy": 100.0, "memory": 80e9, "waiting": 1.0},
        "waits": [[rank, 5, 40.0] for rank in range(ranks) if rank != 5],
    }


def levels_drawn(page: Page, rows: int, columns: int, height: int) -> list[str]:
    """The levels that the paths draw, read back."""
    table = [["."] * columns for _ in range(rows)]
    for path in page.locator(".jd-course path").all():
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v", path.get_attribute("d") or ""):
            table[int(y) // height][int(x) : int(x) + int(width)] = (path.get_attribute("data-level") or "") * int(
                width
            )
    return ["".join(row) for row in table]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_64_ranks_over_time_are_a_map_with_the_straggler_first(blank: Page, dark: bool) -> None:
    state = over_time(64)
    mount(blank, state, "heat")
    if dark:
        blank.add_style_tag(content=DARK)
    picture = blank.locator(".jd-course svg")
    expect(picture).to_have_attribute(
        "aria-label", "Steps behind the leading rank over 2:00: rank 5 up to 256 and more"
    )
    assert levels_drawn(blank, 64, 60, 5) == state["rows"]["behind"]
    expect(blank.locator(".jd-course-ranks > div").first).to_have_text("rank 5")
    blank.screenshot(path=f"artifacts/browser/heat-{'dark' if dark else 'light'}.png")
    for name, kind in (("GPU", "busy"), ("GPU memory", "memory"), ("Communication", "waiting")):
        blank.get_by_role("button", name=name, exact=True).click()
        assert levels_drawn(blank, 64, 60, 5) == state["rows"][kind]
    picture.hover(position={"x": 1, "y": 1})
    expect(blank.locator(".jd-legend").first).to_have_text("rank 5 at 0:01: 0 % - 10 %")
    picture.hover(position={"x": 1, "y": 12})
    expect(blank.locator(".jd-legend").first).to_have_text("rank 1 at 0:01: 60 % - 70 %")
    blank.get_by_role("button", name="Who waits for whom").click()
    assert levels_drawn(blank, 1, 64, 14) == ["99999." + "9" * 58]
    blank.mouse.move(500, 600)
    expect(blank.locator(".jd-legend").first).to_have_text("rank 5: 63 ranks waited, 40.0 s each")
    blank.screenshot(path=f"artifacts/browser/waits-{'dark' if dark else 'light'}.png")


TRAIN = """%%distributed --ranks 2
import os, time, jupyter_distrib
bad = "BAD"
print(bad)
print("second line of", rank, flush=True)
for step in jupyter_distrib.progress(range(100_000)):
    jupyter_distrib.report(**{"loss": 1 / (1 + step) + rank, bad: step})
    time.sleep(0.1)
    if os.path.exists("ENOUGH"):
        break
""".replace("BAD", BAD)


def region(lab: Lab, name: str) -> Any:
    return lab.page.locator(".jp-Distributed-compared").last.get_by_role("region", name=name)


def test_a_run_has_a_page_while_it_goes_on_and_when_it_is_saved(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook("%%distributed --ranks 2\nearlier_of_this_test = 1", until(TRAIN, enough))
    panel = lab.panel()
    lab.run(1)
    lab.wait_idle(1)
    lab.run(2)
    card = panel.locator(".jp-Distributed-run").first
    expect(card).to_contain_text("running")
    card.get_by_role("button", name="Open").click()
    page = lab.page.locator(".jp-Distributed-compared").last
    expect(page.get_by_role("heading", level=2)).to_contain_text("running")
    charts = region(lab, "Reported numbers")
    line = charts.locator(".jd-chart path.jd-first").first
    expect(line).to_be_visible()
    before = line.get_attribute("d") or ""
    expect(line).not_to_have_attribute("d", before)  # it goes on by itself
    log = region(lab, "Log").first
    expect(log.locator(".jd-output")).to_contain_text("second line of 1")
    log.get_by_role("searchbox").fill("second line")
    expect(log.locator(".jd-output")).not_to_contain_text("pwned")
    log.get_by_role("searchbox").fill("")
    harmless(lab, ".jp-Distributed-compared", "img", "svg[onload]")
    lab.shoot("run-page-live")
    enough.touch()
    expect(page.get_by_role("heading", level=2)).to_contain_text("done")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)

    lab.page.locator("#jupyter-distrib-panel .jp-AccordionPanel-title", has_text="History").click()
    saved = panel.locator(".jp-Distributed-history li").first
    saved.get_by_role("button").click()
    expect(lab.page.locator(".jp-Distributed-compared")).to_have_count(2)
    page = lab.page.locator(".jp-Distributed-compared").last
    expect(region(lab, "Reported numbers").locator(".jd-chart").first).to_be_visible()
    expect(page.locator("table", has_text="Environment")).to_contain_text("torch")
    expect(page.locator("table", has_text="Configuration")).to_contain_text("ranks 0-1")
    code = region(lab, "Code").last
    expect(code.locator("pre")).to_contain_text("for step in")
    code.get_by_label("Show").select_option(index=1)
    expect(code.locator(".jp-mod-added", has_text="for step in")).to_be_visible()
    expect(code.locator(".jp-mod-removed", has_text="earlier_of_this_test")).to_be_visible()
    expect(region(lab, "Log").first.locator(".jd-output")).to_contain_text("second line of 0")
    harmless(lab, ".jp-Distributed-compared:visible", "img", "svg[onload]")
    lab.page.set_viewport_size({"width": 1400, "height": 1500})
    lab.shoot("run-page")
    lab.dark()
    lab.shoot("run-page-dark")


SWEEP = """%%distributed --ranks 1 --sweep "lr=[0.3, 0.1, 0.2]" --sweep "kind=['BAD']"
import os, time, jupyter_distrib
for step in range(100_000):
    jupyter_distrib.report(loss=lr + lr / (1 + step), step_count=step)
    time.sleep(0.05)
    if os.path.exists("ENOUGH"):
        break
"""


def test_a_sweep_is_one_view_with_the_best_on_top_stop_and_open(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(SWEEP.replace("BAD", "<img src=x onerror=window.pwned=1>"), enough))
    lab.do("jupyter-distrib:start-ranks")
    lab.run(1)
    view = lab.page.locator(".jd-sweep")
    rows = view.locator("tbody tr")
    expect(rows).to_have_count(3)
    running = view.locator("tbody tr", has_text="running")
    expect(running.first).to_be_visible()
    grows = running.first.locator("td").nth(3)
    expect(grows).to_have_text(re.compile(r"\d"))
    expect(grows).not_to_have_text(grows.inner_text())
    expect(view.locator(".jd-chart path[data-line]").first).to_be_visible()
    running.first.get_by_role("button", name="Open").click()
    expect(lab.page.locator(".jp-Distributed-compared").last.get_by_role("heading", level=2)).to_contain_text("running")
    lab.page.get_by_role("tab", name=lab.name).click()
    first = running.first.get_attribute("data-run")
    stopped = view.locator(f"tr[data-run='{first}']")
    stopped.get_by_role("button", name="Stop").click()
    expect(stopped).to_contain_text("interrupted")
    expect(stopped.get_by_role("button", name="Stop")).to_be_hidden()
    expect(running.first).to_be_visible()
    expect(view.locator(".jd-parallel path").nth(1)).to_be_visible()  # of the one that was stopped, and of the next
    lab.shoot("sweep", view)
    lab.dark()
    lab.shoot("sweep-dark", view)
    view.get_by_role("button", name="Copy table").click()
    copied = lab.page.evaluate("() => navigator.clipboard.readText()")
    assert copied.splitlines()[0] == "lr\tkind\tloss\tstep_count\tstate"
    assert lab.page.evaluate("window.pwned") is None
    enough.touch()
    output = lab.ended(1)
    expect(output.locator("table")).to_be_visible()
    expect(view).to_have_count(0)
    rates = [text.split()[0] for text in output.locator("tr").all_inner_texts()]
    assert rates == ["lr", "0.1", "0.2", "0.3"], "the best is on top"
    assert "widgets" not in lab.save()["metadata"]


QUICK = """%%distributed --ranks 1 --sweep "lr=[0.3, 0.1, 0.2]"
import os, time, jupyter_distrib
for step in range(100_000):
    jupyter_distrib.report(loss=lr + lr / (1 + step))
    time.sleep(0.05)
    if os.path.exists("ENOUGH"):
        break
lr"""


def grows(view: Locator) -> None:
    """The sweep's lines do, again and again."""
    expect(view).to_have_count(1)
    path = view.locator(".jd-chart path[data-line]").first
    for _ in range(2):
        expect(path).not_to_have_attribute("d", path.get_attribute("d") or "")


@pytest.mark.parametrize("saved", [False, True])
def test_a_sweep_is_live_in_a_page_that_is_reloaded_and_ends_in_its_cell(
    open_notebook: Open, enough: Path, saved: bool
) -> None:
    lab: Lab = open_notebook(until(QUICK, enough))
    lab.run(1)
    view = lab.page.locator(".jd-sweep")
    grows(view)
    if saved:
        lab.save()
    for _ in range(2):
        lab.reload()
        grows(view)
    expect(lab.output(1)).not_to_contain_text("Loading widget", use_inner_text=True)
    lab.shoot(f"sweep-reloaded-{'saved' if saved else 'unsaved'}")
    if saved:
        for each in nbformat.read(lab.path, as_version=4).cells[1].outputs:
            assert "They were seen last at" in each["data"]["text/plain"]
    stopped = view.locator("tbody tr").filter(has=lab.page.get_by_role("button", name="Stop")).first
    run = stopped.get_attribute("data-run")
    stopped.get_by_role("button", name="Stop").click()
    expect(view.locator(f"tr[data-run='{run}']")).to_contain_text("interrupted")
    enough.touch()

    expect(lab.output(1).locator("table")).to_be_visible()
    expect(lab.output(1).locator("img")).to_be_visible()
    expect(view).to_have_count(0)
    expect(lab.output(1)).to_contain_text("lr=0.3: ")
    lab.shoot(f"sweep-settled-{'saved' if saved else 'unsaved'}")
    outputs = lab.save().cells[1].outputs
    assert [each.output_type for each in outputs] == ["display_data", "display_data", "execute_result"]
    assert "the best is" in outputs[1]["data"]["text/plain"]


def test_a_page_that_is_opened_after_the_end_of_a_sweep_shows_it(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(QUICK, enough))
    lab.run(1)
    grows(lab.page.locator(".jd-sweep"))
    lab.leave()
    enough.touch()
    lab.server.wait_until_idle()
    lab.open()

    expect(lab.output(1).locator("table")).to_be_visible()
    expect(lab.output(1).locator("img")).to_be_visible()
    expect(lab.output(1)).to_contain_text("lr=0.3: ")


def test_a_sweep_whose_kernel_ends_leaves_what_was_seen_last(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(QUICK, enough), "import os; print(os.getpid())")
    lab.run(2)
    kernel = int(lab.ended(2).inner_text())
    lab.run(1)
    grows(lab.page.locator(".jd-sweep"))
    os.kill(kernel, signal.SIGKILL)

    expect(lab.output(1)).to_contain_text("The kernel has ended, or was restarted, in the middle of these runs.")
    expect(lab.output(1)).to_contain_text("lr=0.1")
    expect(lab.page.locator(".jd-sweep")).to_have_count(0)


SUBMITTED = """import jupyter_distrib
@jupyter_distrib.distributed(ranks=1)
def train(lr, epochs=3):
    import os, time
    for step in range(100_000):
        jupyter_distrib.report(loss=lr + lr / (1 + step))
        time.sleep(0.05)
        if os.path.exists("ENOUGH"):
            break
runs = [train.submit(lr) for lr in (0.3, 0.1)]"""


def test_submitted_runs_are_one_live_view_like_a_sweep(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(SUBMITTED, enough), "2")
    lab.run(1)
    lab.wait_idle(1)
    view = lab.page.locator(".jd-sweep")
    grows(view)
    expect(view.locator("tbody tr")).to_have_count(2)
    expect(view.locator("thead th").first).to_have_text("lr")
    lab.shoot("submitted")
    lab.run(2)  # not under another cell
    expect(lab.ended(2)).to_have_text("[3]:2")
    lab.reload()
    grows(view)
    enough.touch()

    expect(lab.output(1).locator("img")).to_be_visible()
    expect(lab.output(1).locator("table")).to_contain_text("done")
    expect(view).to_have_count(0)
    lab.shoot("submitted-settled")
    (output,) = lab.save().cells[1].outputs
    assert output["data"].keys() == {"text/plain", "text/html"}


PRINTS = """%%distributed --ranks 2
if rank == 0:
    print('\\n'.join(f'line {number}' for number in range(NUMBER)))"""


def test_the_page_of_a_failed_run_has_its_traceback(open_notebook: Open) -> None:
    lab = open_notebook(
        dedent(f"""\
            %%distributed --ranks 2
            def train(x):
                raise ValueError({BAD!r})

            train(rank)""")
    )
    panel = lab.panel()
    lab.run(1)
    lab.wait_idle(1)
    panel.locator(".jp-Distributed-run").first.get_by_role("button", name="Open").click()
    lines = region(lab, "Traceback").locator("pre > div")
    expect(lines).to_contain_text(["ValueError  Traceback (ranks 0-1 of 2)", "line 5", "train(rank)", "in train(...)"])
    harmless(lab, ".jp-Distributed-compared:visible", "img", "svg[onload]")
    lab.shoot("run-page-failed")


def test_the_log_of_a_run_is_as_high_as_its_lines_and_says_when_there_are_none(open_notebook: Open) -> None:
    numbers = (0, 3, 60)
    lab = open_notebook("%%distributed\nrank", *(PRINTS.replace("NUMBER", str(number)) for number in numbers[1:]))
    panel, heights = lab.panel(), []
    for cell, number in enumerate(numbers, start=1):
        lab.run(cell)
        lab.wait_idle(cell)
        panel.locator(".jp-Distributed-run").first.get_by_role("button", name="Open").click()
        log = lab.page.locator(".jp-Distributed-pagelog:visible")
        expect(log).to_contain_text(f"line {number - 1}" if number else "Nothing was printed.")
        expect(log.get_by_label("Rank", exact=True)).to_be_visible(visible=number > 0)
        heights.append(log.evaluate("node => node.offsetHeight"))
        lab.shoot(f"page-log-{number}")
        lab.do("application:close")
        expect(log).to_have_count(0)
    none, few, many = heights
    assert none < 45
    assert 80 < few < 160
    assert 310 < many < 330
