"""The view of a run as a kernel gives it to its front end: live while there is something to see, and static at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pexpect
import pytest

from tests.notebook import ROOT, Notebook, ask

CELL = "f3a9"
WIDGET = "application/vnd.jupyter.widget-view+json"
STATIC = {"text/plain", "text/html"}
PNG = "image/png"
"""The kind of the chart, which is an output of its own."""
TRAIN = """%%distributed --ranks 2
import time, jupyter_distrib
for step in jupyter_distrib.progress(range(8), label="step"):
    time.sleep(0.1)
    jupyter_distrib.report(loss=1 / (step + 1))
    print("step", step, flush=True)
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


def test_a_run_is_watched_in_a_widget_and_leaves_static_output(book: Notebook) -> None:
    outcome = book.cell(TRAIN, cell_id=CELL)

    assert outcome.kinds - {PNG} == {WIDGET, *STATIC}
    assert outcome.live["rank_1"]["progress"][0]["total"] == 8  # type: ignore[index]
    assert outcome.live["lines_0"]["entries"][0]["text"] == "step 0"  # type: ignore[index]
    assert "[0-1] step 7" in outcome.view
    assert "step 8/8" in outcome.view
    assert outcome.open_widgets == set()


STUBBORN = """%%distributed --ranks 2
import time
print("begun", flush=True)
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        if rank == 0:
            raise
"""


@pytest.mark.slow
def test_the_widget_and_the_overview_tell_how_far_a_stop_has_come(book: Notebook) -> None:
    book.start(STUBBORN, cell_id=CELL)
    book.until("begun")
    told = [ask(book, op="overview")["overview"]]
    run = told[0]["runs"][0]["run"]
    ask(book, op="stop", run=run)
    outcome = book.finish()

    heads = [update["head"]["stopping"] for update in outcome.updates if "head" in update]  # type: ignore[index]
    assert list(dict.fromkeys(heads)) == ["", "asked", "killed"]
    told += [news["overview"] for news in outcome.news if news["kind"] == "overview"]
    told.append(ask(book, op="overview")["overview"])
    stages = [each["stopping"] for overview in told for each in overview["runs"] if each["run"] == run]
    assert list(dict.fromkeys(stages)) == ["", "asked", "killed"]


@pytest.mark.slow
def test_no_run_leaves_a_widget_behind(book: Notebook) -> None:
    count = dedent("""\
        from ipywidgets.widgets.widget import _instances as _i
        import comm
        print(len(_i), len(comm.get_comm_manager().comms))""")
    book.cell(TRAIN, cell_id=CELL)
    before = book.cell(count).stdout
    for _ in range(2):
        book.cell(TRAIN, cell_id=CELL)

    assert book.cell(count).stdout == before


def test_a_cell_that_ends_at_once_has_no_widget(book: Notebook) -> None:
    outcome = book.cell("%%distributed --ranks 2\nprint('quick')", cell_id=CELL)

    assert outcome.kinds - {PNG} == STATIC
    assert not outcome.updates
    assert "[0-1] quick" in outcome.view


@pytest.mark.slow
def test_a_cell_that_shows_nothing_loads_no_widget_library(notebook: Notebook) -> None:
    notebook.ok("%%distributed --ranks 2\npass")
    outcome = notebook.cell("%%distributed --ranks 2\nrank", cell_id=CELL)

    assert outcome.kinds == set()
    loaded = notebook.ok("import sys; print([name for name in ('anywidget', 'ipywidgets') if name in sys.modules])")
    assert loaded.stdout == "[]\n"


@pytest.mark.slow
def test_a_client_that_names_no_cell_is_given_html_and_text(book: Notebook) -> None:
    outcome = book.cell(TRAIN)

    assert outcome.kinds - {PNG} == STATIC
    assert not outcome.updates
    assert "step 8/8" in outcome.view


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "cell_id", "kinds"), [("html", CELL, STATIC), ("widget", "", {WIDGET, *STATIC})])
def test_the_environment_chooses_the_view(book: Notebook, choice: str, cell_id: str, kinds: set[str]) -> None:
    book.ok(f"%env JUPYTER_DISTRIB_VIEW={choice}")
    outcome = book.cell(TRAIN, cell_id=cell_id)
    book.ok("import os; del os.environ['JUPYTER_DISTRIB_VIEW']")

    assert outcome.kinds - {PNG} == kinds


