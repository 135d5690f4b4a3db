"""Cells as notebooks with a GPU have them: each must do under ddp or fsdp what it does in a plain cell."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from benchmarks.gpu_kit.place import Book, Place
from benchmarks.gpu_kit.step import Findings, step
from benchmarks.gpu_kit.steps_stop import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """A cell, and what it needs."""

    source: str
    strategies: tuple[str, ...] = ("ddp",)
    needs: tuple[str, ...] = ()
    before: str = ""
    """A cell of the notebook that comes before it."""


NET = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)).cuda()
x, y = torch.randn(32, 64).cuda(), torch.randint(0, 10, (32,)).cuda()
"""
BOTH = ("ddp", "fsdp")
HABITS = {
    "a model of transformers, checkpointed, generates": Habit(
        strategies=BOTH,
        needs=("transformers",),
        source="""
import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup
torch.manual_seed(0)
config = GPT2Config(vocab_size=512, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
model = GPT2LMHeadModel(config).to("cuda")
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 10)
ids = torch.randint(2, 512, (4, 128), device="cuda")
model.train()
for _ in range(4):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
model.eval()
with torch.no_grad():
    out = model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False, pad_token_id=1)
(bool(loss.isfinite()), out.shape[1] > 8)
""",
    ),
    "LoRA of peft": Habit(
        strategies=BOTH,
        needs=("transformers", "peft"),
        source="""
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).cuda()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
ids = torch.randint(2, 512, (4, 64), device="cuda")
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad(); loss.backward(); optimizer.step()
bool(loss.isfinite())
""",
    ),
    "a checkpoint saved and loaded to cuda:0": Habit(
        source=f"""{NET}
import os, tempfile
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = F.cross_entropy(model(x), y); optimizer.zero_grad(); loss.backward(); optimizer.step()
path = os.path.join(tempfile.mkdtemp(), "last.pt")
numbers = torch.cuda.get_rng_state()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cuda": numbers}}, path)
state = torch.load(path, map_location="cuda:0", weights_only=False)
model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
torch.cuda.set_rng_state(state["cuda"].cpu())
loss = F.cross_entropy(model(x), y); optimizer.zero_grad(); loss.backward(); optimizer.step()
round(loss.item(), 3)
""",
    ),
    "cupy on a tensor's memory": Habit(
        needs=("cupy",),
        source="""
import cupy, torch
t = torch.arange(8, device="cuda", dtype=torch.float32)
c = cupy.from_dlpack(t)
c *= 2
t.sum().item()
""",
    ),
    "a GAN": Habit(
        strategies=BOTH,
        source="""
import torch, torch.nn as nn
torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).cuda()
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 1)).cuda()
g, d = torch.optim.Adam(G.parameters(), 2e-4), torch.optim.Adam(D.parameters(), 2e-4)
bce = nn.BCEWithLogitsLoss()
real = torch.randn(64, 2, device="cuda")
for _ in range(4):
    fake = G(torch.randn(64, 8, device="cuda"))
    d_loss = bce(D(real), torch.ones(64, 1, device="cuda")) + bce(D(fake.detach()), torch.zeros(64, 1, device="cuda"))
    d.zero_grad(); d_loss.backward(); d.step()
    g_loss = bce(D(fake), torch.ones(64, 1, device="cuda"))
    g.zero_grad(); g_loss.backward(); g.step()
bool((d_loss + g_loss).isfinite())
""",
    ),
    "GradScaler and float16": Habit(
        strategies=BOTH,
        source=f"""{NET}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
assert scaler.get_scale() > 0
round(loss.item(), 3)
""",
    ),
    "a fused optimizer": Habit(
        strategies=BOTH,
        source=f"""{NET}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(5):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
round(loss.item(), 2)
""",
    ),
    "channels_last and cudnn.benchmark": Habit(
        strategies=BOTH,
        needs=("torchvision",),
        source="""
import torch, torchvision
torch.backends.cudnn.benchmark = True
torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10).cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x = torch.randn(16, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
y = torch.randint(0, 10, (16,), device="cuda")
for _ in range(4):
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
torch.backends.cudnn.benchmark = False
bool(loss.isfinite())
""",
    ),
    "torch.compile with CUDA graphs": Habit(
        source=f"""{NET}
compiled = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = F.cross_entropy(compiled(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
round(loss.item(), 3)
""",
    ),
    "torch.compile under fsdp": Habit(
        strategies=("fsdp",),
        source=f"""{NET}
model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
round(loss.item(), 3)
""",
    ),
    "make_graphed_callables": Habit(
        source=f"""{NET}
graphed = torch.cuda.make_graphed_callables(model, (x.clone(),))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(graphed(x), y)
    loss.backward(); optimizer.step()
round(loss.item(), 3)
""",
    ),
    "a kernel of Triton in the cell": Habit(
        strategies=BOTH,
        needs=("triton",),
        source="""
import torch, triton, triton.language as tl
@triton.jit
def twice(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < n), mask=at < n)
a = torch.arange(1000, device="cuda", dtype=torch.float32)
b = torch.empty_like(a)
twice[(triton.cdiv(1000, 256),)](a, b, 1000, BLOCK=256)
bool((b == 2 * a).all())
""",
    ),
    "a kernel of Triton of the notebook": Habit(
        needs=("triton",),
        before="""
import torch, triton, triton.language as tl
@triton.jit
def half(v):
    return v * 0.5
@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def halve(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, half(tl.load(source + at, mask=at < n)), mask=at < n)
class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        b = torch.empty_like(a)
        halve[lambda meta: (triton.cdiv(a.numel(), meta["BLOCK"]),)](a, b, a.numel())
        return b
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5
""",
        source="""
a = torch.arange(1000, device="cuda", dtype=torch.float32, requires_grad=True)
b = Halve.apply(a)
b.sum().backward()
(bool((b == a / 2).all()), a.grad[0].item())
""",
    ),
    "streams, events and a prefetcher": Habit(
        source=f"""{NET}
class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), torch.cuda.Stream()
        self.load()
    def load(self):
        self.batch = next(self.loader, None)
        if self.batch is not None:
            with torch.cuda.stream(self.stream):
                self.batch = [each.cuda(non_blocking=True) for each in self.batch]
    def __iter__(self):
        while self.batch is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.batch
            for each in batch: each.record_stream(torch.cuda.current_stream())
            self.load()
            yield batch
data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
loader = torch.utils.data.DataLoader(data, batch_size=32, pin_memory=True, num_workers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begin, end, batches = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), 0
begin.record()
for a, b in Prefetcher(loader):
    loss = F.cross_entropy(model(a), b)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    batches += 1
end.record(); torch.cuda.synchronize()
(batches in (4, 8), begin.elapsed_time(end) > 0)
""",
    ),
    "DataParallel and set_device": Habit(
        source=f"""{NET}
torch.cuda.set_device(0)
model = nn.DataParallel(model, device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = F.cross_entropy(model(x.to("cuda:0")), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
round(loss.item(), 3)
""",
    ),
    "the largest batch by trying": Habit(
        strategies=BOTH,
        source=f"""{NET}
optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), 2 ** 40
while True:
    try:
        loss = model(torch.randn(batch, 64, device="cuda")).pow(2).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        break
    except torch.cuda.OutOfMemoryError:
        batch //= 64
        torch.cuda.empty_cache()
batch < 2 ** 40
""",
    ),
    "figures of the GPU's memory": Habit(
        source=f"""{NET}
torch.cuda.reset_peak_memory_stats()
torch.cuda.memory._record_memory_history(max_entries=1000)
a = torch.ones(1 << 20, device="cuda"); a2 = a @ a; del a
entries = len(torch.cuda.memory._snapshot()["segments"])
torch.cuda.memory._record_memory_history(enabled=None)
(entries > 0, torch.cuda.max_memory_allocated() >= 4 << 20, "Active" in torch.cuda.memory_summary(),
 torch.cuda.mem_get_info()[0] > 0, torch.cuda.get_device_properties(0).name != "")
""",
    ),
    "torch.profiler in the cell": Habit(
        strategies=BOTH,
        source=f"""{NET}
from torch.profiler import profile, ProfilerActivity, record_function, schedule
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=2)) as prof:
    for _ in range(5):
        with record_function("step"), torch.cuda.nvtx.range("step"):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        prof.step()
"step" in prof.key_averages().table(sort_by="cuda_time_total", row_limit=50)
""",
    ),
    "deterministic algorithms": Habit(
        before="import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
        source=f"""{NET}
torch.use_deterministic_algorithms(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
torch.use_deterministic_algorithms(False)
round(loss.item(), 3)
""",
    ),
}
VALUE = re.compile(r"ranks? [-\d]+: (.*)", re.DOTALL)


@step(
    "K33", "what notebooks do with a GPU does under ddp and fsdp what a plain cell does", limit_s=200, without_gpu=None
)
def habits(place: Place, find: Findings) -> None:
    group = Group(place=place, twice="nccl")
    with place.notebook(**group.environment()) as book:  # type: ignore[arg-type]
        group.check_nccl(book)
        for name, habit in HABITS.items():
            if not all(map(importlib.util.find_spec, habit.needs)):
                continue
            if habit.before:
                book.ok(habit.before)
            wanted = _value(book, "--gpus 1", habit)
            for strategy in habit.strategies:
                found = _value(book, f"--gpus 2 --strategy {strategy}", habit)
                find.that(f"{name}, {strategy}", found == wanted, f"{found}, not {wanted}" if found != wanted else "")


def _value(book: Book, options: str, habit: Habit) -> str:
    """Return what a cell gives on each rank, or how it ends."""
    outcome = book.cell(f"%%distributed {options}\n{habit.source}", 60.0)
    told = VALUE.search(outcome.result)
    return told.group(1).strip() if outcome.status == "ok" and told else outcome.text[-700:]
