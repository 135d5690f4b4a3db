"""Pools by form: added, tested, written and used in a real JupyterLab."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import Open
from tests.browser.lab import Lab, Server


@pytest.fixture
def project(server: Server) -> Iterator[Path]:
    """The settings file of the notebooks' folder, which is not there at first."""
    path = server.work / "jupyter_distrib.toml"
    yield path
    path.unlink(missing_ok=True)


def opened_form(lab: Lab) -> Locator:
    panel = lab.panel()
    panel.get_by_role("button", name="Add pool").click()
    form = panel.get_by_role("form", name="Add a pool")
    expect(form.get_by_label("Kind", exact=True)).to_be_visible()
    return form


def field(form: Locator, name: str) -> Locator:
    return form.get_by_label(name, exact=True)


def test_a_pool_is_added_tested_written_and_used(open_notebook: Open, project: Path) -> None:
    lab = open_notebook("%%distributed\nprint(world_size, 'ranks')")
    panel, form = lab.panel(), opened_form(lab)
    before = '# ours\nstrategy = "ddp"  # for all\n'
    project.write_text(before)

    field(form, "Kind").select_option("command")
    field(form, "name").fill("9")
    field(form, "hosts").fill("one host")
    field(form, "Write to").select_option("project")
    form.get_by_role("button", name="Save").click()
    alerts = form.get_by_role("alert")
    expect(alerts).to_have_count(3)
    expect(
        form.locator(".jp-Distributed-entry", has=lab.page.get_by_label("hosts", exact=True)).get_by_role("alert")
    ).to_contain_text("got 'one host'")
    expect(
        form.locator(".jp-Distributed-entry", has=lab.page.get_by_label("start", exact=True)).get_by_role("alert")
    ).to_contain_text("start is needed")
    expect(field(form, "name")).to_be_focused()
    lab.shoot("pool-form-wrong", panel)

    field(form, "name").fill("boxes")
    field(form, "hosts").fill("here")
    expect(alerts).to_have_count(1)
    field(form, "start").fill("sleep 1000 {host} {python}")
    form.get_by_role("button", name="Test the connection").click()
    expect(form.get_by_role("status")).to_have_text("Testing the connection ...")
    form.get_by_role("button", name="Cancel the test").click()
    expect(form.get_by_role("status")).to_have_count(0)

    field(form, "start").fill("env HERE={host} {python}")
    field(form, "python").fill(sys.executable)
    form.get_by_role("button", name="Test the connection").click()
    expect(form.get_by_role("status")).to_have_text(re.compile(r"^here answers, with Python \d.* and torch \d"))
    field(form, "ranks").fill("2")
    expect(form.get_by_role("status")).to_have_count(0)  # it was of other options
    lab.shoot("pool-form-light", panel)
    lab.dark()
    lab.shoot("pool-form-dark", panel)
    lab.light()
    form.get_by_role("button", name="Save").click()
    expect(panel.get_by_role("status")).to_have_text("The pool boxes is in jupyter_distrib.toml, and can be used.")
    assert project.read_text().startswith(before)

    item = panel.locator(".jp-Distributed-pool", has_text=re.compile("^boxes"))
    expect(item).to_contain_text(f"hosts here, start env HERE={{host}} {{python}}, python {sys.executable}")
    item.get_by_role("button", name="Use this").click()
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 2 --strategy ddp --pool boxes")
    lab.run(1)
    expect(lab.ended(1)).to_contain_text("2 ranks")
    lab.shoot("pool-list", panel)

    item.get_by_role("button", name="Edit").click()
    form = panel.get_by_role("form", name="Change the pool boxes")
    expect(field(form, "name")).to_be_disabled()
    expect(field(form, "start")).to_have_value("env HERE={host} {python}")
    field(form, "ranks").fill("3")
    form.get_by_role("button", name="Save").click()
    expect(panel.get_by_role("status")).to_contain_text("can be used")
    assert "ranks = 3\n" in project.read_text()


