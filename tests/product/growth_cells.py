"""The cell of the tests of runs that grow, for pools of every kind."""

from __future__ import annotations

COUNTING = """
import os, time, torch, jupyter_distrib
torch.cuda.is_available = lambda: False  # the torch of ranks with feigned GPUs could not write a checkpoint else
model = torch.nn.Linear(1, 1)
step = jupyter_distrib.resume("{folder}", model=model).get("step", 0)
print("has", world_size)
while not os.path.exists("{end}"):
    step += 1
    jupyter_distrib.report(loss=1.0, step=step)
    if rank == 0:
        jupyter_distrib.save("{folder}", every_s=0.05, keep=2, model=model, step=step)
    time.sleep(0.01)
(world_size, step > 1)
"""


def counting(options: str, folder: str = "ckpt", end: str = "end") -> str:
    """Return a cell that counts steps and saves them, until a file exists."""
    return f"%%distributed {options}\n{COUNTING.format(folder=folder, end=end)}"
