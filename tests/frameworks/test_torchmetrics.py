"""Metrics of torchmetrics, which add up over ranks, count each sample once. Real kernels, real ranks."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.frameworks.training import PROBLEM
from tests.notebook import Notebook

pytest.importorskip("torchmetrics")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

METRICS = f"""{PROBLEM}
import torchmetrics

def counts(loader, *metrics):
    model.eval()
    with torch.no_grad():
        for numbers, x, y in loader:
            for metric in metrics:
                metric.update((model(x) > 0).flatten().long(), (y > 0).flatten().long())
    return [int(metric.compute().sum()) for metric in metrics]
"""
TRAINED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trained, of_class = torchmetrics.SumMetric(), torchmetrics.ConfusionMatrix("binary")
for numbers, x, y in DataLoader(samples, batch_size=8):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    trained.update(len(x))
"""
EVALUATED = 'counts(DataLoader(samples, batch_size=8), of_class, torchmetrics.ConfusionMatrix("binary"))'


@pytest.fixture
def prepared(notebook: Notebook) -> Notebook:
    notebook.cell(METRICS, 120)
    return notebook


@pytest.mark.parametrize("options", ["", " --shard-eval"])
def test_samples_of_an_evaluation_and_of_a_training_are_counted_once(prepared: Notebook, options: str) -> None:
    outcome = prepared.cell(
        f"%%distributed --ranks 2 --strategy ddp{options}{TRAINED}[*{EVALUATED}, int(trained.compute())]", 120
    )

    assert "ranks 0-1: [64, 64, 64]" in outcome.text


def test_an_evaluation_without_a_training_counts_once(prepared: Notebook) -> None:
    prepared.ok("of_class = torchmetrics.ConfusionMatrix('binary')")
    outcome = prepared.cell(f"%%distributed --ranks 2 --strategy ddp\n{EVALUATED}", 120)

    assert "ranks 0-1: [64, 64]" in outcome.text


@pytest.mark.parametrize("behind", [False, True])
def test_a_loader_that_only_its_loop_has_counts_once(prepared: Notebook, behind: bool) -> None:
    update = "of_class.update((predicted > 0).flatten().long(), (y > 0).flatten().long())"
    outcome = prepared.cell(
        f"%%distributed --ranks 2 --strategy ddp{TRAINED}model.eval()\n"
        "with torch.no_grad():\n    for numbers, x, y in DataLoader(samples, batch_size=64):\n"
        f"        predicted = model(x)\n{'' if behind else '        '}{update}\nint(of_class.compute().sum())",
        120,
    )

    assert "ranks 0-1: 64" in outcome.text


def test_an_evaluation_that_the_cell_has_divided_is_added_up(prepared: Notebook) -> None:
    mine = "torch.utils.data.Subset(samples, range(rank, 64, world_size))"
    outcome = prepared.cell(f"%%distributed --ranks 2 --strategy ddp{TRAINED}{EVALUATED.replace('samples', mine)}", 120)

    assert "ranks 0-1: [64, 64]" in outcome.text


def test_without_a_strategy_it_adds_up_as_it_always_does(prepared: Notebook) -> None:
    outcome = prepared.cell(
        dedent(f"""\
            %%distributed --ranks 2
            torch.distributed.init_process_group('gloo')
            of_class = torchmetrics.ConfusionMatrix('binary')
            {EVALUATED}"""),
        120,
    )

    assert "ranks 0-1: [128, 128]" in outcome.text
