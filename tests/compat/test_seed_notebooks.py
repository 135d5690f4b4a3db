"""The examples of other platforms, with their own import lines, run in a real kernel as a person would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.test_notebooks import outputs, run

pytestmark = pytest.mark.slow


def test_the_example_of_the_serverless_gpu_api_trains(tmp_path: Path) -> None:
    code, _ = run("from_databricks.ipynb", tmp_path)
    assert outputs(code[-1]).splitlines() == ["loss falls: True", "weights are equal: True"]
    training = outputs(code[-2])
    assert "Total loss for epoch 2" in training
    assert "[1] Total loss for epoch 0" in training


def test_the_examples_of_torch_distributor_train_by_a_function_and_a_script(tmp_path: Path) -> None:
    code, _ = run("from_spark.ipynb", tmp_path)
    assert "trained: True" in outputs(code[2])
    script = outputs(code[-1])
    assert "rank 1 of 2: Namespace(learning_rate=0.001, batch_size=16)" in script


def test_the_structure_of_horovod_s_example_trains_as_it_stands(tmp_path: Path) -> None:
    code, _ = run("from_horovod.ipynb", tmp_path)
    training = outputs(code[1])
    assert "Train Epoch: 8 [0/750]" in training
    assert "[1] Train" not in training
    assert outputs(code[-1]).splitlines()[-2:] == [
        "[1.5, 1.5]",
        "accuracy above 0.9: True weights are equal: True",
    ]
