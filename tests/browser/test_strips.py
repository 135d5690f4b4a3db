"""Strips over time in a real browser: the last minute of each rank, the shares of its time, how far it was behind."""

from __future__ import annotations

import math
import re

import pytest
from playwright.sync_api import Page, expect

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import html
from jupyter_distrib.wire import messages as m
from tests.browser.test_run_view import FRAME, Show, a_record, shoot, show  # noqa: F401 - a fixture

DARK = (
    ":root { --jp-layout-color0: #111; --jp-layout-color1: #1c1c1c; --jp-content-font-color1: #ddd; --jp-content-font-color2: #aaa;"
    " --jp-border-color2: #444; --jp-border-color1: #555 } body { background: #111 }"
)


def sampled(record: RunRecord, second: int) -> None:
    """Add a second in which rank 1 falls back from the 20th to the 40th."""
    for rank in record.ranks:
        step = 10 * second - (6 * min(20, max(0, second - 20)) if rank == 1 else 0)
        at_s = 1.0 + second
        record.apply(m.Progressed(run="r-7", rank=rank, label="step", step=step, total=1000, at_s=at_s))
        busy_s = 0.02 * (1 + (rank == 1))
        seconds = {
            "data": 0.1,
            "forward": busy_s,
            "backward": 0.3,
            "collective": 0.5 - busy_s,
            "optimizer": 0.05,
            "other": 0.1,
        }
        record.apply(
            m.Sampled(
                run="r-7",
                rank=rank,
                rss_bytes=300_000_000 + 4_000_000 * second,
                cpu_percent=60 + 40 * math.sin(second / 6 + rank),
                gpu_memory_bytes=None,
                gpu_memory_total_bytes=None,
                gpu_percent=None,
                times=m.PhaseTimes(steps=step + 1, seconds={name: each * second for name, each in seconds.items()}),
                at_s=at_s,
            )
        )


def a_course(ranks: int) -> RunRecord:
    record = a_record(ranks)
    for second in range(90):
        sampled(record, second)
    return record


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_minute_the_shares_and_the_course_of_each_rank_are_seen(show: Show, ranks: int, dark: bool) -> None:  # noqa: F811
    page: Page = show(a_course(ranks))
    if dark:
        page.add_style_tag(content=DARK)
    page.evaluate(FRAME)

    strips = page.locator(".jd-strip:not([data-empty])")
    expect(strips).to_have_count(ranks)
    expect(strips.first).to_have_attribute("aria-label", re.compile("The last 60 s, how busy .* now memory"))
    bars = page.locator(".jd-share-bar")
    expect(bars).to_have_count(min(ranks, 16))
    expect(bars.first).to_have_attribute("aria-label", re.compile("Time of rank 0: data"))
    course = page.locator(".jd-course svg")
    expect(course).to_have_attribute("aria-label", "Steps behind the leading rank over 1:29: rank 1 up to 64-127")
    expect(page.get_by_role("region", name="Ranks over time")).to_contain_text("64-127")
    box = course.bounding_box()
    assert box is not None
    assert box["height"] == ranks * (5 if ranks > 16 else 14)
    page.set_viewport_size({"width": 1100, "height": 1000 if ranks < 64 else 1900})
    shoot(page, f"strips-{ranks}-{'dark' if dark else 'light'}")


def test_a_run_in_which_nobody_is_behind_has_no_course_and_one_without_samples_no_strip(show: Show) -> None:  # noqa: F811
    record = a_record(2)
    page = show(record)

    expect(page.locator(".jd-strip:not([data-empty])")).to_have_count(0)
    expect(page.locator(".jd-shares")).to_be_hidden()
    expect(page.locator(".jd-timeline")).to_be_hidden()


def test_the_saved_notebook_has_the_course_as_a_picture(blank: Page) -> None:
    record = a_course(8)
    for rank in record.ranks:
        record.apply(m.Returned(run="r-7", rank=rank, value=None, began_at_s=1.0, at_s=91.0))
    record.apply(m.Ended(run="r-7", at_s=91.0))
    blank.set_content(html.as_html(record, 90.0))

    picture = blank.get_by_role("img", name="Steps behind the leading rank over")
    expect(picture).to_have_attribute("alt", re.compile("rank 1 up to 64-127"))
    assert picture.evaluate("image => image.naturalHeight") > 8 * 14 + 22  # the bars of the shares stand above it
    shoot(blank, "course-settled")
