"""Runs that outlive their kernel: real kernels that come one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # two kernels

CELL = """\
%%distributed --ranks 2
import jupyter_distrib
for step in range(3): jupyter_distrib.report(loss={})"""


def test_the_next_kernel_lists_and_compares_the_runs_of_the_one_before(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with Notebook(tmp_path, env=env) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(CELL.format("0.5 - step / 10"))
        book.ok(CELL.format("0.4 - step / 10"))
        book.fails("%%distributed --ranks 2\n1 / 0")
        assert "ZeroDivisionError" in book.ok("%distributed_runs").result
    with Notebook(tmp_path, env=env) as book:
        book.ok("%load_ext jupyter_distrib")
        listed = book.ok("%distributed_runs").result
        assert [line.split()[0] for line in listed.splitlines()] == ["run", "3", "2", "1"]
        both = book.ok("%distributed_runs diff 1 2")
        assert "+for step in range(3): jupyter_distrib.report(loss=0.4 - step / 10)" in both.result
        assert 'alt="loss, run ' in both.result_html
        book.ok("runs = %distributed_runs 0.4")
        assert "0.2" in book.ok("runs[0].metrics['loss'][1]").result
        assert "needs two or more runs" in book.fails("%distributed_runs diff 1").evalue


def test_a_number_means_the_run_that_it_is_said_to_mean(tmp_path: Path) -> None:
    """The runs of a notebook are numbered from 1, and those of all notebooks in the history too."""
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    for kernel in ("first", "second"):
        with Notebook(tmp_path, env=env) as book:
            book.ok("%load_ext jupyter_distrib")
            book.ok(f"%%distributed --ranks 1\nprint('{kernel}, 1')")
            book.ok(f"%%distributed --ranks 1\nprint('{kernel}, 2')")
            one = book.ok("%distributed_logs 1")
            assert one.stdout == f"--- rank 0\n{kernel}, 1\n"
            note = r"This is run \w+-1; number 1 of %distributed_runs is \w+-1\.\n"
            assert re.fullmatch("" if kernel == "first" else note, one.stderr)
            if kernel == "second":
                assert book.ok("%distributed_logs 4").stdout == "--- rank 0\nsecond, 2\n"
                book.ok("get_ipython().run_line_magic('unload_ext', 'jupyter_distrib')\n%load_ext jupyter_distrib")
                refused = book.fails("%distributed_logs 2").evalue
                told = r"run 2 is \w+-2 of another kernel: `%distributed_runs 2` shows it and its logs are in \S+\."
                assert re.fullmatch(told, refused)


def test_runs_of_functions_are_compared_by_their_source_and_arguments(tmp_path: Path) -> None:
    """A function that is defined anew has other code, whichever call runs it."""
    with Notebook(tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "state")}) as book:
        book.ok("%load_ext jupyter_distrib\nimport jupyter_distrib")
        for line, call in (("x + 1", "train.submit(0.1).result()"), ("x + 2", "train.distributed(0.2)")):
            book.ok(f"@jupyter_distrib.distributed(ranks=1)\ndef train(lr, x=1):\n    return {line}")
            book.ok(call)
        compared = book.ok("%distributed_runs diff 1 2").result
        assert "-    return x + 1\n+    return x + 2" in compared
        assert ["argument.lr", "0.1", "0.2"] in [line.split() for line in compared.splitlines()]
        assert "__function__" not in compared
        assert "run" in book.ok("%distributed_runs argument.lr=0.2").result


def test_history_0_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "jupyter_distrib.toml").write_text("history = 0\n")
    with Notebook(tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "state")}) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok("%%distributed --ranks 1\n1")
        assert "no run is saved" in book.ok("%distributed_runs").result


def test_where_nothing_can_be_kept_a_run_has_its_log_its_page_and_a_report(tmp_path: Path) -> None:
    """As in a container whose random user has no home folder."""
    env = {"XDG_STATE_HOME": "/dev/null", "JUPYTER_DISTRIB_LOG_DIR": ""}
    with Notebook(tmp_path, env=env) as book:
        book.ok("%load_ext jupyter_distrib\nimport jupyter_distrib")
        book.ok("%%distributed --ranks 1\nprint('a line')")
        book.ok("run = jupyter_distrib.runs()[-1]")
        assert "a line" in book.ok("while 'a line' not in run.logs(): pass\nprint(run.logs())").stdout
        book.ok("from jupyter_distrib.kernel.sidebar import bridge")
        assert "'ok': True" in book.ok("bridge.handle({'op': 'page', 'run': run.id})").result
        report = book.ok("%distributed_status --doctor").result
        assert "runs are not saved in the history" in report
        assert "Set XDG_STATE_HOME" in report
