"""Charts of reported numbers in a real browser: their scale, smoothing, axis, zoom and width, and many ranks."""

from __future__ import annotations

import math
import re

import pytest
from playwright.sync_api import Page, expect

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m
from tests.browser.test_run_view import FRAME, Show, a_record, shoot, show  # noqa: F401 - a fixture
from tests.browser.test_strips import DARK


def a_training(ranks: int) -> RunRecord:
    record = a_record(ranks)
    for step in range(400):
        for rank in range(ranks):
            loss = 2.5 * math.exp(-step / 90) + 0.02 + 0.05 * math.sin(step * (rank + 3)) + 0.03 * rank
            values = {"train/loss": max(0.004, loss), "lr": 0.1 / (1 + step)}
            if step % 40 == 39:
                values["val/loss"] = loss + 0.2
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values=values, at_s=1.0 + step / 8))
    return record


def paths(page: Page) -> list[str]:
    return page.locator(".jd-chart").first.locator("path").evaluate_all("all => all.map(p => p.getAttribute('d'))")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_have_a_log_scale_smoothing_time_zoom_and_full_width(show: Show, dark: bool) -> None:  # noqa: F811
    page: Page = show(a_training(2))
    if dark:
        page.add_style_tag(content=DARK)
    charts = page.locator(".jd-chart")
    expect(charts).to_have_count(2)
    loss = charts.first
    expect(loss.locator(".jd-chart-name")).to_have_text("loss")
    expect(loss.locator(".jd-chart-value")).to_contain_text(re.compile("train .*val "))
    shoot(page, f"charts-{'dark' if dark else 'light'}")

    tools = page.get_by_role("toolbar", name="Charts")
    for name, part, text in (
        ("log scale", ".jd-chart-foot", "log"),
        ("smooth", ".jd-chart-value", "train "),
        ("over time", ".jd-acrosses", "0:49"),
    ):
        before = paths(page)
        button = tools.get_by_role("button", name=name)
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(loss.locator(part)).to_contain_text(text)
        page.evaluate(FRAME)
        assert paths(page) != before or name == "over time"
    expect(tools.get_by_role("button", name="smooth 0.6")).to_be_visible()

    svg = loss.locator("svg")
    box = svg.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, middle)
    page.mouse.up()
    back = loss.get_by_role("button", name="zoom out")
    expect(back).to_be_visible()
    expect(svg).to_have_attribute("aria-label", re.compile("^loss: train/loss, rank 0 fell from "))
    back.click()
    expect(back).to_be_hidden()

    wide = loss.get_by_role("button", name="loss over the full width")
    wide.click()
    expect(wide).to_have_attribute("aria-pressed", "true")
    assert (after := svg.bounding_box()) is not None
    assert after["width"] > 1.9 * box["width"]
    shoot(page, f"charts-wide-{'dark' if dark else 'light'}")


def test_charts_fill_the_width_and_have_axes(show: Show) -> None:  # noqa: F811
    page: Page = show(a_training(2))
    section, *charts = (
        page.locator(selector) for selector in (".jd-charts", ".jd-chart >> nth=0", ".jd-chart >> nth=1")
    )
    whole, first, last = (each.bounding_box() for each in (section, *charts))
    assert whole is not None and first is not None and last is not None  # noqa: PT018
    assert first["y"] == last["y"]
    assert first["x"] - whole["x"] < 20
    assert whole["x"] + whole["width"] - last["x"] - last["width"] < 20
    for axis, count in ((".jd-ups", 3), (".jd-acrosses", 3)):
        expect(charts[0].locator(f"{axis} span")).to_have_count(count)
    expect(charts[0].locator(".jd-acrosses")).to_have_text("step 0200399")
    expect(charts[0].locator(".jd-best")).to_have_count(2)
    expect(charts[0].locator("svg")).to_have_attribute(
        "aria-label", re.compile("train/loss, rank 0 fell from .* in 399 steps")
    )


def test_one_cursor_is_over_all_charts(show: Show) -> None:  # noqa: F811
    page: Page = show(a_training(2))
    charts = page.locator(".jd-chart")
    svg = charts.first.locator("svg")
    box = svg.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(charts.last.locator(".jd-chart-foot")).to_have_text(re.compile(r"^step (199|200) · ranks 0: .* 1: "))
    expect(charts.last.locator(".jd-cross")).to_have_attribute("visibility", "visible")
    page.mouse.move(0, 0)
    expect(charts.last.locator(".jd-cross")).to_have_attribute("visibility", "hidden")


def test_a_line_that_became_nan_has_a_cross_and_says_since_when(show: Show) -> None:  # noqa: F811
    record = a_record(2)
    for step in range(60):
        for rank in range(2):
            value = math.nan if step >= 31 else 2 - step / 40
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values={"loss": value}, at_s=1.0 + step / 8))
    page: Page = show(record)
    chart = page.locator(".jd-chart")
    expect(chart.locator(".jd-marks .jd-turned")).to_have_text("×")
    expect(chart.locator(".jd-chart-foot")).to_contain_text("nan from step 31")
    expect(chart.locator(".jd-chart-value")).to_have_text("nan")
    expect(page.locator(".jd-ranks")).to_contain_text("nan from step 31")
    shoot(page, "charts-nan")


def test_of_more_than_eight_ranks_the_mean_and_a_band_are_drawn(show: Show) -> None:  # noqa: F811
    page: Page = show(a_training(16))

    loss = page.locator(".jd-chart").first
    assert loss.locator("path.jd-band").count() == 2
    assert loss.locator("path.jd-other").count() == 0
    expect(loss.locator(".jd-chart-value")).to_contain_text("train 0.")
    shoot(page, "charts-band")
