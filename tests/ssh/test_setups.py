"""Set-ups of the notebook on ranks of two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.product import setup_cases
from tests.ssh.bed import Bed
from tests.ssh.conftest import name_it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_rank_runs_a_set_up_once(bed: Bed, tmp_path: Path) -> None:
    name_it(bed, tmp_path, ranks=2)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        setup_cases.check(book, ranks=2)
