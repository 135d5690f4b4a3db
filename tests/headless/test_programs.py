from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebook import ROOT

NEEDED = ("papermill", "nbconvert", "jupyter_console", "pexpect")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: sh .ci/trackers")]
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
ENV = {**os.environ, "PYTHONPATH": PATH, "PYTHONWARNINGS": "ignore"}
TRAIN = """%%distributed --ranks 2
import jupyter_distrib
for step in jupyter_distrib.progress(range(steps), label="epoch"):
    jupyter_distrib.report(loss=1 / (1 + step))
print("hello from", rank)
steps"""


def notebook(folder: Path, *cells: str) -> Path:
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    document.cells[0].metadata["tags"] = ["parameters"]
    document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(document, folder / "in.ipynb")
    return folder / "in.ipynb"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=ENV, capture_output=True, text=True, timeout=100, check=False
    )


def outputs(path: Path) -> list[str]:
    """What can be read below each cell."""
    return [
        "".join(part.get("text", "") or part.get("data", {}).get("text/plain", "") for part in cell.get("outputs", []))
        for cell in nbformat.read(path, as_version=4).cells
    ]


def test_papermill_gives_parameters_to_a_distributed_cell_and_saves_what_it_shows(tmp_path: Path) -> None:
    notebook(tmp_path, "steps = 1", "%load_ext jupyter_distrib", TRAIN, "1")
    done = run(tmp_path, "papermill", "in.ipynb", "out.ipynb", "-p", "steps", "3", "-k", "python3", "--no-progress-bar")

    assert done.returncode == 0, done.stderr
    *_, shown, _ = outputs(tmp_path / "out.ipynb")
    assert "[1] hello from 1" in shown
    assert re.search(r"rank 1 .*epoch 3/3.* loss 0.333", shown), shown
    assert "ranks 0-1: 3" in shown
    assert "widget-view" not in (tmp_path / "out.ipynb").read_text()


def test_papermill_stops_at_a_cell_that_fails(tmp_path: Path) -> None:
    notebook(tmp_path, "steps = 1", "%load_ext jupyter_distrib", "%%distributed --ranks 2\n1 / rank", "print('on')")
    done = run(tmp_path, "papermill", "in.ipynb", "out.ipynb", "-k", "python3", "--no-progress-bar")

    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback (rank 0 of 2)" in re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)
    assert outputs(tmp_path / "out.ipynb")[-1] == ""


def test_nbconvert_executes_a_notebook_into_a_page_without_scripts_of_ours(tmp_path: Path) -> None:
    notebook(tmp_path, "steps = 2", "%load_ext jupyter_distrib", TRAIN)
    done = run(tmp_path, "nbconvert", "--execute", "--to", "html", "--output", "out.html", "in.ipynb")

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out.html").read_text("utf-8")
    assert "hello from" in page
    assert re.search(r"ranks 0-1</b></td><td><pre>2</pre>", page)
    assert "widget-view" not in page


def test_what_a_program_reads_is_json_in_an_executed_notebook(tmp_path: Path) -> None:
    notebook(tmp_path, "steps = 2", "%load_ext jupyter_distrib", TRAIN, "%distributed_status --json")
    done = run(tmp_path, "nbconvert", "--execute", "--to", "notebook", "--output", "out.ipynb", "in.ipynb")

    assert done.returncode == 0, done.stderr
    assert json.loads(outputs(tmp_path / "out.ipynb")[-1])["values"] == {"0": "2", "1": "2"}


def test_a_console_prints_lines_as_they_come_and_the_end_once(tmp_path: Path) -> None:
    import pexpect

    console = pexpect.spawn(
        sys.executable, ["-m", "jupyter_console", "--simple-prompt"], cwd=str(tmp_path), env={**ENV, "TERM": "dumb"},
        encoding="utf-8", timeout=60, dimensions=(50, 140),
    )  # fmt: skip
    try:
        console.expect(r"In \[1\]: ")
        console.sendline("%load_ext jupyter_distrib")
        console.expect(r"In \[2\]: ")
        # The simple prompt takes one line for a cell.
        cell = r"print('hello from', rank)\nrank + 1"
        console.sendline(f'get_ipython().run_cell_magic("distributed", "--ranks 2", "{cell}")')
        console.expect(r"\[0\] hello from 0")
        console.expect(r"rank 0: 1\s+rank 1: 2")
        console.expect(r"In \[3\]: ")
        console.sendline("quit")
        console.expect(pexpect.EOF)
    finally:
        console.close(force=True)
