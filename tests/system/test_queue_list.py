"""The list of queued runs that every shell of a user can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_distrib.system import queue_list
from jupyter_distrib.system.queue_list import QueuedRun

RUN = QueuedRun(run="abc-2", label="f(1)", holder="kernel 7", pool="local", place=1, ranks=2, queued_at_s=100.0)


def test_what_a_kernel_has_queued_is_listed_until_it_writes_nothing(tmp_path: Path) -> None:
    queue_list.write(tmp_path, "abc", [RUN])
    assert queue_list.listed(tmp_path) == [RUN]
    queue_list.write(tmp_path, "abc", [])
    queue_list.write(tmp_path, "abc", [])
    assert (queue_list.listed(tmp_path), list(tmp_path.iterdir())) == ([], [])


def test_the_list_of_a_kernel_that_has_died_is_removed(tmp_path: Path) -> None:
    code = f"from tests.system import test_queue_list as t; from pathlib import Path; t.queue_list.write(Path({str(tmp_path)!r}), 'abc', [t.RUN])"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert len(list(tmp_path.iterdir())) == 1
    assert (queue_list.listed(tmp_path), list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("text", ["", "[]", '{"runs": 5}', "no JSON", '{"runs": [{"run": 5}]}'])
def test_a_damaged_list_is_left_out(tmp_path: Path, text: str) -> None:
    queue_list.write(tmp_path, "abc", [RUN])
    good = json.loads((tmp_path / "abc.queued").read_text())
    (tmp_path / "abd.queued").write_text(text.replace("{", '{"process": "' + good["process"] + '", ', 1))
    assert queue_list.listed(tmp_path) == [RUN]
