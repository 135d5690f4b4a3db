"""Cells that train, for ranks on feigned GPUs. Losses mean nothing; it counts what is called, and that it ends."""

from __future__ import annotations

MODEL = """
import itertools, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
"""
STEPS = """
x = torch.randn(16, 32, device=next(model.parameters()).device)
for number in {steps}:
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 3: print("steps", flush=True)
    {then}
"""
PIPELINE = """
import itertools, torch
from jupyter_distrib.parallel import Pipeline

class Take(torch.autograd.Function):
    def forward(ctx, x, stage):
        ctx.number = x.flatten()[0].item()
        stage.seen.append(f"F{ctx.number:.0f}")
        return torch.full_like(x, ctx.number)
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.number + 100), None

class Give(torch.autograd.Function):
    def forward(ctx, y, x, stage):
        ctx.stage = stage
        return torch.full_like(y, x.flatten()[0].item() + 10)
    def backward(ctx, grad):
        ctx.stage.seen.append(f"B{grad.flatten()[0].item():.0f}" if pipeline.stage == 0 else "B")
        return torch.full_like(grad, 0.5), None, None

class Stage(torch.nn.Module):
    # Kernels compute nothing, but fills and sends are real: a microbatch is told by the number that it is full of.
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(32, 32), []
    def forward(self, x):
        x = Take.apply(x, self)
        return Give.apply(self.layer(x), x, self)

pipeline = Pipeline(mesh, [Stage(), Stage()], loss=torch.nn.functional.mse_loss, microbatches=4, schedule="{schedule}")
optimizer = torch.optim.AdamW(pipeline.parameters())
x = torch.arange(4.0).repeat_interleave(4)[:, None].expand(16, 32).contiguous().requires_grad_()
for number in {steps}:
    pipeline.step(x, torch.zeros(16, 32))
    optimizer.step()
    optimizer.zero_grad()
    if number == 1: print("steps", flush=True)
    {then}
"""


def cell(options: str, steps: str = "range(5)", then: str = "pass", model: str = MODEL) -> str:
    """Return a cell on two ranks that trains for these steps, and does something else in each."""
    return f"%%distributed --gpus 2 {options}\n{model}{STEPS.format(steps=steps, then=then)}"


def pipeline(
    steps: str = "range(3)", ranks: int = 2, mesh: str = "pp=2", schedule: str = "1f1b", then: str = "pass"
) -> str:
    """Return a cell that trains two stages, each of which notes the microbatches that it sees."""
    line = f"%%distributed --gpus {ranks} --strategy tp --mesh {mesh}\n"
    body = PIPELINE.replace("{schedule}", schedule).replace("{steps}", steps).replace("{then}", then)
    return line + body
