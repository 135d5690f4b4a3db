"""The views for those who read another language, use a keyboard or hear the page: in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import Open
from tests.browser.lab import TOP, Lab, Server, until

AXE = TOP / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
STEPS = """%%distributed --pool inline --ranks 2 --step-through
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
dist.barrier()"""
TRAIN = """%%distributed --ranks 2
import os, sys, time, jupyter_distrib
print('\\x1b[31mred\\x1b[0m', file=sys.stderr)
for step in jupyter_distrib.progress(range(100_000), label='123'):
    time.sleep(0.05)
    jupyter_distrib.report(**{'0.5': 1 / (1 + step)})
    if os.path.exists('ENOUGH'):
        break
1 / 0"""


def violations(lab: Lab, *roots: str) -> list[str]:
    """What axe finds below these nodes; the page must have each of them."""
    for root in roots:
        expect(lab.page.locator(root).first).to_be_visible()
    lab.page.evaluate(AXE.read_text())
    found: list[dict[str, Any]] = lab.page.evaluate(
        "roots => axe.run({ include: roots.map((root) => [root]), exclude: [['.jp-Toolbar']] }, { resultTypes: ['violations'] }).then((seen) => seen.violations)",
        list(roots),
    )
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]


def test_axe_finds_nothing_in_light_and_dark(open_notebook: Open, enough: Path) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: jlpm install in labextension/")
    lab: Lab = open_notebook(STEPS, until(TRAIN, enough))
    panel = lab.panel()
    lab.run(1)
    lab.wait_idle(1)
    lab.page.locator("#jupyter-distrib-panel .jp-AccordionPanel-title", has_text="History").click()
    lab.run(2)
    view = lab.output(2)
    expect(view.locator(".jd-chart path.jd-first")).to_be_visible()
    view.locator(".jd-no").first.click()
    view.get_by_label("Search the output").fill("red")
    expect(panel.get_by_role("list", name="Saved runs").get_by_role("listitem").first).to_be_visible()
    found = []
    for theme in ("light", "dark"):
        if theme == "dark":
            lab.dark()
        found += violations(lab, "#jupyter-distrib-panel", ".jd-run", ".jp-Distributed-statusbutton")
        lab.shoot(f"everything-{theme}")
    enough.touch()
    lab.wait_idle(2)
    lab.select(1)
    found += violations(lab, "[class^=jd-steps]")
    panel.locator(".jp-Distributed-run").first.get_by_role("button", name="Log").click()
    expect(lab.page.locator(".jp-Distributed-log .jd-line").first).to_be_visible()
    found += violations(lab, ".jp-Distributed-log")
    lab.shoot("log-dark")
    panel.get_by_role("list", name="Saved runs").get_by_role("checkbox").first.check()
    panel.get_by_role("button", name="Show", exact=True).click()
    found += violations(lab, ".jp-Distributed-compared")
    lab.shoot("run-of-history-dark")
    panel.get_by_role("button", name="Table").click()
    found += violations(lab, ".jp-Distributed-runs")
    assert found == []


SWEEP = """%%distributed --ranks 1 --sweep "lr=[0.3, 0.1]" --sweep "width=[16, 64]"
import os, time, jupyter_distrib
for step in range(100_000):
    jupyter_distrib.report(loss=lr + width / (1 + step), accuracy=step / (step + width))
    time.sleep(0.05)
    if os.path.exists("ENOUGH") or width == 16 and step > 10:
        break"""


def test_axe_finds_nothing_on_pages_sweeps_and_forms_at_any_width(open_notebook: Open, enough: Path) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: jlpm install in labextension/")
    lab: Lab = open_notebook(until(SWEEP, enough))
    found = []

    def look(name: str, root: str) -> None:
        for theme in ("light", "dark"):
            lab.dark() if theme == "dark" else lab.light()
            for width in (1280, 400):
                lab.page.set_viewport_size({"width": width, "height": 860})
                found.extend(f"{name}, {theme}, {width}: {each}" for each in violations(lab, root))
                lab.shoot(f"axe-{name}-{theme}-{width}")
        lab.page.set_viewport_size({"width": 1280, "height": 860})

    lab.run(1)
    view = lab.output(1).locator(".jd-sweep")
    expect(view.locator("tr", has_text="done").nth(1)).to_be_visible()
    expect(view.locator("tr", has_text="running").first).to_be_visible()
    lab.do("application:toggle-left-area")
    look("sweep", ".jd-sweep")
    lab.page.set_viewport_size({"width": 400, "height": 860})
    last = view.locator("tr", has_text="running").first.get_by_role("button", name="Stop")
    last.hover()  # it can be scrolled to
    box, frame = last.bounding_box(), view.bounding_box()
    assert box
    assert frame
    assert box["x"] + box["width"] <= frame["x"] + frame["width"]
    lab.page.set_viewport_size({"width": 1280, "height": 860})
    view.locator("tr", has_text="running").first.get_by_role("button", name="Open").click()
    expect(lab.page.locator(".jp-Distributed-compared .jd-chart").first).to_be_visible()
    look("run-page", ".jp-Distributed-compared")
    enough.touch()
    lab.page.get_by_role("tab", name=lab.name).click()
    lab.wait_idle(1)
    look("settled", ".jp-Distributed-picture")
    lab.do("jupyter-distrib:compare-runs")
    expect(lab.page.locator(".jp-Distributed-compared").last.locator(".jd-chart").first).to_be_visible()
    look("compared", ".jp-Distributed-compared:not(.lm-mod-hidden *)")
    panel = lab.panel()
    panel.get_by_role("button", name="Add pool").click()
    form = panel.get_by_role("form", name="Add a pool")
    form.get_by_label("Kind", exact=True).select_option("ssh")
    form.get_by_role("button", name="Save").click()
    expect(form.get_by_role("alert").first).to_have_text("name is needed: write, for example, lab")
    look("form", ".jp-Distributed-form")
    assert found == []


SETTLED = """%%distributed --ranks 2
import jupyter_distrib
for step in range(20): jupyter_distrib.report(loss=1 / (1 + step))"""


def test_a_settled_chart_is_named_and_suits_the_theme_also_when_the_notebook_is_opened_again(
    open_notebook: Open,
) -> None:
    lab: Lab = open_notebook(SETTLED)
    lab.run(1)
    lab.wait_idle(1)
    lab.save()
    for again in (False, True):
        if again:
            lab.reload()
        chart = lab.output(1).get_by_role("img", name=re.compile("loss, rank 0 fell from 1 to 0.05 in 19 steps"))
        expect(chart).to_have_css("filter", "brightness(0.8)")
        if AXE.exists():
            assert violations(lab, ".jp-Distributed-picture") == []
    lab.shoot("settled-light")
    lab.dark()
    expect(chart).to_have_css("filter", "brightness(1.2)")
    lab.shoot("settled-dark")


def test_the_output_is_used_by_keyboard_alone(open_notebook: Open, enough: Path) -> None:
    lab: Lab = open_notebook(until(TRAIN, enough))
    lab.run(1)
    view = lab.output(1)
    search = view.get_by_label("Search the output")
    search.focus()
    lab.page.keyboard.type("dd xx red a b")  # letters that are commands of a notebook
    expect(search).to_have_value("dd xx red a b")
    expect(lab.page.locator(".jp-Notebook .jp-Cell")).to_have_count(2)
    search.fill("RED")
    expect(view.locator(".jd-run > .jd-box .jd-line .jd-text")).to_have_text(["red"])
    lab.page.keyboard.press("Tab")
    expect(view.get_by_role("button", name="Errors only")).to_be_focused()
    lab.page.keyboard.type("dd")
    lab.page.keyboard.press("Space")
    expect(view.get_by_role("button", name="Errors only")).to_have_attribute("aria-pressed", "true")
    for _ in range(4):
        lab.page.keyboard.press("Tab")
    expect(view.get_by_role("button", name="Whole log")).to_be_focused()
    lab.page.keyboard.press("Enter")
    expect(lab.page.locator(".jp-Distributed-log .jd-line").first).to_contain_text("red")
    enough.touch()


@pytest.fixture
def pseudo_language(server: Server) -> Iterator[None]:
    """JupyterLab puts two marks before every text that goes through its translator."""
    settings = server.folder / "settings" / "@jupyterlab" / "translation-extension" / "plugin.jupyterlab-settings"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({"displayStringsPrefix": True, "stringsPrefix": "!!"}))
    yield
    settings.unlink()


TEXTS = """root => {
    const texts = [];
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        if (node.nodeType === Node.TEXT_NODE) texts.push(node.textContent);
        else for (const name of ["aria-label", "title", "placeholder", "alt", "aria-valuetext"]) texts.push(node.getAttribute(name) ?? "");
    }
    return texts;
}"""
DATA = re.compile(
    r"![^!]|%%distributed.*|--[\w-]+|local|inline|ray|ddp|fsdp|tp|none|auto|deepspeed|tensorflow|[\w.-]+\.ipynb( \(kernel \d+\))?|side panel content|Cell In\[\d+\](, .*)?|cpu|red|(ranks? [\d, -]+: )?[A-Z]\w+Error.*"
    r"|loss.*|kB|MB|GB|it/s|s/it|[\d.:/% ]+ ?(it/s|s/it|[kMG]?B|%)?"
)
"""What nobody translates: names, units, and what ranks and the kernel say."""


def untranslated(root: Locator) -> list[str]:
    texts = (text.strip() for text in root.evaluate(TEXTS))
    return sorted(
        {text for text in texts if re.search(r"[A-Za-z]{2}", text) and "!!" not in text and not DATA.fullmatch(text)}
    )


def test_every_text_goes_through_the_translator(
    server: Server, pseudo_language: None, open_notebook: Open, enough: Path
) -> None:
    lab: Lab = open_notebook("%%distributed --pool inline\n1 / 0", until(TRAIN, enough))
    panel = lab.panel()
    lab.run(1)
    lab.wait_idle(1)
    lab.run(2)
    view = lab.output(2).locator(".jd-run")
    expect(view).to_contain_text("!!2 ranks")
    expect(panel).to_contain_text("!!2 CPU ranks")
    view.locator(".jd-no").first.click()
    lab.page.locator("#jupyter-distrib-panel .jp-AccordionPanel-title").last.click()
    expect(panel.locator(".jp-Distributed-history")).to_contain_text("!!Show")
    expect(panel.get_by_role("list", name="Saved runs").get_by_role("listitem").first).to_contain_text("!!failed")
    lab.shoot("pseudo-language")
    found = untranslated(view) + untranslated(panel)
    enough.touch()
    lab.wait_idle(2)
    assert found == []
