"""Who writes the outputs that pages have missed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_distrib.kernel.sidebar import cell_outputs
from jupyter_distrib.kernel.sidebar.cell_outputs import Cells


def test_of_several_pages_the_first_that_asks_repairs_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Cells(SimpleNamespace(), print)

    assert cells.grant_repair(("r-1",), "one")
    assert not cells.grant_repair(("r-1",), "other")
    assert cells.grant_repair(("r-1",), "one")
    assert cells.grant_repair(("r-2", "r-3"), "other")

    monkeypatch.setattr(cell_outputs, "REPAIR_S", 0.0)  # the first page may be closed by now
    assert cells.grant_repair(("r-1",), "other")