def test_what_waits_for_trust_is_shown_with_the_way_to_trust_it(open_notebook: Open, project: Path) -> None:
    project.write_text(f'[pools.theirs]\nkind = "local"\npython = {json.dumps(sys.executable)}\n')
    lab = open_notebook("1")
    item = lab.panel().locator(".jp-Distributed-pool", has_text=re.compile("^theirs"))

    expect(item).to_contain_text("Not trusted yet: jupyter_distrib.toml sets python = ")
    expect(item.get_by_role("button", name="Start")).to_have_count(0)
    lab.shoot("pool-not-trusted", lab.panel())
    item.get_by_role("button", name="Trust this file").click()
    expect(item).not_to_contain_text("Not trusted yet")
    expect(item.get_by_role("button", name="Use this")).to_be_visible()


def test_a_form_keeps_what_was_typed_when_the_kernel_does_not_answer(open_notebook: Open, project: Path) -> None:
    lab = open_notebook("import os; print(os.getpid())")
    lab.run(1)
    kernel = int(lab.ended(1).inner_text())
    form = opened_form(lab)
    field(form, "name").fill("kept")
    field(form, "Write to").select_option("project")
    os.kill(kernel, signal.SIGSTOP)
    try:
        form.get_by_role("button", name="Save").click()
        expect(form.get_by_role("alert")).to_have_text("the kernel has not answered")
        expect(field(form, "name")).to_have_value("kept")
    finally:
        os.kill(kernel, signal.SIGCONT)
    form.get_by_role("button", name="Save").click()
    expect(lab.panel().get_by_role("status")).to_contain_text("The pool kept is in jupyter_distrib.toml")
    assert project.read_text().count("[pools.kept]") == 1


def test_a_form_that_is_being_filled_in_survives_a_restart_of_the_kernel(open_notebook: Open, project: Path) -> None:
    lab = open_notebook("1")
    panel, form = lab.panel(), opened_form(lab)
    field(form, "Kind").select_option("command")
    field(form, "name").fill("kept")
    field(form, "hosts").fill("here")
    field(form, "Write to").select_option("project")
    lab.do("notebook:restart-kernel")
    lab.page.locator(".jp-Dialog .jp-mod-accept").click()
    expect(panel.get_by_role("button", name="Load it")).to_be_visible()
    expect(form).to_be_hidden()
    panel.get_by_role("button", name="Load it").click()

    expect(field(form, "name")).to_have_value("kept")
    expect(field(form, "hosts")).to_have_value("here")
    lab.shoot("pool-form-after-a-restart", panel)
    field(form, "start").fill("env HERE={host} {python}")
    form.get_by_role("button", name="Save").click()
    expect(panel.get_by_role("status")).to_contain_text("The pool kept is in jupyter_distrib.toml")
    assert project.read_text().count("[pools.kept]") == 1


def test_the_title_of_the_tab_says_how_long_a_run_takes_and_is_restored(open_notebook: Open, enough: Path) -> None:
    cell = dedent(f"""\
        %%distributed --ranks 2
        import os, time, jupyter_distrib
        for step in jupyter_distrib.progress(range(1000)):
            time.sleep(0.05)
            if os.path.exists({str(enough)!r}):
                break""")
    lab = open_notebook(cell)
    before = lab.page.evaluate("document.title")
    lab.run(1)
    lab.page.wait_for_function("() => /^\\d+:\\d\\d left · /.test(document.title)")
    lab.page.evaluate("document.title = 'saved - JupyterLab'; null")  # as JupyterLab does when it saves the layout
    lab.page.wait_for_function("() => /^\\d+:\\d\\d left · saved - JupyterLab/.test(document.title)")
    enough.touch()
    lab.wait_idle(1)
    lab.page.wait_for_function(
        "() => !document.title.includes('left')"
    )  # JupyterLab may have written it anew meanwhile
    assert "left" not in before
