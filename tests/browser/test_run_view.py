"""The view of a run as people see it: live in JupyterLab and Notebook 7, and static in a notebook that is opened again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.state import StateDelta
from jupyter_distrib.wire import messages as m
from tests.browser.conftest import Open
from tests.browser.lab import ARTIFACTS, BAD, Lab, harmless, press_copy, until
from tests.kernel.record import golden_run

TRAIN = """%%distributed --ranks 4
import os, time, jupyter_distrib
print("loading data")
for epoch in jupyter_distrib.progress(range(2), label="epoch"):
    for step in jupyter_distrib.progress(range(100_000), label="step"):
        time.sleep(0.05)
        jupyter_distrib.report(loss=1 / (1 + step) + rank / 50)
        if os.path.exists("ENOUGH"):
            break
    print("end of epoch", epoch, "on", rank)
"""
STUCK = """%%distributed --ranks 2 --strategy ddp
import time, torch, torch.distributed as dist
print("begun", flush=True)
if rank == 0:
    time.sleep(600)
dist.all_reduce(torch.ones(1))
"""
PAYLOADS = r"""%%distributed --ranks 2
import os, time, jupyter_distrib
bad = "BAD"
print(bad)
print("\x1b]8;;javascript:window.pwned=1\x1b\\link\x1b]8;;\x1b\\")
for step in jupyter_distrib.progress(range(100_000), label=bad):
    time.sleep(0.1)
    jupyter_distrib.report(**{bad: step * (rank + 1)})
    if os.path.exists("ENOUGH"):
        break
