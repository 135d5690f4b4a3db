"""The peak of a dry run beside that of the tensors of a real run of the same cell on CPU ranks. `benchmarks/dry_runs.py`
compares more cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent

import pytest

from tests.dry_run.play import play
from tests.notebook import Notebook

pytestmark = pytest.mark.slow

HEAD = """\
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
"""
CELLS = {
    "mlp": """\
loader = DataLoader(TensorDataset(torch.randn(256, 512), torch.randint(0, 10, (256,))), batch_size=32)
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    if step == 1: break
""",
    "convolutions": """\
loader = DataLoader(TensorDataset(torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))), batch_size=16)
def block(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
model = nn.Sequential(block(3, 32), block(32, 64), nn.MaxPool2d(2), block(64, 64), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(64, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    if step == 1: break
""",
    "attention": """\
class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(d, 2))
        a = (q @ k.transpose(2, 3) / 8).softmax(3) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm(x))))
loader = DataLoader(torch.randint(0, 1000, (32, 128)), batch_size=8)
model = nn.Sequential(nn.Embedding(1000, 256), *[Block(256, 4) for _ in range(6)], nn.Linear(256, 1000))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, x in enumerate(loader):
    loss = F.cross_entropy(model(x).view(-1, 1000), x.view(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step(); opt.zero_grad()
    if step == 1: break
""",
    "checkpointed": """\
from torch.utils.checkpoint import checkpoint
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
    def forward(self, x):
        for block in self.blocks: x = x + checkpoint(block, x, use_reentrant=False)
        return x
model = Deep()
opt = torch.optim.AdamW(model.parameters())
for step, x in enumerate(DataLoader(torch.randn(2048, 256), batch_size=512)):
    model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
    if step == 1: break
""",
    "one large layer": """\
model = nn.Linear(2048, 1024)
opt = torch.optim.SGD(model.parameters())
for step, x in enumerate(DataLoader(torch.randn(64, 2048), batch_size=16)):
    model(x).sum().backward(); opt.step(); opt.zero_grad()
    if step == 1: break
""",
    "recurrent": """\
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.LSTM(64, 256, 2, batch_first=True), nn.Linear(256, 64)
    def forward(self, x): return self.out(self.layers(x)[0])
model = Words()
opt = torch.optim.Adam(model.parameters())
for step, x in enumerate(DataLoader(torch.randn(64, 32, 64), batch_size=16)):
    model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
    if step == 1: break
""",
}
MEASURED = """\
from tests.dry_run.real_peaks import measured
def train():
{training}
measured(train)["tensors_bytes"]
"""


RUNS = {"none": 1, "ddp": 1, "fsdp": 3, "fsdp --precision bf16": 3}
"""gloo's threads let go of what they have gathered a moment later or sooner, so that real peaks of one cell are 81 to
98 MB here: the least of some runs is the same each time."""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


MARGINS = {"none": 0.02, "ddp": 0.02, "fsdp": 0.08}
PLAYED = [(cell, strategy, margin) for cell in CELLS for strategy, margin in MARGINS.items()]
PLAYED.remove(("recurrent", "fsdp", 0.08))  # torch (2.13) has no such layer of the CPU for shards
PLAYED += [(cell, "fsdp --precision bf16", 0.08) for cell in ("mlp", "convolutions", "attention")]


@pytest.mark.parametrize(("cell", "strategy", "margin"), PLAYED)
def test_the_peak_equals_a_real_runs(book: Notebook, cell: str, strategy: str, margin: float) -> None:
    measured = HEAD + MEASURED.format(training=indent(CELLS[cell], "    "))
    peaks = list[int]()
    for _ in range(RUNS[strategy]):
        shown = book.ok(f"%%distributed --ranks 2 --strategy {strategy}\n{measured}").result
        peaks += map(int, re.findall(r": (\d+)", shown))
    real_bytes = min(peaks)
    name, _, precision = strategy.partition(" --precision ")
    options = {"precision": precision} if precision else {}
    found = play(HEAD + CELLS[cell], name, ranks=2, gpu="", options=options)
    assert found.steps == 2
    assert real_bytes == pytest.approx(found.peak_bytes, rel=margin), (found, peaks)
