"""Dry runs beside real ones: six cells, and how far their peaks of memory are apart."""

from __future__ import annotations

from ast import literal_eval

from benchmarks.gpu_kit.place import Place
from benchmarks.gpu_kit.step import Findings, step

HEAD = "import torch, torch.nn as nn, torch.nn.functional as F\n"
LOOP = """
opt = torch.optim.{opt}
for _ in range(3):
    x = {x}
    {loss}
    loss.backward(); opt.step(); opt.zero_grad()
"""
HALF = "with torch.autocast(x.device.type, dtype=torch.bfloat16): loss = model(x).float().pow(2).mean()"
WHOLE = "loss = model(x).pow(2).mean()"
ADAM = "AdamW(model.parameters())"
ON = "device=next(model.parameters()).device"
LINEAR = "model = nn.Sequential(*[nn.Sequential(nn.Linear({n}, {n}), nn.GELU(), nn.LayerNorm({n})) for _ in range(8)])"
ATTENTION = "model = nn.TransformerEncoder(nn.TransformerEncoderLayer({n} // 2, 8, {n}, batch_first=True), 4)"
CONVOLUTIONS = """
def block(): return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
model = nn.Sequential(*[block() for _ in range(4)])
"""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear({n}, {n}), nn.GELU()) for _ in range(8))
    def forward(self, x):
        for block in self.blocks: x = checkpoint(block, x, use_reentrant=False)
        return x
model = Deep()
"""
ROWS = f"torch.randn(256, {{n}}, {ON})"
CELLS = {
    "layers, AdamW": ("ddp", LINEAR + LOOP.format(opt=ADAM, x=ROWS, loss=WHOLE)),
    "layers, SGD, bf16": ("ddp", LINEAR + LOOP.format(opt="SGD(model.parameters(), lr=0.1)", x=ROWS, loss=HALF)),
    "attention, bf16": (
        "ddp",
        ATTENTION + LOOP.format(opt=ADAM, x=f"torch.randn(8, 128, {{n}} // 2, {ON})", loss=HALF),
    ),
    "convolutions": (
        "ddp",
        CONVOLUTIONS + LOOP.format(opt=ADAM, x=f"torch.randn(16, 8, {{n}} // 8, {{n}} // 8, {ON})", loss=WHOLE),
    ),
    "layers, sharded": ("fsdp", LINEAR + LOOP.format(opt=ADAM, x=ROWS, loss=WHOLE)),
    "checkpoints, sharded": ("fsdp", CHECKPOINTED + LOOP.format(opt=ADAM, x=ROWS, loss=WHOLE)),
}
MARGIN = 0.10
"""The part of the memory that a dry run leaves for gaps, see "tight"."""
FOR_CUDA = 1.6e9
"""Bytes that it adds for CUDA, its libraries and NCCL; some of their workspaces come from torch's allocator."""
LAST = """
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.history import run_files
session.current().history_writer.flush()
last = run_files.load()[-1]
print((last.predicted_bytes, last.peak_tensor_bytes))
"""


@step("K32", "a dry run predicts the peak of memory of a real run", limit_s=240, without_gpu="cpu")
def peaks(place: Place, find: Findings) -> None:
    size = 4096 if place.on_gpu else 128
    with place.notebook() as book:
        book.settled(place.ranks())
        for name, (strategy, cell) in CELLS.items():
            with find.going_on(name):
                source, head = HEAD + cell.format(n=size), f"%%distributed {place.ranks()} --strategy {strategy}"
                dry = book.cell(f"{head} --dry-run\n{source}", 120.0)
                find.that(f"{name}: it works by a dry run", "dry run: fits" in dry.result, dry.text[-300:])
                real = book.cell(f"{head}\n{source}", 120.0)
                find.that(f"{name}: it trains", real.status == "ok", real.text[-300:])
                if place.on_gpu:
                    predicted, measured = literal_eval(book.ok(LAST).stdout)
                    near = predicted * (1 - MARGIN) <= measured <= predicted * (1 + MARGIN) + FOR_CUDA
                    apart = f"{predicted / 1e6:.0f} MB by a dry run, {measured / 1e6:.0f} MB in fact"
                    find.that(f"{name}: the peak", near, f"{apart}, {100 * (measured / predicted - 1):+.1f}%")
