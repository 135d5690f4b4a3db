"""The notebook that `%distributed_tour` writes: five cells that show what the magic does. Kernel side; standard library
only."""

from __future__ import annotations

import json
import os
from pathlib import Path

from jupyter_distrib.errors import SITE, OptionsError, page

FILE = "distributed_tour.ipynb"

_TEXT = f"""\
# A first tour

Run the cells one after another, with Shift+Enter. They need no GPU: on a machine without one, ranks are processes on
the CPU. With GPUs, write `--gpus 2` in place of `--ranks 2`. [The documentation]({SITE}) has all the rest."""

_CELLS = (
    (
        "Load the extension once in each notebook.",
        "%load_ext jupyter_distrib",
    ),
    (
        "The cell runs on two ranks, each a process of its own. The value of its last line comes back from each.",
        """\
%%distributed --ranks 2 --strategy ddp
import torch
import torch.distributed as dist

total = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(total)
print(f"rank {rank} of {world_size} on {device}")
total.item()""",
    ),
    (
        "Write a model and data as for one device. They are made here, in the notebook.",
        """\
import torch

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = x @ torch.randn(20, 1) + 0.1 * torch.randn(4096, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))""",
    ),
    (
        """\
Train with a loop as for one device. `--strategy ddp` divides the batches among the ranks and averages the gradients.
`report` draws the loss, and `--keep` leaves the model on the ranks. Press Stop in the middle, and run the cell
again.""",
        """\
%%distributed --ranks 2 --strategy ddp --keep model
import jupyter_distrib

optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(20):
    for batch, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        jupyter_distrib.report(loss=loss)
loss.item()""",
    ),
    (
        "Rank 0's copy of the trained model comes back to the notebook.",
        """\
trained = model[0]
with torch.no_grad():
    print(torch.nn.functional.mse_loss(trained(x), y))""",
    ),
)

_END = f"""\
Next: [training code as it is]({page("strategies")}), [more than one machine]({page("pools")}),
[when it goes wrong]({page("errors")})."""


def write(folder: Path) -> Path:
    """Write the notebook into a folder, and return its path.

    Raises:
        OptionsError: If there is such a file, or if the folder cannot be written.
    """
    cells = [_markdown(_TEXT)]
    for text, code in _CELLS:
        cells += [_markdown(text), _code(code)]
    cells.append(_markdown(_END))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": [{"id": f"tour-{number}", **cell} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = folder / FILE
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except FileExistsError:
        raise OptionsError(f"{FILE} is there already: open it, or rename it and write a new one.") from None
    except OSError as error:
        raise OptionsError(f"{path} cannot be written: {os.strerror(error.errno or 0)}.") from None
    return path


def _markdown(text: str) -> dict[str, object]:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict[str, object]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": text}
