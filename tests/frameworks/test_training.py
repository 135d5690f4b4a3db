"""Each framework trains on two ranks, unchanged: they share the samples and end with the weights of one process that
had them all. Then again in the same processes, after an error, and after a stop. Real kernels, real ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frameworks.training import FAILS, HANGS, PROBLEM, SENTENCES, TRAININGS, Training, cell, missing
from tests.notebook import Notebook, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
STRATEGIES = ("--strategy ddp", "--strategy none")


def parameter(name: str) -> Any:
    why = missing(TRAININGS[name].needs)
    return pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))


@pytest.fixture(scope="module", params=[parameter(name) for name in TRAININGS])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """A notebook that has run the framework's first cell, and can train by hand in one process."""
    training = TRAININGS[request.param]
    with Notebook(tmp_path_factory.mktemp(request.param)) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(training.setup)
        book.ok(training.by_hand)
        yield Prepared(book, training)


class Prepared:
    """A kernel with a training in it."""

    def __init__(self, book: Notebook, training: Training) -> None:
        self.book, self.training = book, training

    def trains(self, line: str) -> Outcome:
        """Run the distributed cell and check what came of it."""
        outcome = self.book.cell(cell(self.training, line=line), 120)
        assert outcome.status == "ok", outcome.text
        check = self.book.ok(
            "given = [each['seen'] for each in got]\nboth = sorted(sum(given, []))\nreference = by_hand(given)\n"
            "([each['world'] for each in got], [len(each) for each in given],\n"
            f" both == sorted(list(range(len(both) // {self.training.epochs})) * {self.training.epochs}),\n"
            " bool((got[0]['weights'] == got[1]['weights']).all()),\n"
            " float((got[0]['weights'] - reference).abs().max() / reference.abs().max()) < 1e-5,\n"
            " float((weights_of(model) - reference).abs().max()) > 1e-3)"
        )
        each = 32 if self.training.epochs == 1 else 24
        assert check.result == f"([2, 2], [{each}, {each}], True, True, True, True)", check.result + outcome.text
        return outcome


def pids(outcome: Outcome) -> list[str]:
    return sorted(set(re.findall(r"pid (\d+)", outcome.view)))


@pytest.mark.parametrize("line", STRATEGIES)
def test_ranks_share_the_samples_and_end_with_the_weights_of_one_process(prepared: Prepared, line: str) -> None:
    first = prepared.trains(line)
    again = prepared.trains(line)

    assert pids(again) == pids(first)
    assert len(pids(first)) == 2


@pytest.mark.parametrize("line", STRATEGIES)
def test_it_trains_again_in_the_same_processes_after_a_rank_has_failed(prepared: Prepared, line: str) -> None:
    failed = prepared.book.cell(cell(prepared.training, FAILS, line=line), 120)

    assert failed.ename == "LookupError", failed.text
    assert "Traceback (rank 1 of 2)" in failed.traceback
    assert pids(prepared.trains(line)) == pids(failed)


@pytest.mark.parametrize("line", STRATEGIES)
def test_it_trains_again_in_the_same_processes_after_a_stop(prepared: Prepared, line: str) -> None:
    for _ in range(2):
        prepared.book.start(cell(prepared.training, HANGS, line=line))
        prepared.book.until("ready 1", 120)
        prepared.book.interrupt()
        stopped = prepared.book.finish()

        assert stopped.ename == "KeyboardInterrupt", stopped.text
        assert "was replaced" not in stopped.traceback
        assert "in each_step: time.sleep(100)" in stopped.traceback
    assert pids(prepared.trains(line)) == pids(stopped)


def test_it_goes_from_one_strategy_to_the_other_and_back(prepared: Prepared) -> None:
    first, *others = [prepared.trains(line) for line in (*STRATEGIES, *STRATEGIES)]

    assert all(pids(other) == pids(first) for other in others)


SCHEDULED = """
from accelerate import Accelerator
accelerator = Accelerator()
loader = DataLoader(samples, batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=len(loader))
wrapped, optimizer, mine, schedule = accelerator.prepare(model, optimizer, loader, schedule)
rates = []
for numbers, x, y in mine:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(wrapped(x), y))
    optimizer.step()
    schedule.step()
    rates.append(schedule.get_last_lr()[0])
"""


@pytest.mark.skipif(missing("accelerate") is not None, reason=str(missing("accelerate")))
def test_a_schedule_of_accelerate_ends_with_the_training(notebook: Notebook) -> None:
    """Accelerate counts a step of a schedule once for each rank, so its length is that of the whole loader."""
    notebook.ok(PROBLEM)
    for line in STRATEGIES:
        rates = notebook.cell(f"%%distributed --ranks 2 {line}{SCHEDULED}[round(rate, 3) for rate in rates]", 120)
        assert rates.result == "ranks 0-1: [0.875, 0.75, 0.625, 0.5]", rates.text

    line = "wrapped, optimizer, mine, schedule = accelerator.prepare(model, optimizer, loader, schedule)"
    own = SCHEDULED.replace(line, "wrapped, mine = model, loader")
    said = notebook.cell(f"%%distributed --ranks 2 {STRATEGIES[0]}{own}", 120).view
    assert "called on line 6 beside an Accelerator, was that of the whole loader" in said

    late = SCHEDULED.replace("accelerator = Accelerator()\n", "").replace(
        "wrapped,", "accelerator = Accelerator()\nwrapped,"
    )
    said = notebook.cell(f"%%distributed --ranks 2 {STRATEGIES[0]}{late}", 120).view
    assert "called on line 5 before the Accelerator existed, counted only this rank's batches" in said
    assert "len()" not in notebook.cell(f"%%distributed --ranks 2 {STRATEGIES[1]}{late}", 120).view


@pytest.mark.skipif(missing("transformers") is not None, reason=str(missing("transformers")))
def test_save_pretrained_of_shards_is_refused_and_of_the_whole_model_is_not(notebook: Notebook) -> None:
    notebook.cell(SENTENCES, 120)
    optimizer = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    cell = f"%%distributed --ranks 2 --strategy fsdp --out got\n{optimizer}\n"
    refused = notebook.cell(f"{cell}model.save_pretrained('here')", 120)

    assert refused.evalue.startswith("save_pretrained() would write this rank's shards only"), refused.text
    notebook.ok(f"{cell}model")
    saved = "got[0].save_pretrained('here')\nother = GPT2LMHeadModel.from_pretrained('here')"
    assert notebook.ok(f"{saved}\ntorch.equal(weights_of(other), weights_of(model))").result == "True"
    notebook.ok("%%distributed --ranks 2 --strategy ddp\nif rank == 0: model.save_pretrained('there')")
