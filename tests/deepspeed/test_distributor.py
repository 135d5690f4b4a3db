"""`DeepspeedTorchDistributor` of the compat package with real DeepSpeed on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TRAIN = """
def train(steps):
    import argparse
    import deepspeed
    rank = int(os.environ["RANK"])
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
    model = net()
    engine, *_ = deepspeed.initialize(args, model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(steps):
        rows = slice(step * 8 + rank * 4, step * 8 + rank * 4 + 4)
        engine.backward(nn.functional.mse_loss(engine(x[rows]), y[rows]))
        engine.step()
    return weights_of(model)
"""
START = """
import os
from jupyter_distrib.compat.deepspeed_distributor import DeepspeedTorchDistributor
given = config(2, zero_allow_untested_optimizer=True)
"""
SAME = "bool((trained - alone()[1]).abs().max() < 1e-4)"


@pytest.mark.parametrize("form", ["dict", "file"])
def test_the_configuration_reaches_deepspeed_through_the_arguments(ours: Notebook, form: str, tmp_path: Path) -> None:
    ours.ok(START + TRAIN)
    if form == "file":
        ours.ok(
            f"import json; path = {str(tmp_path / 'ds.json')!r}; open(path, 'w').write(json.dumps(given)); given = path"
        )
    ours.ok("trained = DeepspeedTorchDistributor(numGpus=2, useGpu=False, deepspeedConfig=given).run(train, 20)")

    assert ours.ok(SAME).result == "True"


SCRIPT = """
import argparse, json, os, torch, deepspeed
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("out")
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args, model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    engine.backward(engine(torch.ones(4, 4)).square().mean())
    engine.step()
with open(f"{args.out}{os.environ['RANK']}", "w") as file:
    json.dump([engine.zero_optimization_stage(), engine.global_steps], file)
"""


def test_a_script_finds_the_configuration_behind_its_own_arguments(ours: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ours.ok(START)
    ours.ok(
        f"DeepspeedTorchDistributor(numGpus=2, useGpu=False, deepspeedConfig=given).run({str(script)!r}, {str(tmp_path / 'of')!r})"
    )

    assert [json.loads((tmp_path / f"of{rank}").read_text()) for rank in (0, 1)] == [[2, 3], [2, 3]]
