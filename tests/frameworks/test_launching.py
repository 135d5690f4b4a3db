"""What would start ranks of its own is refused, and a framework that is not told of the ranks is still data parallel under
`--strategy ddp`. Real kernels, real ranks."""

from __future__ import annotations

import pytest

from tests.frameworks.training import ACCELERATE, LIGHTNING, cell, missing
from tests.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
needs_lightning = pytest.mark.skipif(missing("lightning") is not None, reason=str(missing("lightning")))
needs_accelerate = pytest.mark.skipif(missing("accelerate") is not None, reason=str(missing("accelerate")))
REFUSED = "() on a rank of a distributed cell: the ranks are there already, as many as --ranks or --gpus says."
SAYS_SO = 'strategy="ddp", accelerator="cpu", devices=world_size, '


@needs_lightning
@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_spawn"])
@pytest.mark.parametrize("line", ["--strategy ddp", "--strategy none"])
def test_lightning_may_not_start_processes(notebook: Notebook, strategy: str, line: str) -> None:
    notebook.cell(LIGHTNING.setup, 120)
    outcome = notebook.cell(cell(LIGHTNING, line=line).replace('strategy="ddp"', f'strategy="{strategy}"'), 120)

    assert outcome.ename == "DistributedError", outcome.text
    assert REFUSED in outcome.evalue


@needs_accelerate
def test_accelerates_debug_launcher_may_not_start_processes(notebook: Notebook) -> None:
    notebook.cell(ACCELERATE.setup, 120)
    outcome = notebook.cell(
        "%%distributed --ranks 2\nfrom accelerate import debug_launcher\ndebug_launcher(print)", 120
    )

    assert REFUSED in outcome.evalue, outcome.text


@needs_lightning
def test_a_trainer_that_was_told_nothing_is_data_parallel_with_the_strategy(notebook: Notebook) -> None:
    notebook.cell(LIGHTNING.setup, 120)
    notebook.ok(LIGHTNING.by_hand)
    outcome = notebook.cell(cell(LIGHTNING).replace(SAYS_SO, ""), 120)

    assert "Fit wrapped" in outcome.view, outcome.text
    seen = notebook.ok(
        "reference = by_hand([each['seen'] for each in got])\n"
        "[each['world'] for each in got], sorted(sum((each['seen'] for each in got), [])) == list(range(64)), "
        "all(bool(((each['weights'] - reference).abs() < 1e-6).all()) for each in got)"
    )
    assert seen.result == "([1, 1], True, True)"
