"""What Accelerate offers beside an `Accelerator`. Real kernels, real ranks."""

from __future__ import annotations

import pytest

from tests.frameworks.training import missing
from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(missing("accelerate") is not None, reason=str(missing("accelerate"))),
]

STATE = """
from accelerate import Accelerator, PartialState
state = PartialState()
with state.split_between_processes([0, 1, 2, 3]) as mine:
    pass
state.num_processes, state.is_main_process, mine, Accelerator().num_processes
"""


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_partial_state_finds_the_ranks_on_the_cpu_as_an_accelerator_does(notebook: Notebook, strategy: str) -> None:
    outcome = notebook.cell(f"%%distributed --ranks 2 --strategy {strategy}{STATE}", 120)

    assert outcome.result == "rank 0: (2, True, [0, 1], 2)\nrank 1: (2, False, [2, 3], 2)", outcome.text
    given = notebook.cell(f"%%distributed --ranks 2 --strategy {strategy}{STATE.replace('State()', 'State(cpu=True)')}")
    assert given.result == outcome.result
