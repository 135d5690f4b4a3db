"""Trainings on torch's CUDA build and ProcessGroupNCCL run to their end, with one context on each GPU."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook


def test_the_backend_is_nccl_and_each_rank_has_its_own_gpu(machine: FeignedCuda, book: Notebook) -> None:
    found = book.ok(
        dedent("""\
            %%distributed --gpus 4 --strategy ddp
            import torch
            t = torch.full((3,), 1.0 + rank, device=device)
            torch.distributed.all_reduce(t)
            str(device), t.tolist(), str(torch.distributed.get_backend_config())""")
    )
    for rank in range(4):
        assert f"rank {rank}: ('cuda:{rank}', [10.0, 10.0, 10.0], 'cpu:gloo,cuda:nccl')" in found.text
    assert sorted(machine.contexts().values()) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_trains(strategy: str, machine: FeignedCuda, book: Notebook) -> None:
    found = book.ok(trainings.cell(f"--strategy {strategy} --keep model,optimizer") + "str(x.device)")
    assert "rank 1: 'cuda:1'" in found.text
    again = book.ok(trainings.cell(f"--strategy {strategy} --keep model,optimizer", model="import itertools, torch\n"))
    assert "steps" in again.text
    assert all(len(gpus) == 1 for gpus in machine.contexts().values())


def test_a_kernel_of_triton_of_the_notebook_is_built_again(book: Notebook) -> None:
    book.ok("""
import torch, triton, triton.language as tl
from triton.language import standard
@triton.jit
def half(v):
    return v * 0.5
@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit(do_not_specialize=["n"], debug=True)
def halve(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, half(tl.load(source + at, mask=at < n)), mask=at < n)
library_kernel = standard.cdiv
kernel = halve.fn
told = lambda: str((kernel.src, kernel.cache_key, kernel.do_not_specialize, kernel.debug, len(halve.configs)))
""")
    there = book.ok("told()").result
    cell = dedent("""\
        %%distributed --gpus 2
        assert library_kernel is standard.cdiv
        told()""")
    here = book.ok(cell).result
    assert here == f"ranks 0-1: {there}"
    assert "['n'], True, 2)" in there


def test_a_model_in_parts_trains(book: Notebook) -> None:
    cell = """%%distributed --gpus 4 --strategy tp --mesh tp=2,data=2
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 32, device=device)
for _ in range(3):
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""
    assert "trained" in book.ok(cell).text


def test_a_script_with_groups_of_its_own(machine: FeignedCuda, book: Notebook) -> None:
    """As under torchrun: NCCL's group is bound to the device at once, and split."""
    script = """%%distributed --gpus 4
import os, torch, torch.distributed as dist
dist.init_process_group("nccl", device_id=device)
t = torch.full((2,), 1.0 + rank, device=device)
dist.all_reduce(t)
pair = dist.new_group([0, 1])
other = dist.new_group([2, 3])
u = torch.full((2,), 1.0 + rank, device=device)
dist.all_reduce(u, group=pair if rank < 2 else other)
dist.barrier()
sent = torch.full((2,), 5.0 + rank, device=device)
got = torch.zeros(2, device=device)
for work in dist.batch_isend_irecv(
    [dist.P2POp(dist.isend, sent, (rank + 1) % 4), dist.P2POp(dist.irecv, got, (rank - 1) % 4)]
):
    work.wait()
result = t.tolist(), u.tolist(), got.tolist()
dist.destroy_process_group()
result
"""
    for _ in range(2):
        found = book.ok(script)
        for rank, (pair, got) in enumerate([(3.0, 8.0), (3.0, 5.0), (7.0, 6.0), (7.0, 7.0)]):
            assert f"rank {rank}: ([10.0, 10.0], [{pair}, {pair}], [{got}, {got}])" in found.text
    assert all(len(gpus) == 1 for gpus in machine.contexts().values())


def test_a_step_waits_for_the_gpu_as_seldom_as_torchs_own(book: Notebook) -> None:
    """`error`: torch raises where its code waits for the GPU."""
    cell = trainings.cell(
        "--strategy ddp", "range(40)", 'torch.cuda.set_sync_debug_mode("error" if 5 < number < 39 else 0)'
    )
    assert "steps" in book.ok(cell).text


def test_what_does_not_train_is_said(book: Notebook) -> None:
    graph = dedent("""\
        import torch
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(2, device=device)
    """)
    failed = book.fails(f"%%distributed --gpus 1\n{graph}")
    assert "AcceleratorError" in failed.text
    again = (
        dedent("""\
            %%distributed --gpus 1
            import torch
            torch.randn(3, device=device).shape[0]""")  # torch still notes a capture
    )
    assert "rank 0: 3" in book.ok(again).text


def test_eight_ranks(machine: FeignedCuda, book: Notebook) -> None:
    found = book.ok(
        dedent("""\
            %%distributed --gpus 8 --strategy ddp
            import torch
            t = torch.ones(1, device=device)
            torch.distributed.all_reduce(t)
            t.item()""")
    )
    assert "ranks 0-7: 8.0" in found.text
    assert sorted(machine.contexts().values()) == [[gpu] for gpu in range(8)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_default_device_does_not_move_what_ranks_tell_one_another(strategy: str, book: Notebook) -> None:
    total = "import jupyter_distrib\nint(jupyter_distrib.total(rank + 1))"
    model = "import torch\ntorch.set_default_device('cuda')\n" + trainings.MODEL.replace("AdamW", "SGD")
    found = book.ok(trainings.cell(f"--strategy {strategy} --shard-eval", model=model) + total)
    assert "steps" in found.text
    assert "ranks 0-1: 3" in found.text
