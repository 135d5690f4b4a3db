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


def cell(options: str, steps: str = "range(5)", then: str = "pass", model: str = MODEL) -> str:
    """Return a cell on two ranks that trains for these steps, and does something else in each."""
    return f"%%distributed --gpus 2 {options}\n{model}{STEPS.format(steps=steps, then=then)}"
