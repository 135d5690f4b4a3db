"""How long a checkpoint in the background stops a training."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

from plan import Plan
from report import Figure, spread

SAVED = """\
import pathlib, time, torch, jupyter_distrib
from jupyter_distrib.checkpoints import periodic
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 2048)).sum().backward()
optimizer.step()
held = [each for state in optimizer.state.values() for each in state.values()] + [*model.parameters()]
held = [getattr(each, "to_local", lambda: each)().detach() for each in held]

def took(do):
    torch.distributed.barrier()
    began_s = time.perf_counter()
    made = do()
    return time.perf_counter() - began_s

folder, copies, saves = pathlib.Path("{folder}"), [], []
for _ in range({count}):
    copies.append(took(lambda: [each.clone() for each in held]))
    saves.append(took(lambda: jupyter_distrib.save(folder, keep=1, model=model, optimizer=optimizer)))
    periodic.wait(folder)
sum(each.nbytes for each in held), copies[1:], saves[1:]
"""


def saved(plan: Plan) -> Iterator[Figure]:
    """A call of `save` that makes a checkpoint, beside a copy of the same state in memory, by turns."""
    count = 1 + len(plan.times(12, 4))
    for strategy in ("ddp", "fsdp"):
        line = f"--ranks 2 --strategy {strategy}"
        with plan.warm(line) as notebook:
            body = SAVED.format(folder=notebook.runtime / "checkpoints", count=count)
            notebook.good(f"%%distributed {line} --out found\n{body}")
            size, copies, saves = ast.literal_eval(notebook.good("found[0]").text.strip())
        ratio = statistics.median(save / copy for save, copy in zip(saves, copies, strict=True))
        yield Figure(
            what=f"background save of {size / 1e6:.0f} MB, 2 ranks, {strategy}: the training stops, against a copy",
            measured=f"x{ratio:.2f}; {spread(saves)} against {spread(copies)}",
            target="<= 1.2 x a copy of the state",
            ok=ratio <= 1.2,
            numbers={"saves_s": saves, "copies_s": copies},
        )
