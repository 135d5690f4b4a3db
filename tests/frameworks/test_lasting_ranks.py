"""Ranks live on, frameworks think that a program ends: what one cell told a framework does not bind the next, and what
was kept goes on as it was made. Real kernels, real ranks."""

from __future__ import annotations

import pytest

from tests.frameworks.training import FABRIC, LIGHTNING, PROBLEM, missing
from tests.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
needs_accelerate = pytest.mark.skipif(missing("accelerate") is not None, reason=str(missing("accelerate")))
needs_lightning = pytest.mark.skipif(missing("lightning") is not None, reason=str(missing("lightning")))

ON_TWO = "%%distributed --ranks 2 --out got "
PREPARE = """
from accelerate import Accelerator
accelerator = Accelerator({arguments})
torch.manual_seed(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=8))
"""
STEPS = """
for numbers, x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(wrapped(x), y))
    optimizer.step()
"""
SAY = """
{"ranks": accelerator.num_processes, "precision": accelerator.mixed_precision,
 "accumulates": accelerator.gradient_accumulation_steps, "weights": weights_of(wrapped)}
"""
KEPT = "accelerator,wrapped,optimizer,loader"


@pytest.fixture
def book(notebook: Notebook) -> Notebook:
    notebook.ok(PROBLEM)
    return notebook


def told(book: Notebook, cell: str) -> tuple[object, ...]:
    """Run a cell that ends with `SAY`; ranks must agree on everything."""
    outcome = book.cell(cell, 120)
    assert outcome.status == "ok", outcome.text
    same = (
        "bool((got[0].pop('weights') == got[1].pop('weights')).all()) and got[0] == got[1] and tuple(got[0].values())"
    )
    values = book.ok(f"weights = got[0]['weights']\n{same}").result
    assert values != "False"
    return tuple(eval(values))


@needs_accelerate
@pytest.mark.parametrize("strategy", ["ddp", "none"])
def test_each_cell_may_give_accelerate_other_arguments(book: Notebook, strategy: str) -> None:
    line = f"{ON_TWO}--strategy {strategy}"

    for arguments, expected in {
        "": (2, "no", 1),
        "mixed_precision='bf16'": (2, "bf16", 1),
        "gradient_accumulation_steps=2": (2, "no", 2),
    }.items():
        assert told(book, line + PREPARE.format(arguments=arguments) + STEPS + SAY) == expected


@needs_accelerate
def test_a_kept_accelerator_goes_on_as_it_was_made_also_after_another_was_made_in_between(book: Notebook) -> None:
    keep = f"{ON_TWO}--strategy ddp --keep {KEPT}"
    bf16 = PREPARE.format(arguments="mixed_precision='bf16'")
    book.ok("import copy\nother = copy.deepcopy(model)")

    assert told(book, keep + bf16 + STEPS + SAY) == (2, "bf16", 1)
    plain = PREPARE.format(arguments="").replace("model", "other").replace("accelerator.", "b.")
    plain = plain.replace("accelerator =", "b =").replace("wrapped, optimizer, loader =", "_ =")
    book.ok(f"%%distributed --ranks 2 --strategy ddp{plain}b.mixed_precision")

    assert book.ok("_").result == "ranks 0-1: 'no'"
    assert told(book, keep + STEPS + SAY) == (2, "bf16", 1)
    assert told(book, keep + PREPARE.format(arguments="").replace("model", "other") + STEPS + SAY) == (2, "no", 1)


@needs_accelerate
@pytest.mark.parametrize("how", ["1 / 0", "stop"])
def test_what_accelerate_has_prepared_trains_on_in_the_cell_after_a_failure_or_a_stop(book: Notebook, how: str) -> None:
    """Its process group was cut. Rank 0 was in a backward that waits for rank 1."""
    line = f"{ON_TWO}--strategy ddp"
    told(book, f"{line} --keep {KEPT}" + PREPARE.format(arguments="") + STEPS + SAY)
    wait = "import time\n        print('ready', flush=True)\n        time.sleep(100)"
    body = f"{STEPS}    if rank == 1:\n        {wait if how == 'stop' else how}\n"

    book.start(f"{line}{body}")
    if how == "stop":
        book.until("ready")
        book.interrupt()
    assert book.finish().ename == ("KeyboardInterrupt" if how == "stop" else "ZeroDivisionError")

    assert told(book, line + STEPS + SAY) == (2, "no", 1)


@needs_lightning
def test_what_fabric_has_set_up_trains_on_in_the_cell_after_a_failure(book: Notebook) -> None:
    book.ok(FABRIC.setup)
    body = FABRIC.body.replace("each_step()", "pass")
    book.ok(f"{ON_TWO}--strategy ddp --keep fabric,wrapped,optimizer{body}")
    step = "for numbers, x, y in fabric.setup_dataloaders(DataLoader(samples, batch_size=8)):"
    one = body[body.index("for ") : body.index("{")].replace("    seen += numbers.tolist()\n", "")
    assert one.startswith(step)

    book.fails(f"{ON_TWO}--strategy ddp\n{one}    if rank == 1:\n        1 / 0\n")
    book.ok(f"{ON_TWO}--strategy ddp\n{one}\nweights_of(wrapped)")

    assert book.ok("bool((got[0] == got[1]).all())").result == "True"


@needs_lightning
@pytest.mark.parametrize("strategy", ["ddp", "none"])
def test_a_trainer_for_another_number_of_ranks_is_refused_by_lightning(book: Notebook, strategy: str) -> None:
    book.ok(LIGHTNING.setup)
    body = LIGHTNING.body.replace("devices=world_size", "devices=1")

    outcome = book.fails(f"{ON_TWO}--strategy {strategy}{body}")

    assert outcome.ename == "ValueError"
    assert "does not match the world size (2)" in outcome.evalue
