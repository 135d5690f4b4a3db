"""Steps of the GPU kit that need neither values nor speed hold on a feigned GPU, as they do on a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.feigned_cuda import FeignedCuda
from tests.notebook import ROOT

STEPS = ("K1", "K3", "K5", "K6", "K8a", "K8b", "K8c", "K15", "K16", "K24")


@pytest.mark.parametrize("step", STEPS)
def test_a_step_holds(step: str, tmp_path: Path) -> None:
    with FeignedCuda(gpus=1, memory_mb=80 << 10) as machine:
        command = (sys.executable, "-m", "benchmarks.gpu_kit.run", "--only", step, "--results", str(tmp_path))
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **machine.environment}, capture_output=True, text=True, check=False
        )
    (found,) = tmp_path.glob("*.json")
    assert f"PASS {step} " in done.stdout, done.stdout + done.stderr
    assert [row["where"] for row in json.loads(found.read_text())["rows"]] == ["gpu"]
