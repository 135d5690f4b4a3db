"""A cell that trains, and two that are not to be started: one that fails, and one that is too large for a T4."""

from __future__ import annotations

GOOD = """\
import torch, torch.nn as nn
model = nn.Linear(16, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 16, device=model.weight.device)).sum().backward()
    opt.step(); opt.zero_grad()
rank
"""
WRONG = GOOD.replace("randn(8, 16", "randn(8, 17")
LARGE = GOOD.replace("Linear(16, 4)", "Linear(16, 300_000_000)")
LIMIT_S = 180.0
"""Seconds for a dry run and what follows, on a machine that does much else."""
