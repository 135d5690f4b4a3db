"""The view of a run as people see it: live in JupyterLab and Notebook 7, and static in a notebook that is opened again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.events import Failed, Failure, Measured, Progressed, Started, Wrote
from jupyter_distrib.pieces import Pieces
from jupyter_distrib.record import RunRecord
from tests import golden_run
from tests.browser.lab import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LOAD = "%load_ext jupyter_distrib"
TRAIN = """%%distributed --ranks 4
import time, jupyter_distrib
print("loading data")
for epoch in jupyter_distrib.progress(range(2), label="epoch"):
    for step in jupyter_distrib.progress(range(30), label="step"):
        time.sleep(0.06)
        jupyter_distrib.report(loss=1 / (1 + 30 * epoch + step) + rank / 50)
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
import time, jupyter_distrib
bad = "</pre></div><script>window.pwned=1</script><img src=x onerror='window.pwned=1'><svg onload='window.pwned=1'></svg>"
print(bad)
print("\x1b]8;;javascript:window.pwned=1\x1b\\link\x1b]8;;\x1b\\")
for step in jupyter_distrib.progress(range(15), label=bad):
    time.sleep(0.1)
    jupyter_distrib.report(**{bad: step * (rank + 1)})
raise ValueError(bad)
"""


def shown_row(page: Page, rank: int) -> Any:
    return page.page.locator(".jd-rank", has=page.page.locator(f".jd-no:text-is('{rank}')"))


def fraction_of(page: Page, rank: int) -> str:
    return str(shown_row(page, rank).locator("[role=progressbar]").get_attribute("aria-valuenow"))


# ---------------------------------------------------------------------------------------------------- in JupyterLab


def test_a_training_cell_is_watched_and_its_output_outlives_the_kernel(page: Page, folder: Path) -> None:
    page.write("train", [LOAD, TRAIN])
    page.open("train")
    page.run(0)
    page.begin(1)

    page.page.locator(".jd-rank").nth(3).wait_for()
    assert page.page.locator(".jd-rank").count() == 4
    before = fraction_of(page, 2)
    page.page.wait_for_function(
        "before => [...document.querySelectorAll('[role=progressbar]')].some(bar => bar.ariaValueNow !== before)",
        arg=before,
    )
    button = shown_row(page, 2).locator("button")
    button.focus()
    page.page.keyboard.press("Enter")
    shown_row(page, 2).locator(".jd-output", has_text="loading data").wait_for()
    assert button.evaluate("node => node === document.activeElement && node.ariaExpanded === 'true'")
    page.page.locator(".jd-chart path.jd-first").wait_for()
    assert page.page.locator(".jd-who", has_text="all 4").count() >= 1
    page.picture("train")

    output = page.ended(1)
    output.locator("table").wait_for()
    assert page.page.locator(".jd-run").count() == 0
    assert "[0-3] loading data" in output.inner_text()
    page.picture("train-settled")
    page.save()

    for name, trusted in (("train", True), ("stranger", False)):
        if not trusted:
            shutil.copy(folder / "train.ipynb", folder / "stranger.ipynb")
        page.open(name, kernel=False)
        output = page.page.locator(".jp-OutputArea table").first
        output.wait_for()
        assert "rank 3" in output.inner_text()
        assert "model not found" not in page.page.content()
        assert page.page.locator(".jp-OutputArea img").first.evaluate("image => image.naturalWidth") > 100
    saved = json.loads((folder / "train.ipynb").read_text())
    assert "widgets" not in saved["metadata"]
    assert [set(each["data"]) for each in saved["cells"][1]["outputs"]] == [{"text/html", "text/plain"}]


def test_stop_ends_a_cell_that_is_stuck_in_a_collective(page: Page) -> None:
    page.write("stuck", [LOAD, STUCK])
    page.open("stuck")
    page.run(0)
    page.begin(1)
    page.page.locator(".jd-line", has_text="begun").wait_for()
    page.page.locator(".jd-stop").click()

    assert "KeyboardInterrupt" in page.ended(1).inner_text()


def test_nothing_that_ranks_write_runs_live_or_settled_or_opened_again(page: Page, folder: Path) -> None:
    page.write("payloads", [LOAD, PAYLOADS])
    page.open("payloads")
    page.run(0)
    page.begin(1)
    page.page.locator(".jd-chart").wait_for()
    assert page.page.locator(".jd-run a").count() == 0
    output = page.ended(1)
    output.locator("table").wait_for()
    for kind in ("script", "svg", "[onerror]", "[onload]", "a[href^=javascript]"):
        assert output.locator(f".jp-RenderedHTML {kind}").count() == 0
    assert page.page.evaluate("window.pwned") is None
    page.save()

    page.open("payloads", kernel=False)
    page.page.locator(".jp-OutputArea table").wait_for()
    assert page.page.evaluate("window.pwned") is None


def test_the_view_takes_the_colours_of_the_dark_theme(page: Page) -> None:
    page.write("dark", [LOAD, TRAIN])
    page.open("dark")
    page.page.evaluate("document.body.dataset.seen = 'light'")
    page.page.locator("text=Settings").first.click()
    page.page.locator("li", has_text="Theme").first.click()
    page.page.locator("li", has_text="JupyterLab Dark").first.click()
    page.page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    page.run(0)
    page.begin(1)
    page.page.locator(".jd-rank").first.wait_for()

    look = page.page.locator(".jd-run").evaluate(
        "node => [getComputedStyle(node).color, getComputedStyle(node).backgroundColor]"
    )
    text, ground = (
        sum(int(float(part)) for part in colour.partition("(")[2].split(",")[:3])
        for colour in (c.rstrip(")") for c in look)
    )
    assert text > 600
    assert ground < 150
    page.picture("dark")
    page.ended(1)


def test_notebook_7_shows_the_same(page: Page) -> None:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    page.write("seven", [LOAD, TRAIN])
    page.open("seven", app="notebooks")
    page.run(0)
    page.begin(1)
    page.page.locator(".jd-rank").nth(3).wait_for()
    page.picture("notebook7")
    assert "[0-3] loading data" in page.ended(1).inner_text()
    page.errors.clear()  # Notebook 7.6.5 itself logs two


# ---------------------------------------------------------------------------------------------------- on a page of its own

MOUNT = """async ([source, held]) => {
    const view = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const listeners = [];
    window.sent = [];
    const model = { get: (key) => held[key], on: (name, call) => listeners.push(call), off: (name, call) => listeners.splice(listeners.indexOf(call), 1), send: (message) => window.sent.push(message) };
    window.bring = (pieces) => { Object.assign(held, pieces); listeners.forEach((call) => call()); };
    view.default.initialize({ model });
    window.leave = view.default.render({ model, el: document.body });
}"""
FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

Show = Callable[[RunRecord], Any]


@pytest.fixture
def show(blank: Any) -> Show:
    """Draws a record; what it is given again is an update."""
    run_widget = pytest.importorskip("jupyter_distrib.run_widget", reason="anywidget is not installed")
    pieces, clock = Pieces("local"), iter(range(1000))

    def draw(record: RunRecord) -> Any:
        changed = pieces.changed(record, float(next(clock)))
        if blank.url == "about:blank" and not blank.locator(".jd-run").count():
            blank.set_content("<!DOCTYPE html><body>")
            blank.add_style_tag(content=run_widget.RunWidget._css)
            blank.evaluate(MOUNT, [run_widget.bundle(), {**changed, "clock": {"elapsed_s": 41}}])
        else:
            blank.evaluate("pieces => window.bring(pieces)", changed)
        blank.evaluate(FRAME)
        return blank

    return draw


def a_record(ranks: int) -> RunRecord:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks, strategy="ddp")
    for rank in range(ranks):
        record.apply(Started(run="r-7", rank=rank, pid=100 + rank, device="cpu", at_s=1.0))
    return record


def move(record: RunRecord, rank: int, step: int) -> None:
    at_s = 1 + step / 10
    record.apply(Progressed(run="r-7", rank=rank, label="step", step=step, total=1000, at_s=at_s))
    record.apply(Measured(run="r-7", rank=rank, step=step, values={"loss": 1 / step}, at_s=at_s))
    record.apply(Wrote(run="r-7", rank=rank, stream="stdout", text=f"step {step}\n", at_s=at_s))


def test_many_ranks_are_a_grid_in_which_trouble_comes_first(show: Show) -> None:
    record = a_record(64)
    for step in range(1, 60):
        for rank in range(64):
            move(record, rank, max(1, step - 30) if rank == 37 else step)
    failure = Failure(type_name="builtins.KeyError", message="'lr'", frames=())
    record.apply(Failed(run="r-7", rank=12, failure=failure, at_s=8.0))
    page = show(record)

    assert page.locator(".jd-tiles .jd-rank").count() == 64
    assert [page.locator(".jd-no").nth(n).inner_text() for n in range(3)] == ["12", "37", "0"]
    assert "behind" in page.locator(".jd-rank").nth(1).inner_text()
    boxes = page.locator(".jd-rank").evaluate_all("tiles => tiles.map((tile) => tile.getBoundingClientRect().top)")
    assert len(set(boxes)) <= 10
    assert page.locator(".jd-failures").inner_text() == "rank 12: KeyError: 'lr'"


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


def test_html_from_a_rank_cannot_run_or_load_anything(show: Show) -> None:
    from jupyter_distrib.events import Displayed

    record = a_record(1)
    attack = "<script>top.pwned=1</script><img src=x onerror='top.pwned=1'><a href='javascript:top.pwned=1' id=a>x</a><b>text</b><img src='https://example.com/x.png'><form action='https://example.com'><input type=submit id=s></form>"
    svg = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9' onload='top.pwned=1'><script>top.pwned=1</script></svg>"
    for data in ({"text/html": attack}, {"image/svg+xml": svg}, {"text/plain": attack}, {"text/markdown": attack}):
        record.apply(Displayed(run="r-7", rank=0, data=data, metadata={}, at_s=2.0))
    requests: list[str] = []
    page = show(record)
    page.on("request", lambda request: requests.append(request.url))
    frame = page.frame_locator(".jd-frame")
    assert frame.locator("b").inner_text() == "text"
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

    page.evaluate("document.removeEventListener('jupyter-distrib:stop', window.take)")
    assert page.locator(".jd-stop").inner_text() == "Kill"
    page.locator(".jd-stop").click()
    assert page.evaluate("window.sent") == [{"op": "stop", "run": "r-7", "force": True}]
    assert "Stop button" in page.locator(".jd-hint").inner_text()


def test_a_view_that_is_gone_costs_nothing(show: Show) -> None:
    record = a_record(2)
    page = show(record)
    page.evaluate("window.leave()")
    before = page.locator(".jd-clock").inner_text()
    move(record, 0, 5)
    show(record)

    assert page.locator("[role=progressbar]").count() == 0
    assert page.locator(".jd-clock").inner_text() == before
