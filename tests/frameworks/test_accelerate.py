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


KEPT = """
from accelerate import Accelerator
a, m = Accelerator(), torch.nn.Linear(4, 1)
o = torch.optim.SGD(m.parameters(), lr=0.1)
m, o, l = a.prepare(m, o, torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
"""
STEPS = """
for x in l:
    a.backward(m(x).pow(2).mean())
    o.step()
    o.zero_grad()
"""


def test_what_was_prepared_is_not_said_to_train_alone_in_the_cell_after_a_failure(notebook: Notebook) -> None:
    notebook.ok("import torch")
    assert notebook.cell(f"%%distributed --ranks 2 --keep a,m,o,l{KEPT}{STEPS}", 120).status == "ok"
    notebook.fails("%%distributed --ranks 2\n1 / (1 - rank)")
    outcome = notebook.ok(f"%%distributed --ranks 2{STEPS}m.module.weight.tolist()")

    assert outcome.result.startswith("ranks 0-1: "), "the gradients were averaged"
    assert "by itself" not in outcome.view
