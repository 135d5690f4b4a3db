"""Editors, help and completion know the options of `@distributed` and `run_script`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import jupyter_distrib
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.cell_options import OF_CELLS, OPTIONS
from tests import generated
from tests.notebook import Notebook


def test_the_types_are_those_of_the_options() -> None:
    assert generated.KEYWORDS.read_text("utf-8") == generated.keywords_source(), "run python -m tests.generated"


@pytest.mark.parametrize("function", [jupyter_distrib.distributed, jupyter_distrib.run_script])
def test_the_signature_has_every_option(function: object) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    everywhere = {option.name for option in OPTIONS} - {*OF_CELLS}
    own = {option.name for declared in (STRATEGIES, POOLS) for name in declared for option in declared[name]}
    assert everywhere | own <= parameters.keys()
    assert not {*OF_CELLS} & parameters.keys()
    assert parameters["max_restarts"].annotation == "int | None"
    assert parameters["gpus"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.slow
def test_a_kernel_completes_them(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("from jupyter_distrib import distributed")
        reply = book.client.complete("distributed(max_re", 18, reply=True, timeout=30)
        assert "max_restarts=" in reply["content"]["matches"]
