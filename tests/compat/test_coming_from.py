"""The tables of docs/coming-from.md: their import lines run as they stand, and each row says whether it is tested."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.notebook import ROOT

ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs" / "coming-from.md").read_text("utf-8").splitlines()
    if line.startswith("| ")
]
HEADS = ("your line", "theirs")
IMPORT = re.compile(r"`((?:from [\w.]+ )?import [\w, .]+?)(?:, \.\.\.)?`")


def test_every_row_says_whether_it_is_tested() -> None:
    rows = [row for row in ROWS if len(row) == 4 and row[0] not in HEADS]

    assert len(rows) > 20
    assert [row for row in rows if not re.match(r"yes|with |not here: |not there$", row[3])] == []
    assert [row[0] for row in ROWS if len(row) not in (2, 3, 4)] == []


@pytest.mark.slow
def test_the_import_lines_of_all_platforms_run_as_they_stand() -> None:
    lines = [
        line for row in ROWS if row[0] not in HEADS and row[-1].startswith("yes") for line in IMPORT.findall(row[0])
    ]
    code = "from jupyter_distrib.interfaces import stand_ins\nstand_ins.enable(['databricks', 'spark', 'horovod'])\n"
    done = subprocess.run([sys.executable, "-c", code + "\n".join(lines)], capture_output=True, text=True, check=False)

    assert len(lines) >= 8, lines
    assert done.returncode == 0, done.stderr