@pytest.mark.slow
def test_without_anywidget_there_is_html(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import sys
            _kept = {name: sys.modules.pop(name, None) for name in ('anywidget', 'jupyter_distrib.kernel.notebook.widget_model')}
            sys.modules['anywidget'] = None""")
    )
    outcome = book.cell(TRAIN, cell_id=CELL)
    book.ok(
        "del sys.modules['anywidget']\nsys.modules.update({name: module for name, module in _kept.items() if module})"
    )

    assert outcome.status == "ok"
    assert outcome.kinds - {PNG} == STATIC
    assert "step 8/8" in outcome.view


def test_a_front_end_without_widgets_is_shown_html_that_says_that_the_run_goes_on(book: Notebook) -> None:
    outcome = book.cell(TRAIN.replace("--ranks 2", "--ranks 2 --detach --out run"), cell_id=CELL)
    (html,) = outcome.displays_html.values()
    book.ok("run.result()")

    assert "2 ranks" in html
    assert "The run goes on" in html


@pytest.mark.slow
def test_a_widget_library_that_breaks_does_not_end_the_run(book: Notebook) -> None:
    book.ok(
        "import jupyter_distrib.kernel.notebook.widget_model as _r\n_push, _r.RunWidget.push = _r.RunWidget.push, lambda *_: 1 / 0"
    )
    outcome = book.cell(TRAIN, cell_id=CELL)
    book.ok("_r.RunWidget.push = _push")

    assert outcome.status == "ok"
    assert "step 8/8" in outcome.view


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "failed", "lost"])
def test_a_run_that_ends_badly_settles_too(book: Notebook, how: str) -> None:
    end = {
        "interrupted": "time.sleep(600)",
        "failed": "raise KeyError('lr')",
        "lost": "import os; os.kill(os.getpid(), 9)",
    }[how]
    book.start(f"%%distributed --ranks 2\nimport time\nprint('begun', flush=True)\ntime.sleep(0.6)\n{end}", CELL)
    book.until("begun")
    if how == "interrupted":
        book.until("lines_0")
        book.interrupt()
    outcome = book.finish()

    assert outcome.status == "error"
    assert outcome.kinds >= STATIC
    assert "begun" in outcome.view
    assert how in outcome.view
    assert outcome.open_widgets == set()


@pytest.mark.slow
def test_a_silent_run_that_was_shown_does_not_stay_running(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2
            import time
            time.sleep(1.6)"""),
        cell_id=CELL,
    )

    assert outcome.kinds - {PNG} == {WIDGET, *STATIC}
    assert "running" not in outcome.view
    assert "2 ranks · local · cpu" in outcome.view


@pytest.mark.slow
def test_a_detached_run_has_its_view_at_once_and_settles_under_its_own_cell(book: Notebook) -> None:
    detached = TRAIN.replace("--ranks 2", "--ranks 2 --detach --out run")
    outcome = book.cell(detached, cell_id=CELL)
    assert WIDGET in outcome.kinds
    (widget,) = outcome.open_widgets
    (display,) = outcome.displays

    book.ok("run.result()")
    settled = book.settled(display, widget)
    assert "[0-1] step 7" in settled["text/plain"]
    assert WIDGET not in settled


def test_stop_from_the_widget_reaches_the_run(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2 --detach --out run
            import time
            time.sleep(600)"""),
        cell_id=CELL,
    )
    (widget,) = outcome.open_widgets
    asked = {"method": "custom", "content": {"op": "stop", "force": False}}
    book.client.shell_channel.send(book.client.session.msg("comm_msg", {"comm_id": widget, "data": asked}))

    assert book.fails("run.result(timeout_s=20)").ename == "KeyboardInterrupt"


@pytest.mark.slow
def test_messages_to_the_browser_are_few_whatever_ranks_print(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2
            import time
            end = time.time() + 2
            while time.time() < end: print('x' * 80)"""),
        cell_id=CELL,
    )

    assert 3 <= len(outcome.updates) <= 30
    assert outcome.size_bytes < 3_000_000


