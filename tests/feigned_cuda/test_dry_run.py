"""The peaks of dry runs beside those of torch's real allocator."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda
from tests.notebook import Notebook

HEAD = "import torch, torch.nn as nn, torch.nn.functional as F\n"
LOOP = """\
for _ in range(2):
    model(torch.randn(64, 1024, device=next(model.parameters()).device)).pow(2).mean().backward()
    {clip}
    opt.step(); opt.zero_grad()
"""
DEEP = (
    "model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.LayerNorm(1024)) for _ in range(8)])\n"
)
CELLS = {
    "AdamW": DEEP + "opt = torch.optim.AdamW(model.parameters())\n" + LOOP.format(clip="pass"),
    "SGD": DEEP + "opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n" + LOOP.format(clip="pass"),
    "clipping": DEEP
    + "opt = torch.optim.AdamW(model.parameters())\n"
    + LOOP.format(clip="nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
}
WORKSPACES = 80 << 20
"""cuBLAS gets its workspaces from the same allocator; a dry run counts them with CUDA's context."""
BUCKETS = 34 << 20
"""The buckets of the first step, which DistributedDataParallel arranges anew for the second: NCCL's group frees them when
its next collective begins."""
MEETS = """\
%%distributed --gpus 2 --strategy ddp
import torch.distributed as dist, torch
dist.all_reduce(torch.zeros(1, device=device))
"""
"""Frees those of the training before."""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CELLS)
def test_the_real_peak_is_kept_beside_that_of_the_dry_run(
    name: str, strategy: str, machine: FeignedCuda, book: Notebook
) -> None:
    source = HEAD + CELLS[name]
    dry = book.cell(f"%%distributed --gpus 2 --strategy {strategy} --gpu-type H100 --dry-run\n{source}", 180)
    assert dry.result.startswith("dry run: fits"), dry.result
    predicted = int(book.ok("print(_.peak_bytes)").stdout)
    book.ok(MEETS)
    book.ok(f"%%distributed --gpus 2 --strategy {strategy}\n{source}")
    book.ok("from jupyter_distrib.kernel.session import session\nsession.current().history_writer.flush()")
    found = book.ok(
        dedent("""\
            from jupyter_distrib.kernel.history import run_files
            last = run_files.load()[-1]
            print(last.predicted_bytes, last.peak_tensor_bytes)""")
    )
    assert "None" not in found.stdout, found.stdout
    kept, real = map(int, re.findall(r"\d+", found.stdout))
    assert kept == predicted
    assert 0.98 * predicted <= real <= 1.02 * predicted + WORKSPACES + BUCKETS * (strategy == "ddp"), (predicted, real)
    assert "on GPUs, the real peak of tensors was" in book.ok("%distributed_status --doctor").result
