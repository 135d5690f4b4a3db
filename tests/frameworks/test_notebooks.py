"""The example notebooks of the frameworks do what their text says: run in a real kernel, with the checks that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks.training import missing
from tests.repository.test_notebooks import executed, outputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def only_with(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(missing(module) is not None, reason=str(missing(module)))


@only_with("lightning")
def test_lightning_and_fabric_read_digits_that_they_have_not_seen(tmp_path: Path) -> None:
    cells = executed("lightning.ipynb", tmp_path)

    of_trainer, of_fabric = (
        outputs(cell) for cell in cells if cell.source.rstrip().endswith(("].model)", "model[0])"))
    )
    assert float(of_trainer) > 0.85
    assert float(of_fabric) > 0.85


@only_with("accelerate")
def test_accelerate_goes_on_in_the_next_cell(tmp_path: Path) -> None:
    cells = executed("accelerate.ipynb", tmp_path)

    assert float(outputs(cells[-1])) > 0.85


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("transformers_trainer.ipynb", marks=only_with("transformers")),
        pytest.param("trl_sft.ipynb", marks=only_with("trl")),
    ],
)
def test_a_tiny_model_writes_a_sentence_of_those_that_it_has_learned(name: str, tmp_path: Path) -> None:
    cells = executed(name, tmp_path)

    assert re.match(r"'?the red cat (sat on|ran in|sang under) the (mat|park|tree)\b", outputs(cells[-1]))
