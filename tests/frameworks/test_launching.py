"""What would start ranks of its own is refused, and a framework that is not told of the ranks is still data parallel under
`--strategy ddp`. Real kernels, real ranks."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.frameworks.training import ACCELERATE, HF_TRAINER, LIGHTNING, cell, missing
from tests.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
needs_lightning = pytest.mark.skipif(missing("lightning") is not None, reason=str(missing("lightning")))
needs_accelerate = pytest.mark.skipif(missing("accelerate") is not None, reason=str(missing("accelerate")))
needs_transformers = pytest.mark.skipif(missing("transformers") is not None, reason=str(missing("transformers")))
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
        dedent("""\
            %%distributed --ranks 2
            from accelerate import debug_launcher
            debug_launcher(print)"""),
        120,
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


@needs_lightning
@pytest.mark.parametrize("in_notebook", [False, True])
def test_a_trainer_that_trains_each_rank_alone_says_so(notebook: Notebook, in_notebook: bool) -> None:
    notebook.cell(LIGHTNING.setup, 120)
    alone = "this Trainer counts one process, so each of the 2 ranks trains alone"
    code = cell(LIGHTNING, line="--strategy none").replace(SAYS_SO, "")
    if in_notebook:
        made = code[code.index("trainer = ") : code.index("trainer.fit")]
        notebook.cell(made, 120)
        code = code.replace(made, "")

    assert alone in notebook.cell(code, 120).text
    assert alone not in notebook.cell(cell(LIGHTNING, line="--strategy none"), 120).text
    assert alone in notebook.cell(code, 120).text, "with the process group that Lightning has left"


@needs_transformers
@pytest.mark.parametrize("line", ["--strategy ddp", "--strategy none"])
def test_arguments_of_a_trainer_that_the_notebook_has_made_find_the_ranks(notebook: Notebook, line: str) -> None:
    made, trained = HF_TRAINER.body.split("trainer = Trainer", 1)
    notebook.cell(f"{HF_TRAINER.setup}{made}\nused = arguments.device, arguments.world_size", 120)
    notebook.ok(HF_TRAINER.by_hand)
    body = f"%%distributed --ranks 2 --out got {line}\ndef each_step(): pass\ntrainer = Trainer{trained}"
    of_ranks = "arguments.process_index, trainer.is_world_process_zero(), str(arguments.device), arguments.n_gpu"
    outcome = notebook.cell(f"{body.rstrip()} | {{'rank': ({of_ranks})}}", 120)

    assert outcome.status == "ok", outcome.text
    seen = notebook.ok(
        "reference = by_hand([each['seen'] for each in got])\n"
        "[each['world'] for each in got], [each['rank'] for each in got], "
        "all(bool(((each['weights'] - reference).abs() < 1e-5).all()) for each in got)"
    )
    assert seen.result == "([2, 2], [(0, True, 'cpu:0', 0), (1, False, 'cpu:0', 0)], True)"


@needs_accelerate
@pytest.mark.parametrize(
    ("made", "place"),
    [
        ("accelerator = Accelerator()", "accelerator.state"),
        ("from accelerate import PartialState\naccelerator = PartialState()", ""),
        (f"accelerator = Accelerator()\n{ACCELERATE.body.split('seen = ')[0]}", "accelerator."),
    ],
)
def test_what_accelerate_has_found_out_about_the_notebook_is_not_sent(
    notebook: Notebook, made: str, place: str
) -> None:
    notebook.cell(f"{ACCELERATE.setup}\n{made}", 120)
    outcome = notebook.cell("%%distributed --ranks 2\naccelerator.num_processes", 120)

    assert outcome.ename == "PayloadError", outcome.text
    assert "`accelerator` (used on line 2) " in outcome.evalue
    assert place in outcome.evalue
    assert "it describes the notebook's process, not a rank" in outcome.evalue


@needs_transformers
def test_a_trainer_of_the_notebook_is_to_be_made_on_the_ranks(notebook: Notebook) -> None:
    made = HF_TRAINER.body.split("trainer.train()", 1)[0]
    notebook.cell(f"{HF_TRAINER.setup}def each_step(): pass\n{made}", 120)
    outcome = notebook.cell("%%distributed --ranks 2\ntrainer.train()", 120)

    assert outcome.ename == "PayloadError", outcome.text
    assert "process, not a rank" in outcome.evalue
