"""The example notebook of Ray Train and Ray Data does what its text says."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebook import ROOT

EXAMPLES = ROOT / "example_notebooks"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here")
def test_two_workers_train_on_shares_of_images_and_save_a_checkpoint(tmp_path: Path) -> None:
    saved = tmp_path / "ray_train.ipynb"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "run.py"), str(EXAMPLES / "ray_train.ipynb"), str(saved)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    code = [cell for cell in nbformat.read(saved, as_version=4).cells if cell.cell_type == "code"]
    (text,) = [output.data["text/plain"] for output in code[-1].outputs if output.output_type == "execute_result"]
    metrics, checkpoint = ast.literal_eval(text)
    assert checkpoint is True
    assert (metrics["epoch"], metrics["seen"]) == (1, 64)
