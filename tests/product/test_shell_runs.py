"""`jupyter distrib status`, `logs`, `stop`, `attach` and declared runs: from any shell, all runs of this user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.notebook import ROOT, Notebook
from tests.processes import wait_until

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-c", "from jupyter_distrib.kernel.notebook.command_line import main; main()")
WAITS = """\
import os, time
print('begun', flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
print('goes', flush=True)
{then}
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def shell(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def begun(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def detach(book: Notebook, go: Path, then: str = "") -> str:
    book.ok("%%distributed --ranks 2 --detach --out job\n" + WAITS.format(go=str(go), then=then))
    return book.ok("print(job.id)").stdout.strip()


def statuses() -> dict[str, dict[str, Any]]:
    lines = shell("status", "--json").stdout.splitlines()
    return {run["run"]: run for run in map(json.loads, lines)}


def test_a_detached_run_is_listed_followed_and_attached_with_the_status_of_its_end(
    book: Notebook, tmp_path: Path
) -> None:
    run = detach(book, tmp_path / "go", "raise LookupError('nothing there')")
    listed = statuses()[run]
    assert (listed["state"], listed["ranks"], listed["detached"]) == ("running", 2, True)
    assert run in shell("status").stdout
    followed = begun("logs", "-f", "--rank", "1", run)
    assert followed.stdout is not None
    assert followed.stdout.readline() == "begun\n"
    events = begun("attach", "--json", run)
    (tmp_path / "go").touch()
    assert followed.communicate(timeout=60)[0] == "goes\n"
    assert followed.returncode == 1
    told = [json.loads(line) for line in events.communicate(timeout=60)[0].splitlines()]
    assert (told[-1]["event"], told[-1]["state"], events.returncode) == ("ended", "failed", 1)
    attached = shell("attach", run)
    assert "[0-1] begun" in attached.stdout
    assert (attached.returncode, "LookupError: nothing there" in attached.stderr) == (1, True)
    wait_until(lambda: statuses()[run]["state"] == "failed")
    assert shell("logs", run).stdout == "--- rank 0\nbegun\ngoes\n--- rank 1\nbegun\ngoes\n"
    nothing = shell("logs", "--rank", "7", run)
    assert nothing.stdout == ""
    assert nothing.stderr.endswith(" has printed nothing; there is output of ranks 0-1.\n")


def on_a_terminal(*words: str) -> str:
    """Return what a command prints on a terminal."""
    ours, theirs = os.openpty()
    with open(ours, "rb", closefd=True) as screen:
        subprocess.run([*COMMAND, *words], env=environment(), stdout=theirs, stderr=theirs, timeout=60, check=False)
        os.close(theirs)
        return os.read(screen.fileno(), 1 << 16).decode()


def test_a_terminal_that_is_not_utf_8_gets_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text('print("\\u00e9 \\u65e5")\n')
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    done = shell("run", "--ranks", "2", "train.py", folder=tmp_path)
    assert "[0-1] \\xe9 \\u65e5\n" in done.stdout, done.stderr
    assert "ends here" not in done.stderr
    assert shell("logs", "--rank", "1").stdout == "\\xe9 \\u65e5\n"


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_logs_on_a_terminal_have_colours_and_no_other_codes(book: Notebook, follow: tuple[str, ...]) -> None:
    text = "\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07\\x1b]52;c;eA==\\x07\\x9b2Jend"
    book.ok(f"%%distributed --ranks 1 --detach --out job\nprint('{text}')")
    run = book.ok("job.result(); print(job.id)").stdout.strip()

    assert "\x1b[31mred\x1b[0m \\x9b2Jend\r\n" in on_a_terminal("logs", *follow, run)
    assert "\x1b]0;title\x07" in shell("logs", run).stdout


def test_a_run_of_a_notebook_that_waits_for_it_is_followed_and_stopped(book: Notebook, tmp_path: Path) -> None:
    book.start("%%distributed --ranks 2\n" + WAITS.format(go=str(tmp_path / "never"), then=""))
    wait_until(lambda: any(run["state"] == "running" for run in statuses().values()))
    (run,) = [run for run in statuses().values() if run["state"] == "running"]
    assert run["label"].startswith("Cell In[")
    assert 0 < run["elapsed_s"] < 600
    refused = shell("attach", run["run"])
    assert refused.returncode == 2
    assert f"jupyter distrib logs -f {run['run']}" in refused.stderr
    followed = begun("logs", "-f", "--rank", "0", run["run"])
    assert followed.stdout is not None
    assert followed.stdout.readline() == "begun\n"
    stopped = shell("stop")
    assert (stopped.returncode, "is stopped" in stopped.stdout) == (0, True), stopped
    assert book.finish().ename == "KeyboardInterrupt"
    assert followed.communicate(timeout=60)[0] == ""
    assert followed.returncode == 130


def test_queued_runs_are_seen_with_their_place_and_followed_until_they_end(book: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    book.ok(
        dedent(f"""\
            %distributed_pool add two --kind local --ranks 2
            import jupyter_distrib, os, time
            @jupyter_distrib.distributed(pool='two', ranks=2)
            def work(number):
                while not os.path.exists({str(go)!r}):
                    time.sleep(0.01)
                print('done', number, flush=True)
            first, second, third = [work.submit(number) for number in range(3)]""")
    )
    wait_until(lambda: statuses().get(book.ok("print(first.id)").stdout.strip(), {}).get("state") == "running")
    second, third = book.ok("print(second.id, third.id)").stdout.split()
    listed = statuses()
    assert [(listed[run]["state"], listed[run]["place"]) for run in (second, third)] == [("queued", 1), ("queued", 2)]
    assert (listed[second]["label"], listed[second]["ranks"]) == ("work(1)", 2)
    assert "queued, place 2" in shell("status", third).stdout
    for words in (("stop", second), ("attach", second)):
        refused = shell(*words)
        assert (refused.returncode, "has no ranks" in refused.stderr) == (2, True), refused
    book.ok("third.cancel()")
    assert third not in {run for run, each in statuses().items() if each["state"] == "queued"}
    followed = begun("logs", "-f", "--rank", "1", second)
    assert followed.stderr is not None
    assert "is queued, place 1" in followed.stderr.readline()
    go.touch()
    assert followed.communicate(timeout=60)[0] == "done 1\n"
    book.ok("second.wait_ended(30)")
    assert [run for run, each in statuses().items() if each["state"] in ("queued", "starting")] == []


def test_a_run_that_does_not_exist_and_wrong_words_are_refused_with_status_2(book: Notebook) -> None:
    for words, told in (
        (("attach", "999-9"), "no run 999-9 is known on this machine"),
        (("stop", "999-9"), "no run 999-9 is in progress on this machine"),
        (("logs", "--folow"), "did you mean --follow"),
        (("status", "a", "b"), "'b' is one word too many"),
        (("stats",), "usage: jupyter distrib run"),
        ((), "jupyter distrib logs [-f]"),
    ):
        outcome = shell(*words)
        assert (outcome.returncode, told in outcome.stderr) == (2, True), (words, outcome)
    assert "kill its ranks at once" in shell("stop", "--help").stdout


def declared(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.toml").write_text(text)
    (folder / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ.get('X'), os.environ['WORLD_SIZE'])"
    )
    (folder / "calc.py").write_text(
        dedent("""\
            import os
            def add(a, b=1):
                return a + b, os.environ['WORLD_SIZE']
        """)
    )
    return shell("run", *words, str(folder / "run.toml"))


def test_a_declared_script_has_its_arguments_environment_and_options(tmp_path: Path) -> None:
    text = 'script = "train.py"\narguments = ["--lr", "1e-3"]\noptions = { ranks = 2 }\nenvironment = { X = "a b" }\n'
    assert "[0-1] ['--lr', '1e-3'] a b 2" in declared(tmp_path, text).stdout
    assert "[0] ['--lr', '1e-3'] a b 1" in declared(tmp_path, text, "--ranks", "1").stdout


def test_a_declared_function_cell_and_module_run_in_the_folder_of_the_file(tmp_path: Path) -> None:
    function = 'function = "calc:add"\narguments = [4]\nkeywords = { b = 5 }\n[options]\nranks = 2\n'
    assert declared(tmp_path, function).stdout == "ranks 0-1: (9, '2')\n"
    cell = 'cell = """\nimport calc\ncalc.add(rank)\n"""\n[options]\nranks = 2\n'
    assert "rank 1: (2, '2')" in declared(tmp_path, cell).stdout
    assert "['7'] None 1" in declared(tmp_path, 'module = "train"\narguments = [7]\n[options]\nranks = 1\n').stdout


def test_variables_of_a_declared_cell_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    text = 'cell = "import os\\nlen(os.environ[\'KEY\'])"\noptions = { ranks = 2 }\nenvironment = { KEY = "hunter2-4711" }\n'
    outcome = declared(tmp_path, text)
    assert "ranks 0-1: 12" in outcome.stdout, outcome
    files = [path for name in ("ipython", "state") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert any(b"os.environ" in path.read_bytes() for path in files), "the history has its code"
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


def test_secrets_among_the_arguments_of_a_script_are_not_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = (
        "--api-key",
        "hunter2a",
        "--db-password=hunter2b",
        "token=hunter2c",
        "-x",
        "http://u:hunter2d@a/b",
        "--lr",
        "1",
    )
    script = tmp_path / "t\33[31m\n.py"
    script.write_text("import sys\nprint(len(sys.argv), 'ter2b' in str(sys.argv))")
    assert "[0] 9 True" in shell("run", "--ranks", "1", script.name, *words, folder=tmp_path).stdout
    (run,) = [each for each in statuses().values() if each["label"].startswith("t [31m")]
    assert run["label"] == "t [31m .py --api-key ... --db-password=... token=... -x htt…"
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


def test_a_declared_notebook_runs_to_its_first_error_and_gives_its_cells_the_options(tmp_path: Path) -> None:
    cells = [
        "x = 5",
        "%%distributed --out got\nimport os\nx + rank, os.environ['X']",
        "print(got)",
        "1 / 0",
        "print('no')",
    ]
    content = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    notebook = {"cells": content, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    outcome = declared(tmp_path, 'notebook = "n.ipynb"\noptions = { ranks = 3 }\nenvironment = { X = "y" }\n')
    assert "rank 2: (7, 'y')" in outcome.stdout
    assert (outcome.returncode, "no\n" in outcome.stdout) == (1, False)
    assert "ZeroDivisionError" in outcome.stderr


def test_a_declared_run_may_be_detached_and_is_there_for_attach(tmp_path: Path) -> None:
    outcome = declared(tmp_path, 'script = "train.py"\noptions = { ranks = 1, detach = true }\n')
    found = re.search(r"jupyter distrib attach (\S+)`", outcome.stdout)
    assert found is not None, outcome
    attached = shell("attach", found[1])
    assert (attached.returncode, "[0] [] None 1" in attached.stdout) == (0, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('script = "train.py"\notpions = { ranks = 2 }\n', "line 2: unknown key otpions: did you mean options?"),
        ('script = "train.py"\n[options]\nrnks = 2\n', "line 3: unknown option rnks: did you mean ranks?"),
        ('script = "train.py"\ncell = "1"\n', "it has script and cell"),
        ("restarts = 1\n", "it has none of them"),
        ('script = 5\n', "script must be a string; got 5"),
        ('cell = "1"\narguments = [1]\n', "line 2: arguments are for a script, module or function"),
        ('script = "train.py"\nrestarts = -1\n', "max_restarts must be a whole number"),
        ('script = "train.py"\nrestarts = true\n', "restarts must be a whole number; got True"),
        ('script = "train.py"\npool = "none"\n', "none"),
        ('script = "train.py"\ntracking = ["mlfow"]\n', "mlfow"),
        ('script = "train.py"\npool = "local"\n[options]\npool = "local"\n', "pool is the same as pool"),
        ('function = "calc.add"\n', 'must be "MODULE:NAME"'),
        ('function = "calk:add"\n', "there is no module calk"),
        ('function = "calc:sub"\n', "has no sub"),
        ('notebook = "train.py"\n', "not a notebook"),
        ('script = "no.py"\n', "no such file"),
        ("script = \n", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_declared_run_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    outcome = declared(tmp_path, text)
    assert (outcome.returncode, told in outcome.stderr) == (2, True), outcome
