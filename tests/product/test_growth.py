"""`--ranks 2:4`: a training that grows ends with the weights of the same sizes by hand. Real kernels; the hosts are this
machine behind pipes, and come and go with a file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import os, time, torch, jupyter_distrib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(folder, steps=10**9):
    # Up to a step or, without one, 20 steps on 4 ranks.
    torch.set_num_threads(1)  # on any number of cores
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40_000, 8), torch.randn(40_000, 1))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plain = jupyter_distrib.resume(folder, model=model, optimizer=optimizer, loader=loader)
    step = plain.get("step", 0)
    steps = step + 20 if steps > 10**8 and os.environ["WORLD_SIZE"] == "4" else steps
    print("from", step, "with", os.environ["WORLD_SIZE"])
    for x, y in loader:
        if step == steps:
            break
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        jupyter_distrib.report(loss=1.0, step=step)
        jupyter_distrib.save(folder, keep=3, model=model, optimizer=optimizer, loader=loader, step=step)
    return step
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(TRAIN)
    return shared_notebook


def pool(folder: Path, hosts: str) -> str:
    """Return the options of a pool whose hosts can be reached if they have a file."""
    (folder / "start.sh").write_text('test -e "$(dirname "$0")/up-$1" || exit 1\nshift\nexec "$@"\n')
    start = f"--start 'env -S sh {folder}/start.sh {{host}} {{python}}'"
    return f"--pool command --hosts {hosts} {start} --python {sys.executable} --interface lo"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_weights_are_those_of_the_same_sizes_by_hand(book: Notebook, tmp_path: Path, strategy: str) -> None:
    line = f"%%distributed {pool(tmp_path, 'a:2,b:2')} --strategy {strategy}"
    (tmp_path / "up-a").touch()
    book.start(f"{line} --ranks 2:4 --grow-after 1\ntrain('{tmp_path}/grown')")
    book.until("from 0 with 2")
    (tmp_path / "up-b").touch()
    grown = book.finish(90)
    at = int(re.findall(r"from (\d+) with 4", grown.text)[0])

    assert grown.result == f"ranks 0-3: {at + 20}", grown.text
    assert "grown from 2 to 4 ranks at step " in grown.view
    assert at > 0
    by_hand = f"%%distributed --strategy {strategy} --ranks"
    book.ok(f"{by_hand} 2\ntrain('{tmp_path}/hand', steps={at})")
    book.ok(f"{by_hand} 4\ntrain('{tmp_path}/hand', steps={at + 20})")
    same = book.ok(
        f"one, two = (jupyter_distrib.load('{tmp_path}/' + name)['model'] for name in ('grown', 'hand'))\n"
        "(len(one), all(torch.equal(one[name], two[name]) for name in one))"
    )
    assert same.result == "(4, True)"
    book.ok("%distributed_pool stop command")
