"""The example notebook of the Ray pool does what its text says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebook import ROOT
from tests.ray.conftest import Cluster

EXAMPLES = ROOT / "example_notebooks"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ray_notebook_trains_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    saved = tmp_path / "ray_pool.ipynb"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_CLUSTER": cluster.address}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "run.py"), str(EXAMPLES / "ray_pool.ipynb"), str(saved)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    code = [cell for cell in nbformat.read(saved, as_version=4).cells if cell.cell_type == "code"]
    losses = [output.data["text/plain"] for cell in code[-3:-1] for output in cell.outputs if "data" in output]
    assert float(losses[-1]) < 1e-3, losses