raise ValueError(bad)
""".replace("BAD", BAD)


def row_of(lab: Lab, rank: int) -> Locator:
    return lab.page.locator(".jd-rank", has=lab.page.locator(f".jd-no:text-is('{rank}')"))


# ---------------------------------------------------------------------------------------------------- in JupyterLab


STEPS = """%%distributed --pool inline --ranks 3 --step-through
import torch, torch.distributed as dist
x = torch.arange(3.) + 10 * rank
dist.all_reduce(x)
parts = [torch.zeros(2) for _ in range(3)]
dist.all_to_all(parts, [torch.tensor([rank, 10. * rank + to]) for to in range(3)])
dist.send(x, 2) if rank == 0 else dist.recv(x, 0) if rank == 2 else None"""


def test_collectives_are_gone_through_step_by_step_in_a_saved_notebook_too(open_notebook: Open) -> None:
    lab: Lab = open_notebook(STEPS)
    lab.run(1)
    output = lab.ended(1)
    lab.save()
    lab.server.end_kernels()
    for theme in ("light", "dark"):
        steps = output.get_by_role("group", name="What the ranks send")
        first, second, third = (steps.locator("section").nth(place) for place in range(3))
        expect(first).to_be_visible()
        expect(first).to_contain_text("step 1 of 3 · all_reduce (sum) · line 4")
        expect(first).to_contain_text("rank 1 sends [10 11 12] of shape [3] to ranks 0, 2")
        expect(second).to_be_hidden()
        first.locator("label", has_text="forward").click()
        expect(second).to_be_visible()
        expect(second.locator("svg path")).to_have_count(2 * 6)
        lab.shoot(f"steps-{theme}", output)
        steps.get_by_role("radio").nth(1).focus()
        lab.page.keyboard.press("ArrowRight")
        expect(third).to_contain_text("send and recv")
        expect(third).to_be_visible()
        third.locator("label", has_text="back").click()
        expect(second).to_be_visible()
        expect(first).to_be_hidden()
        if theme == "light":
            lab.open()
            lab.dark()
            output = lab.output(1)


def test_a_training_cell_is_watched_and_its_output_outlives_the_kernel(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(TRAIN, enough))
    lab.cell(1).locator(".cm-content").click()
    lab.page.keyboard.press("Control+Enter")

    rows = lab.page.locator(".jd-rank")
    expect(rows).to_have_count(4)
    for rank in range(4):  # each of them moves
        step = row_of(lab, rank).locator(".jd-steps").last
        expect(step).to_have_text(re.compile(r"\d"))
        expect(step).not_to_have_text(step.inner_text())
    button = row_of(lab, 2).locator("button")
    button.focus()
    lab.page.keyboard.press("Enter")
    expect(row_of(lab, 2).locator(".jd-output")).to_contain_text("loading data")
    expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(lab.page.locator(".jd-chart path.jd-first")).to_be_visible()
    expect(lab.page.locator(".jd-who", has_text="all 4").first).to_be_visible()
    lab.shoot("train")

    enough.touch()
    output = lab.ended(1)
    expect(output.locator("table")).to_be_visible()
    expect(lab.page.locator(".jd-run")).to_have_count(0)
    expect(output).to_contain_text("[0-3] loading data")
    lab.shoot("train-settled")
    saved = lab.save()
    assert "widgets" not in saved["metadata"]
    kinds = [set(each["data"]) for each in saved["cells"][1]["outputs"]]
    assert kinds == [{"text/html", "text/plain"}, {"image/png", "text/plain"}]
    stranger = shutil.copy(lab.path, lab.path.with_name("stranger.ipynb"))

    lab.server.end_kernels()
    for name in (lab.name, stranger.name):  # the second one is not trusted
        lab.name = name
        lab.open()
        output = lab.output(1)
        expect(output.locator("table")).to_be_visible()
        expect(output).to_contain_text("rank 3")
        assert "model not found" not in lab.page.content()
        assert output.locator("img").first.evaluate("image => image.naturalWidth") > 100


def test_a_cell_that_is_stuck_in_a_collective_shows_where_its_ranks_are_and_can_be_stopped(open_notebook: Open) -> None:
    lab: Lab = open_notebook(STUCK)
    lab.run(1)
    expect(lab.page.locator(".jd-line", has_text="begun")).to_be_visible()
    lab.page.locator(".jd-where").click()
    stacks = lab.page.locator(".jd-stack")
    expect(stacks).to_have_count(2)
    expect(stacks.first).to_contain_text("time.sleep(600)")
    expect(stacks.last).to_contain_text("dist.all_reduce(torch.ones(1))")
    lab.shoot("stacks")
    lab.page.locator(".jd-stop").click()

    expect(lab.ended(1)).to_contain_text("KeyboardInterrupt")


def test_nothing_that_ranks_write_runs_live_or_settled_or_opened_again(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(PAYLOADS, enough))
    lab.run(1)
    expect(lab.page.locator(".jd-chart")).to_be_visible()
    expect(lab.page.locator(".jd-line", has_text="onerror").first).to_be_visible()
    harmless(lab, ".jd-run")
    enough.touch()
    expect(lab.ended(1).locator("table")).to_be_visible()
    harmless(lab, ".jp-RenderedHTML", "svg")
    lab.save()

    lab.server.end_kernels()
    lab.open()
    expect(lab.output(1).locator("table")).to_be_visible()
    harmless(lab, ".jp-RenderedHTML", "svg")


def test_the_view_takes_the_colours_of_the_dark_theme(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(TRAIN, enough))
    lab.dark()
    lab.run(1)
    expect(lab.page.locator(".jd-rank").first).to_be_visible()

    view = lab.page.locator(".jd-run")
    assert min(lab.colour(view, "color")) > 200
    assert max(lab.colour(view, "backgroundColor")) < 50
    lab.shoot("dark")
    enough.touch()
    lab.wait_idle(1)


def test_notebook_7_shows_the_same(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(TRAIN, enough), classic=True)
    lab.run(1)
    expect(lab.page.locator(".jd-rank")).to_have_count(4)
    lab.shoot("notebook7")
    enough.touch()
    expect(lab.ended(1)).to_contain_text("[0-3] loading data")


# ---------------------------------------------------------------------------------------------------- on a page of its own

MOUNT = """async ([source, held]) => {
    const view = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const listeners = [];
    window.sent = [];
    const off = (name, call) => listeners.splice(listeners.findIndex((each) => each.name === name && each.call === call), 1);
    const model = { get: (key) => held[key], on: (name, call) => listeners.push({ name, call }), off, send: (message) => window.sent.push(message) };
    window.trigger = (name) => listeners.filter((each) => each.name === name).forEach(({ call }) => call());
    window.bring = (pieces) => { Object.assign(held, pieces); window.trigger("change"); };
    view.default.initialize({ model });
    window.leave = view.default.render({ model, el: document.body });
    // as anywidget does it: each view has an object of its own for the model
    window.viewAgain = (el) => view.default.render({ model: { ...model }, el });
}"""
FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

Show = Callable[[RunRecord], Any]


def shoot(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png")


@pytest.fixture
def show(blank: Page) -> Show:
    """Draws a record; what it is given again is an update."""
    from jupyter_distrib.kernel.notebook import widget_model

    pieces, clock = StateDelta("local"), iter(range(1000))

    def draw(record: RunRecord) -> Any:
        changed = pieces.changed(record, float(next(clock)))
        if blank.url == "about:blank" and not blank.locator(".jd-run").count():
            blank.set_content("<!DOCTYPE html><body>")
            blank.add_style_tag(content=widget_model.RunWidget._css)
            blank.evaluate(MOUNT, [widget_model.RunWidget._esm, {**changed, "clock": {"elapsed_s": 41}}])
        else:
            blank.evaluate("pieces => window.bring(pieces)", changed)
        blank.evaluate(FRAME)
        return blank

    return draw


def a_record(ranks: int) -> RunRecord:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks, strategy="ddp")
    for rank in range(ranks):
        record.apply(m.Started(run="r-7", rank=rank, pid=100 + rank, device="cpu", at_s=1.0))
    return record


def move(record: RunRecord, rank: int, step: int) -> None:
    at_s = 1 + step / 10
    record.apply(m.Progressed(run="r-7", rank=rank, label="step", step=step, total=1000, at_s=at_s))
    record.apply(m.Measured(run="r-7", rank=rank, step=step, values={"loss": 1 / step}, at_s=at_s))
    record.apply(m.Wrote(run="r-7", rank=rank, stream="stdout", text=f"step {step}\n", at_s=at_s))


def test_many_ranks_are_a_grid_in_which_trouble_comes_first(show: Show) -> None:
    record = a_record(64)
    for step in range(1, 60):
        for rank in range(64):
            move(record, rank, max(1, step - 30) if rank == 37 else step)
    failure = m.Failure(type_name="builtins.KeyError", message="'lr'", frames=())
    record.apply(m.Failed(run="r-7", rank=12, failure=failure, at_s=8.0))
    page = show(record)

    assert page.locator(".jd-tiles .jd-rank").count() == 64
    assert [page.locator(".jd-no").nth(n).inner_text() for n in range(3)] == ["12", "37", "0"]
    assert "behind" in page.locator(".jd-rank").nth(1).inner_text()
    boxes = page.locator(".jd-rank").evaluate_all("tiles => tiles.map((tile) => tile.getBoundingClientRect().top)")
    assert len(set(boxes)) <= 10
    assert page.locator(".jd-failures").inner_text().strip() == "rank 12: KeyError: 'lr'"


CONTRAST = """node => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (colour) => {
        canvas.fillStyle = "white"; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((each) => each / 255).map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    };
    const light = (colour) => rgb(colour).reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
    const [text, ground] = [light(getComputedStyle(node).color), light("white")];
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
}"""


def test_a_long_message_is_folded_and_numbers_that_change_move_nothing(show: Show) -> None:
    record = a_record(3)
    for rank in range(3):
        for step in (8, 9):
            move(record, rank, step)
    page = show(record)
    place = "row => [...row.querySelectorAll('.jd-track, .jd-rate, .jd-metric')].map((each) => each.getBoundingClientRect().left)"
    before = page.locator(".jd-rank").first.evaluate(place)
    for rank in range(3):
        move(record, rank, 123)
    show(record)
    assert page.locator(".jd-rank").first.evaluate(place) == before
    for part in (".jd-chart-value", ".jd-ups span", ".jd-chart-name"):
        assert page.locator(part).first.evaluate(CONTRAST) >= 4.5, part

    message = "\n".join(f"mismatch {n}" for n in range(60))
    failure = m.Failure(type_name="builtins.RuntimeError", message=message, frames=())
    record.apply(m.Failed(run="r-7", rank=2, failure=failure, at_s=20.0))
    record.apply(m.Interrupted(run="r-7", rank=0, frames=(), at_s=20.1))
    show(record)
    failed, stopped = page.locator(".jd-failure").nth(0), page.locator(".jd-failure").nth(1)
    assert failed.locator("summary").inner_text() == "57 more lines"
    expect(failed.locator("pre")).to_be_hidden()
    failed.locator("summary").click()
    expect(failed.locator("pre")).to_contain_text("mismatch 59")
    assert stopped.inner_text().strip() == "rank 0 stopped because of rank 2"
    assert (
        page.locator(".jd-rank", has_text="interrupted").locator(".jd-last").inner_text() == "stopped because of rank 2"
    )
    begin = page.locator(".jd-steps").evaluate_all("all => all.map((each) => each.getBoundingClientRect().left)")
    assert len(begin) == 3
    assert len(set(begin)) == 1  # also of ranks that have no rate any more
    shoot(page, "failed")


READABLE = """rank => {
    const box = (node) => node.getBoundingClientRect();
    const metrics = rank.querySelector(".jd-metrics"), { bottom } = box(metrics), view = box(rank.closest(".jd-run"));
    const bars = [...rank.querySelectorAll(".jd-bars *")].map(box).filter((each) => each.width);
    const seen = [...metrics.children].filter((each) => box(each).width && box(each).top < bottom);
    const cut = (each) => each.scrollWidth > each.clientWidth || box(each).right > view.right || box(each).bottom > bottom + 1;
    const on = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const covered = seen.some((each) => bars.some((bar) => on(box(each), bar)));
    return covered || seen.some(cut) ? "cut off or covered" : seen.map((each) => each.firstChild.textContent || each.textContent);
}"""
LAST_IS_BESIDE = """rank => {
    const [last, bars] = [".jd-last", ".jd-bars"].map((part) => rank.querySelector(part).getBoundingClientRect());
    return !last.height || (last.left >= bars.right && last.top < bars.bottom);
}"""


@pytest.mark.parametrize(("ranks", "loops"), [(4, 1), (4, 2), (20, 1)])
def test_metrics_can_be_read_in_a_view_of_any_width(show: Show, ranks: int, loops: int) -> None:
    names = ["loss", "accuracy", "rate", "norm", "tokens", "validation"]
    record = a_record(ranks)
    for rank in range(ranks):
        if loops == 2:
            record.apply(m.Progressed(run="r-7", rank=rank, label="epoch", step=10, total=20, at_s=1.0))
        for step in (240, 250):
            move(record, rank, step)
        used = {"gpu_memory_bytes": None, "gpu_memory_total_bytes": None, "gpu_percent": None}
        record.apply(m.Sampled(run="r-7", rank=rank, rss_bytes=158_000_000, cpu_percent=98, **used, at_s=27.0))
        values = dict.fromkeys(names, 0.123456)
        record.apply(m.Measured(run="r-7", rank=rank, step=251, values=values, at_s=30.0))
    page = show(record)
    closed, opened = page.locator(".jd-rank").nth(0), page.locator(".jd-rank").nth(1)
    opened.locator(".jd-no").click()
    for width in (340, 520, 700, 780, 860, 1000, 1180):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(FRAME)
        shown = closed.evaluate(READABLE)
        assert shown == [*names[:4], "2 more"][: len(shown)], width
        assert len(shown) >= (1 if ranks > 16 else 4 if width < 800 or loops == 2 else 1), width
        assert opened.evaluate(READABLE) == names, width
        assert closed.evaluate(LAST_IS_BESIDE), width
    page.set_viewport_size({"width": 860, "height": 900})  # a notebook beside JupyterLab's own sidebar
    page.evaluate(FRAME)
    bar = closed.locator(".jd-steps, .jd-rate").evaluate_all(
        "parts => parts.map((part) => part.scrollWidth - part.clientWidth)"
    )
    assert max(bar) <= 0
    assert closed.locator(".jd-metrics").get_attribute("title") == ", ".join(f"{name} 0.1235" for name in names)


CUT_OFF = """run => [...run.querySelectorAll(".jd-head > *, .jd-no, .jd-state, .jd-steps, .jd-tool")]
    .filter((each) => each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > run.getBoundingClientRect().right)
    .map((each) => each.className)"""


@pytest.mark.parametrize("loops", [1, 2])
def test_a_run_is_followed_and_stopped_in_a_view_beside_the_panel_of_a_small_window(show: Show, loops: int) -> None:
    record = a_record(2)
    for rank in range(2):
        if loops == 2:
            record.apply(m.Progressed(run="r-7", rank=rank, label="epoch", step=10, total=20, at_s=1.0))
        move(record, rank, 250)
    page = show(record)
    for width in (240, 300, 400, 560):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(FRAME)
        assert page.locator(".jd-run").evaluate(CUT_OFF) == [], width


def test_updates_use_the_same_nodes_again_and_keep_the_focus(show: Show) -> None:
    record = a_record(64)
    for rank in range(64):
        move(record, rank, 1)
    page = show(record)
    page.locator(".jd-no").nth(5).focus()
    counts = []
    for step in range(2, 160):
        for rank in range(64):
            move(record, rank, step)
        if step % 50 == 0:
            counts.append(show(record).evaluate("document.querySelectorAll('*').length"))

    assert counts[-1] == counts[-2]
    assert page.evaluate("document.activeElement.textContent") == "5"


def test_the_golden_run_is_shown_whole(show: Show) -> None:
    page = show(golden_run.golden_record())

    for text in (
        "4 ranks · ddp · local · 4 × A100",
        "rank 0: has left the cell",
        "rank 3 was killed",
        "8,999 lines not shown here",
    ):
        page.locator(".jd-run", has_text=text).wait_for()
    assert page.locator(".jd-card img").count() == 1
    assert page.frame_locator(".jd-frame").locator("b").inner_text() == "80 %"
    assert page.locator("[role=progressbar]").first.get_attribute("aria-label")
    assert page.locator("[role=status]").inner_text()
    row = page.locator(".jd-rank", has=page.locator(".jd-no:text-is('0')"))
    for part, told in {
        "state": ["done"],
        "usage": ["GPU 0", "6.4 GB", "75 %"],
        "bars": ["train 25/100"],
        "metrics": ["loss", "0.6667", "lr"],
        "last": ["loading data"],
    }.items():
        assert [text for text in told if text not in row.locator(f".jd-{part}").inner_text()] == [], part
    assert page.locator(".jd-chart", has_text="loss").locator("path").count() == 4


def test_charts_beyond_the_first_are_counted_and_shown_on_a_click(show: Show) -> None:
    record = a_record(2)
    for step in range(1, 50):
        for rank in range(2):
            values = {f"number {index}": float(step * (index + 1)) for index in range(30)}
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values=values, at_s=2.0))
    page = show(record)
    charts, more = page.locator(".jd-chart"), page.locator(".jd-show-charts")
    expect(charts).to_have_count(6)
    expect(more).to_have_text("Show 18 more")
    expect(page.locator(".jd-more-charts")).to_contain_text("6 more metrics are not drawn")
    more.focus()
    page.keyboard.press("Enter")
    expect(charts).to_have_count(24)
    expect(charts.nth(23)).to_contain_text("number 23")
    expect(more).to_be_focused()
    more.click()
    expect(charts).to_have_count(6)


def test_no_more_charts_are_offered_than_there_are(show: Show) -> None:
    record = a_record(1)
    for step in (1, 2):
        move(record, 0, step)
    page = show(record)
    expect(page.locator(".jd-chart")).to_have_count(1)
    expect(page.locator(".jd-more-charts")).to_be_hidden()


def test_a_line_that_is_not_finished_stands_in_the_output_and_may_change(show: Show) -> None:
    record = a_record(2)
    record.apply(m.Wrote(run="r-7", rank=1, stream="stdout", text="begun\nloading", at_s=2.0))
    page = show(record)
    page.locator(".jd-no").nth(1).click()
    own, together = page.locator(".jd-rank .jd-output .jd-text"), page.locator(".jd-run > .jd-box .jd-text")
    expect(own).to_have_text(["begun", "loading"])
    expect(together).to_have_text(["begun", "loading"])
    record.apply(m.Wrote(run="r-7", rank=1, stream="stdout", text="... done\n", at_s=3.0))
    show(record)
    expect(own).to_have_text(["begun", "loading... done"])  # in a moment: output is drawn a few times a second
    expect(together).to_have_text(["begun", "loading... done"])


def test_the_output_is_searched_copied_and_stands_still_when_it_is_not_followed(show: Show) -> None:
    record = a_record(2)

    def write(rank: int, text: str, stream: str = "stdout") -> None:
        record.apply(m.Wrote(run="r-7", rank=rank, stream=stream, text=text, at_s=2.0))

    page = show(record)
    for first in range(0, 200, 40):  # a page gets as many at once
        for rank in range(2):
            write(rank, "".join(f"step {n}\n" for n in range(first, first + 40)))
        show(record)
    write(1, "ValueError: lr is too large\n")
    write(0, "on stderr\n", "stderr")
    page = show(record)
    page.evaluate("document.addEventListener('copy', () => { window.copied = document.activeElement.value })")
    tools, lines = page.get_by_role("toolbar", name="Output"), page.locator(".jd-run > .jd-box .jd-line .jd-text")
    tools.get_by_role("button", name="Errors only").click()
    expect(lines).to_have_text(["ValueError: lr is too large", "on stderr"])
    tools.get_by_role("button", name="Errors only").click()
    tools.get_by_label("Search the output").fill("STEP 19")
    expect(lines).to_have_text(["step 19", *(f"step 19{n}" for n in range(10))])
    expect(tools).to_contain_text("22 lines")
    shoot(page, "output-search")
    tools.get_by_label("Search the output").fill("nothing like this")
    expect(page.locator(".jd-none")).to_have_text("No line matches.")
    tools.get_by_label("Search the output").fill("")

    wrap = tools.get_by_role("button", name="Wrap")
    expect(lines.last).to_have_css("white-space-collapse", "preserve")
    expect(lines.last).to_have_css("text-wrap-mode", "wrap")
    wrap.press("Enter")
    expect(lines.last).to_have_css("text-wrap-mode", "nowrap")
    expect(wrap).to_have_attribute("aria-pressed", "false")

    box, follow = page.locator(".jd-run > .jd-box .jd-output"), tools.get_by_role("button", name="Follow")
    box.evaluate("box => { box.scrollTop = -300 }")
    expect(follow).to_have_attribute("aria-pressed", "false")
    top = lines.nth(20).evaluate("line => line.getBoundingClientRect().top")
    write(0, "one\ntwo\nthree\n")
    show(record)
    expect(follow).to_have_text("Follow (3 new)")
    assert lines.nth(20).evaluate("line => line.getBoundingClientRect().top") == top
    follow.click()
    expect(lines.last).to_have_text("three")
    expect(lines.last).to_be_in_viewport()
    expect(follow).to_have_text("Follow")

    tools.get_by_label("Search the output").fill("e")
    press_copy(tools.get_by_role("button", name="Copy"))
    copied = page.evaluate("window.copied").splitlines()
    assert copied[-3:] == ["[0] on stderr", "[0] one", "[0] three"]
    assert copied[0] == "[all 2] step 0"
    tools.get_by_role("button", name="Whole log").click()
    expect(page.locator(".jd-hint")).to_contain_text("%distributed_logs r-7")


def test_html_from_a_rank_cannot_run_or_load_anything(show: Show) -> None:
    record = a_record(1)
    attack = "<script>top.pwned=1</script><img src=x onerror='top.pwned=1'><a href='javascript:top.pwned=1' id=a>x</a><b>text</b><img src='https://example.com/x.png'><form action='https://example.com'><input type=submit id=s></form>"
    svg = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9' onload='top.pwned=1'><script>top.pwned=1</script></svg>"
    for data in ({"text/html": attack}, {"image/svg+xml": svg}, {"text/plain": attack}, {"text/markdown": attack}):
        record.apply(m.Displayed(run="r-7", rank=0, data=data, metadata={}, at_s=2.0))
    requests: list[str] = []
    page = show(record)
    page.on("request", lambda request: requests.append(request.url))
    frame = page.frame_locator(".jd-frame").first
    assert frame.locator("b").inner_text() == "text"
    assert page.frame_locator(".jd-frame").last.locator("b").inner_text() == "text", "of the Markdown"
    frame.locator("#a").click()
    frame.locator("#s").click()
    page.evaluate(FRAME)

    assert page.evaluate("window.pwned") is None
    assert not [url for url in requests if "example.com" in url]


def test_stop_is_an_event_first_and_a_message_if_nobody_takes_it(show: Show) -> None:
    page = show(a_record(2))
    page.evaluate(
        "window.asked = []; window.take = (event) => { window.asked.push(event.detail); event.preventDefault(); }; null"
    )
    page.evaluate("document.addEventListener('jupyter-distrib:stop', window.take)")
    page.locator(".jd-stop").click()
    assert page.evaluate("window.asked") == [{"run": "r-7", "force": False}]
    assert page.evaluate("window.sent") == []
    page.evaluate(FRAME)
    assert "asked to stop; all ranks still running" in page.locator(".jd-stage").inner_text()

    page.locator(".jd-where").click()
    assert page.evaluate("window.sent") == [{"op": "stacks", "run": "r-7"}]
    page.evaluate("window.sent.length = 0")

    page.evaluate("document.removeEventListener('jupyter-distrib:stop', window.take)")
    assert page.locator(".jd-stop").inner_text() == "Kill"
    page.locator(".jd-stop").click()
    assert page.evaluate("window.sent") == [{"op": "stop", "run": "r-7", "force": True}]
    assert "Stop button" in page.locator(".jd-hint").inner_text()


def test_a_second_view_has_the_clock_and_the_lines_of_the_first(show: Show) -> None:
    record = a_record(1)
    page = show(record)
    for batch in range(16):  # more than the kernel would send to a view that is opened now
        lines = "".join(f"line {100 * batch + number}\n" for number in range(100))
        record.apply(m.Wrote(run="r-7", rank=0, stream="stdout", text=lines, at_s=2.0))
        show(record)
    page.evaluate("const now = performance.now() + 60_000; performance.now = () => now")
    page.evaluate("document.body.append(Object.assign(document.createElement('div'), { id: 'second' }))")
    page.evaluate("window.viewAgain(document.getElementById('second')); window.trigger('change')")
    page.evaluate(FRAME)

    first, second = page.locator(".jd-run").nth(0), page.locator("#second .jd-run")
    assert first.get_by_role("timer").inner_text().startswith("1:4")
    assert second.get_by_role("timer").inner_text() == first.get_by_role("timer").inner_text()
    lines = [view.locator(":scope > .jd-box .jd-text").first.inner_text() for view in (first, second)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(("text", "page_colour", "system"), [("black", "white", "dark"), ("white", "black", "light")])
def test_html_of_a_rank_has_the_colours_of_the_page_and_not_those_of_the_system(
    show: Show, blank: Page, text: str, page_colour: str, system: Literal["light", "dark"]
) -> None:
    blank.emulate_media(color_scheme=system)
    record = a_record(1)
    html = "<table><tr><th>loss</th></tr><tr><td>0.5</td></tr></table>"
    record.apply(m.Displayed(run="r-7", rank=0, data={"text/html": html}, metadata={}, at_s=2.0))
    page = show(a_record(1))
    page.add_style_tag(
        content=f"body {{ background: {page_colour} }} .jd-run {{ color: {text}; background: {page_colour} }}"
    )
    show(record)
    expect(page.frame_locator(".jd-frame").locator("td")).to_be_visible()

    scheme = "light" if text == "black" else "dark"
    frame = page.locator(".jd-frame")
    inside = "frame => getComputedStyle(frame.contentDocument.documentElement).colorScheme"
    expect(frame).to_have_css("color-scheme", scheme)  # another one than inside would make its background opaque
    assert frame.evaluate(inside) == scheme
    assert frame.evaluate("frame => getComputedStyle(frame.contentDocument.body).color") == (
        "rgb(0, 0, 0)" if text == "black" else "rgb(255, 255, 255)"
    )
    shoot(page, f"html-{scheme}-in-{system}")


def test_a_view_whose_kernel_has_ended_says_so_and_stands_still(show: Show) -> None:
    record = a_record(2)
    page = show(record)
    page.evaluate("window.trigger('comm_live_update')")
    page.evaluate(FRAME)

    expect(page.locator(".jd-notes")).to_contain_text("The kernel has ended")
    expect(page.get_by_role("status")).to_contain_text("The kernel has ended")
    expect(page.locator(".jd-stop")).to_be_disabled()
    before = page.get_by_role("timer").inner_text()
    page.evaluate(
        "const now = performance.now() + 60_000; performance.now = () => now; window.trigger('comm_live_update')"
    )
    page.evaluate(FRAME)
    assert page.get_by_role("timer").inner_text() == before

    move(record, 0, 5)  # it was the connection only
    show(record)
    expect(page.locator(".jd-stop")).to_be_enabled()
    expect(page.locator(".jd-notes")).not_to_contain_text("The kernel has ended")


def test_the_clock_of_a_run_that_has_ended_stands_still(show: Show) -> None:
    record = a_record(1)
    page = show(record)
    record.apply(m.Returned(run="r-7", rank=0, value=None, at_s=3.0))
    record.apply(m.Ended(run="r-7", at_s=3.0))
    show(record)
    before = page.get_by_role("timer").inner_text()
    page.evaluate("const now = performance.now() + 60_000; performance.now = () => now; window.trigger('change')")
    page.evaluate(FRAME)

    assert page.get_by_role("timer").inner_text() == before
    expect(page.locator(".jd-stop")).to_be_disabled()


def test_a_view_that_is_gone_costs_nothing(show: Show) -> None:
    record = a_record(2)
    page = show(record)
    page.evaluate("window.leave()")
    before = page.get_by_role("timer").inner_text()
    move(record, 0, 5)
    show(record)

    assert page.locator("[role=progressbar]").count() == 0
    assert page.get_by_role("timer").inner_text() == before
