"""Without a browser: nbclient, IPython, a plain script; and what programs read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.notebook import ROOT, Notebook

pytestmark = pytest.mark.slow

KEYS = {
    "run", "label", "state", "place", "pool", "strategy", "ranks", "world_size", "gpus", "detached", "began_at_s", "elapsed_s",
    "values", "errors", "refusal", "metrics", "progress", "notes", "stall", "files",
}  # fmt: skip


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def status(book: Notebook) -> list[dict[str, object]]:
    return [json.loads(line) for line in book.ok("%distributed_status --json").stdout.splitlines()]


def test_each_run_is_one_line_of_json_with_the_documented_keys(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out got
            import jupyter_distrib
            jupyter_distrib.report(loss=float('nan'), lr=0.5)
            print('hello')
            {'rank': rank}""")
    )
    book.fails("%%distributed --ranks 2\nif rank == 1: raise LookupError('nothing there')")

    good, bad = status(book)[-2:]

    assert good.keys() == bad.keys() == KEYS
    documented = (ROOT / "docs" / "headless.md").read_text("utf-8")
    assert all(f"`{key}`" in documented for key in KEYS)
    assert (good["state"], good["ranks"], good["errors"]) == ("done", [0, 1], [])
    assert good["values"] == {"0": "{'rank': 0}", "1": "{'rank': 1}"}
    assert good["metrics"] == {str(rank): {"loss": "nan", "lr": 0.5} for rank in range(2)}
    files = good["files"]
    assert isinstance(files, dict)
    assert Path(files["1"]).read_text() == "hello\n"
    assert bad["state"] == "failed"
    errors = bad["errors"]
    assert isinstance(errors, list)
    (root,) = (error for error in errors if error["root"])
    assert (root["rank"], root["type"], root["message"], root["line"]) == (1, "LookupError", "nothing there", 2)
    assert re.fullmatch(r"Cell In\[\d+\]", root["file"])


def test_the_output_of_a_run_is_one_line_of_json(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2\nprint('über', rank)")

    (line,) = book.ok("%distributed_logs --json").stdout.splitlines()
    assert json.loads(line)["logs"] == {"0": "über 0\n", "1": "über 1\n"}
    (line,) = book.ok("%distributed_logs --rank 1 --json").stdout.splitlines()
    assert json.loads(line)["logs"] == {"1": "über 1\n"}


def test_a_queued_run_and_a_refused_one_are_reported(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def work(): return 5
            run = work.submit()
            run.result()""")
    )

    last = status(book)[-1]

    assert (last["label"], last["state"], last["values"], last["refusal"]) == ("work()", "done", {"0": "5"}, None)


def test_a_detached_run_is_a_line_with_the_same_keys_in_its_kernel_and_in_one_that_attaches_it(
    book: Notebook, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    book.ok(
        dedent(f"""\
            %%distributed --ranks 2 --detach --out job
            import os, time
            print('begun')
            while not os.path.exists({str(go)!r}): time.sleep(0.01)
            rank""")
    )
    book.ok("import time\nwhile 'begun' not in job.logs(1): time.sleep(0.01)")
    going_on = status(book)[-1]
    with Notebook(tmp_path) as other:
        other.ok("%load_ext jupyter_distrib")
        other.ok(f"job = get_ipython().run_line_magic('distributed_attach', {going_on['run']!r})")
        go.touch()
        other.ok("job.wait_ended(20)\njob.result()")
        book.ok("job.wait_ended(20)\njob.result()")
        (attached,), ended = status(other), status(book)[-1]
        (logs,) = other.ok("%distributed_logs --json").stdout.splitlines()

    assert going_on.keys() == attached.keys() == ended.keys() == KEYS
    assert (going_on["state"], going_on["detached"], going_on["values"]) == ("running", True, {})
    same = ("run", "label", "state", "ranks", "world_size", "detached", "values", "errors", "files")
    assert {key: attached[key] for key in same} == {key: ended[key] for key in same}
    assert (ended["state"], ended["values"]) == ("done", {"0": "0", "1": "1"})
    assert json.loads(logs) == {"run": ended["run"], "state": "done", "logs": {"0": "begun\n", "1": "begun\n"}}


def test_a_notebook_is_executed_by_nbclient_and_stops_at_a_failure(tmp_path: Path) -> None:
    cells = [
        "%load_ext jupyter_distrib",
        "%%distributed --ranks 2\nprint('hello', rank)\nrank",
        "%%distributed --ranks 2\n1 / 0",
        "1",
    ]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        NotebookClient(
            document, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()

    shown = "".join(str(output.get("data", {}).get("text/plain", "")) for output in document.cells[1].outputs)
    assert "[1] hello 1" in shown
    assert "rank 0: 0\nrank 1: 1" in shown
    assert "widget-view" not in str(document.cells[1].outputs)
    assert document.cells[3].execution_count is None


SCRIPT = """
import time
from jupyter_distrib import distributed, progress, report

@distributed(ranks=2)
def work(steps):
    for step in progress(range(steps), label="epoch"):
        report(loss=1.0 / (1 + step))
    print("finished")
    return steps

print(list(work.distributed(3)))
runs = [work.submit(number) for number in (1, 2)]
print([run.result()[0] for run in runs])
"""


@pytest.mark.parametrize(
    "command", [(), ("-m", "IPython", "--no-banner", "--colors=NoColor")], ids=["python", "ipython"]
)
def test_a_script_shows_its_progress_as_text(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *command, "script.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^(\[0-1\] finished|\[0\] finished\n\[1\] finished|\[1\] finished\n\[0\] finished)$", done.stdout, re.MULTILINE
    )
    assert "[3, 3]" in done.stdout
    assert "[1, 2]" in done.stdout
    # Not at the start of a line: the script prints at the same moment, from another thread.
    assert re.search(r"\[\d+\]  work\(2\)  done  loss 0.5$", done.stdout, re.MULTILINE), done.stdout
    assert "is not set on" not in done.stdout, "IPython's own handlers"
