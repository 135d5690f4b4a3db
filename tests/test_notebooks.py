"""The example notebook does what its text says: run in a real kernel, as `sh .ci/demo` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebook import ROOT

EXAMPLES = ROOT / "example_notebooks"


def outputs(cell: nbformat.NotebookNode) -> str:
    """Everything that the saved notebook shows under a cell, as text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(shown)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_digits_notebook_trains_a_model_and_is_saved_with_what_was_shown(tmp_path: Path) -> None:
    saved = tmp_path / "digits_ddp.ipynb"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "run.py"), str(EXAMPLES / "digits_ddp.ipynb"), str(saved)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    notebook = nbformat.read(saved, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    training = next(outputs(cell) for cell in code if "--keep model" in cell.source)
    assert "· no GPU here: 2 CPU ranks (gloo)" in training
    assert "batches an epoch, loss" in training
    assert "rank 1  done" in training
    assert "epoch 11" in training
    accuracy = float(outputs(code[-2]))
    assert accuracy > 0.95
    assert "[0-1] 23 batches an epoch" in done.stdout or "batches an epoch" in done.stdout
    assert "model: Net on ranks 0-1" in outputs(code[-1])


def test_the_notebooks_are_stored_without_outputs() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            assert not cell.get("outputs"), path
            assert cell.get("execution_count") is None, path
