"""Dry runs of cells that train with transformers, Accelerate and Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dry_run.cells import Cell, check, read

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("cell", [each for each in read() if each.needs], ids=lambda each: each.name)
def test_a_training_cell_is_played(cell: Cell, tmp_path: Path) -> None:
    pytest.importorskip(cell.needs)
    check(cell, tmp_path)
