"""The list of detached runs that every kernel of a user can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.system import run_list
from jupyter_distrib.system.run_list import ListedRun

RUN = ListedRun(
    run="abc-1",
    label="Cell In[3]",
    holder="train.ipynb (kernel 7)",
    notebook="train.ipynb",
    began_at_s=100.0,
    ended=False,
    server="agent-1",
    pid=os.getpid(),
    protocol=5,
)


def test_runs_are_listed_oldest_first_until_they_are_removed(tmp_path: Path) -> None:
    newer = replace(RUN, run="abd-2", began_at_s=200.0)
    run_list.write(tmp_path, newer)
    run_list.write(tmp_path, RUN)
    assert run_list.listed(tmp_path) == [RUN, newer]
    run_list.write(tmp_path, replace(RUN, ended=True))
    assert [run.ended for run in run_list.listed(tmp_path)] == [True, False]
    run_list.remove(tmp_path, newer.run)
    run_list.remove(tmp_path, newer.run)
    assert [run.run for run in run_list.listed(tmp_path)] == ["abc-1"]


def test_a_run_whose_holder_is_gone_is_forgotten(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run_list.write(tmp_path, replace(RUN, pid=process.pid))
        assert len(run_list.listed(tmp_path)) == 1
        process.kill()
    assert run_list.listed(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_another_version_has_added_is_passed_over(tmp_path: Path) -> None:
    run_list.write(tmp_path, RUN)
    [path] = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "red"}))
    (tmp_path / "half.detached").write_text("{")
    assert run_list.listed(tmp_path) == [RUN]


def test_a_folder_that_cannot_be_written_costs_the_entry_only(tmp_path: Path) -> None:
    run_list.write(tmp_path / "nowhere", RUN)
    assert run_list.listed(tmp_path / "nowhere") == []
