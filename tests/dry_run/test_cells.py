"""60 training cells under ddp and fsdp: those that are played to their second step, and why the others are not. The
cells that need libraries are played in `tests/frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dry_run.cells import FITS, Cell, check, read

pytestmark = pytest.mark.slow

CELLS = read()


def test_there_are_sixty_and_at_most_ten_are_not_answered() -> None:
    assert sum(each.name.startswith("own: ") for each in CELLS) == 30
    assert sum(each.name.startswith("public: ") for each in CELLS) == 30
    assert sum(all(verdict == FITS for verdict, _ in each.answers.values()) for each in CELLS) >= 50


@pytest.mark.parametrize("cell", [each for each in CELLS if not each.needs], ids=lambda each: each.name)
def test_a_training_cell_is_played(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)