def test_the_output_of_a_saved_notebook_says_what_the_view_said(book: Notebook, tmp_path: Path) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2
            import jupyter_distrib
            for i in range(3): jupyter_distrib.report(loss=i)
            print('<b>end</b>')""")
    )
    html = next(iter(outcome.displays_html.values()))

    assert outcome.kinds == {*STATIC, PNG}
    assert "loss, rank 0 rose from 0 to 2 in 2 steps, best 0 at step 0" in outcome.displays.values()
    assert "&lt;b&gt;end&lt;/b&gt;" in html
    assert "<img" not in html
    assert "<script" not in html
    assert "<style" not in html


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_pure_functions_of_the_view_under_node() -> None:
    folder = Path(__file__).parent.parent / "views" / "static"
    done = subprocess.run(["node", "--test", str(folder)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_a_console_has_lines_as_they_come_and_the_end_as_a_display_of_its_own(book: Notebook) -> None:
    book.start(TRAIN, keyboard=True)
    outcome = book.until("[0-1] step 3")
    assert not outcome.displays
    outcome = book.finish()

    assert outcome.stdout.splitlines() == [f"[0-1] step {step}" for step in range(8)]
    assert len(outcome.displays) == 2
    assert PNG in outcome.kinds
    assert "step 8/8" in outcome.view
    assert "[0-1] step 7" not in outcome.view
    assert outcome.kinds - {PNG} == STATIC


def test_a_front_end_that_may_not_run_the_widget_has_html(book: Notebook) -> None:
    outcome = book.cell(TRAIN, cell_id="vscode-notebook-cell:/home/me/a.ipynb#W0sZmlsZQ%3D%3D")

    assert outcome.kinds - {PNG} == STATIC
    assert outcome.open_widgets == set()
    assert "[0-1] step 7" in outcome.view


@pytest.mark.slow
def test_colab_which_names_no_cell_has_html_that_is_drawn_anew(book: Notebook) -> None:
    book.ok("%env COLAB_RELEASE_TAG=release-colab-external")
    book.start(TRAIN, keyboard=True)
    live = book.until("[0-1] step 3")
    displays = list(live.displays)
    outcome = book.finish()
    book.ok("import os; del os.environ['COLAB_RELEASE_TAG']")

    assert len(displays) == 1
    assert list(outcome.displays)[:1] == displays
    assert outcome.kinds - {PNG} == STATIC
    assert outcome.stdout == ""


STATUS = "import jupyter_distrib.kernel.notebook.live_view as view; view.STATUS_EVERY_S = 0.2"
SLOW = """\
import time
print('begun', rank, flush=True)
time.sleep(1.5)
print('done', rank)
rank + 40"""


@pytest.mark.slow
def test_a_terminal_has_lines_of_status_and_the_table_of_ranks_at_the_end(tmp_path: Path) -> None:
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "--no-confirm-exit"],
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "TERM": "dumb"},
        encoding="utf-8",
        timeout=60,
    )
    try:
        for line in ("%load_ext jupyter_distrib", STATUS):
            terminal.expect(r"In \[\d+\]: ")
            terminal.sendline(line)
        terminal.expect(r"In \[\d+\]: ")
        terminal.sendline(f"get_ipython().run_cell_magic('distributed', '--ranks 2', {SLOW!r})")
        terminal.expect(r"\[0\] begun 0")
        terminal.expect(r"2 ranks · [^\n]*rank 0  running")
        terminal.expect(r"\[1\] done 1")
        terminal.expect(r"\n2 ranks · ")
        terminal.expect(r"Out\[\d+\]:")
        assert terminal.before is None or "[1] done 1" not in terminal.before
        terminal.sendline("exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
