"""Training cells of many kinds, which a dry run plays up to the second step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dry_run.play import play

pytestmark = pytest.mark.slow

HEAD = """\
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
data = TensorDataset(torch.randn(2048, 32), torch.randint(0, 10, (2048,)))
loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=2, pin_memory=True)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
"""
ADAM = "opt = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
STEP = "    opt.zero_grad(); loss.backward(); opt.step()\n"
LOSS = "    loss = F.cross_entropy(model(x), y)\n"
FOR = "for x, y in loader:\n"
CELLS = {
    "accumulation and clipping": HEAD
    + ADAM
    + """\
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); opt.zero_grad()
""",
    "autocast and GradScaler": HEAD
    + ADAM
    + """\
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt); scaler.update(); opt.zero_grad()
""",
    "a scheduler that steps with the loss": HEAD
    + ADAM
    + "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)\n"
    + FOR
    + LOSS
    + STEP
    + "    plan.step(loss.item())\n",
    "one cycle": HEAD
    + "opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)\n"
    + "plan = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=len(loader))\n"
    + FOR
    + LOSS
    + STEP
    + "    plan.step()\n",
    "two optimizers": """\
import torch, torch.nn as nn
make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
of_make, of_judge = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())
for (real,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 16)), batch_size=16):
    fake = make(torch.randn(len(real), 8, device=real.device))
    of_judge.zero_grad()
    (judge(fake.detach()).mean() - judge(real).mean()).backward()
    of_judge.step()
    of_make.zero_grad()
    (-judge(fake).mean()).backward()
    of_make.step()
""",
    "checkpointing": """\
import torch, torch.nn as nn
from torch.utils.checkpoint import checkpoint
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x
model = Deep()
opt = torch.optim.AdamW(model.parameters())
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 32)), batch_size=16):
    model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
""",
    "functions and an evaluation": HEAD
    + ADAM
    + """\
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    return loss.item()
def evaluate():
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(data)
for epoch in range(2):
    best = min(step(x, y) for x, y in loader)
    print(epoch, best, evaluate())
""",
    "values decide": HEAD
    + ADAM
    + "best = float('inf')\n"
    + FOR
    + LOSS
    + STEP
    + """\
    if loss.item() < best: best = loss.item()
    if torch.isnan(loss): raise ValueError('nan')
    if not torch.isfinite(loss).all(): break
    print(f'{loss:.3f}', float(loss), loss.tolist(), loss.detach().cpu().numpy())
""",
    "random split": HEAD
    + ADAM
    + "train, rest = random_split(data, [2000, 48])\nloader = DataLoader(train, batch_size=16, shuffle=True)\n"
    + FOR
    + LOSS
    + STEP,
    "an average of weights": HEAD
    + ADAM
    + "averaged = torch.optim.swa_utils.AveragedModel(model)\n"
    + FOR
    + LOSS
    + STEP
    + "    averaged.update_parameters(model)\n",
    "a closure": HEAD
    + "opt = torch.optim.LBFGS(model.parameters(), max_iter=2)\n"
    + FOR
    + """\
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    opt.step(closure)
""",
    "sequences": """\
import torch, torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
class Words(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return torch.randint(0, 100, (5 + i % 7,)), i % 2
def collate(items):
    return pad_sequence([each for each, _ in items], batch_first=True), torch.tensor([each for _, each in items])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(100, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 2)
    def forward(self, x):
        return self.out(self.lstm(self.words(x))[0][:, -1])
model = Net()
opt = torch.optim.RMSprop(model.parameters())
for x, y in torch.utils.data.DataLoader(Words(), batch_size=8, collate_fn=collate):
    nn.functional.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
""",
    "a transformer with a mask": """\
import torch, torch.nn as nn
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
opt = torch.optim.AdamW(model.parameters(), fused=True)
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 12, 32)), batch_size=16):
    mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    model(x, src_key_padding_mask=mask).pow(2).mean().backward(); opt.step(); opt.zero_grad()
""",
    "frozen layers": HEAD
    + "for each in model[0].parameters(): each.requires_grad_(False)\n"
    + "opt = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])\n"
    + FOR
    + LOSS
    + STEP,
    "compiled": HEAD + "model = torch.compile(model)\n" + ADAM + FOR + LOSS + STEP,
    "a stream": """\
import torch, torch.nn as nn
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(1000): yield torch.randn(16)
model = nn.Linear(16, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(Stream(), batch_size=8):
    model(x).sum().backward(); opt.step(); opt.zero_grad()
""",
    "numpy data": """\
import numpy as np, torch, torch.nn as nn
class Images(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i):
        x = torch.from_numpy(np.random.rand(3, 32, 32).astype('float32'))
        if torch.rand(1) < 0.5: x = x.flip(2)
        return (x - x.mean()) / (x.std() + 1e-6), i % 10
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(Images(), batch_size=16, shuffle=True):
    nn.functional.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
""",
    "masks and indices": HEAD
    + ADAM
    + FOR
    + "    keep = y != 3\n    loss = F.cross_entropy(model(x)[keep], y[keep])\n"
    + STEP
    + "    top = model(x).topk(3).indices.unique()\n",
    "saved as it goes": HEAD
    + ADAM
    + FOR
    + LOSS
    + STEP
    + "    torch.save({'model': model.state_dict(), 'opt': opt.state_dict()}, 'last.pt')\n",
    "distributed code of torch": """\
import torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group('nccl')
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4).cuda())
opt = torch.optim.AdamW(model.parameters())
sampler = torch.utils.data.distributed.DistributedSampler(range(512))
for x in torch.utils.data.DataLoader(torch.randn(512, 16), batch_size=8, sampler=sampler):
    loss = model(x.cuda()).sum()
    loss.backward(); opt.step(); opt.zero_grad()
    dist.all_reduce(loss.detach())
    dist.barrier()
dist.destroy_process_group()
""",
    "fully_shard of torch": """\
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group('nccl')
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).cuda()
for layer in model: fully_shard(layer)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 16, device='cuda')).sum().backward(); opt.step(); opt.zero_grad()
""",
}
OWN_GROUP = ("distributed code of torch", "fully_shard of torch")
UNDER_FSDP = (
    "accumulation and clipping",
    "autocast and GradScaler",
    "two optimizers",
    "checkpointing",
    "functions and an evaluation",
    "values decide",
    "sequences",
    "frozen layers",
)
CASES = [
    *((name, "none" if name in OWN_GROUP else "ddp") for name in CELLS),
    *((name, "fsdp") for name in UNDER_FSDP),
]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_training_cell_is_played_to_its_second_step(name: str, strategy: str, tmp_path: Path) -> None:
    found = play(CELLS[name], strategy, folder=tmp_path)
    assert (found.verdict, found.refused, found.error) == ("fits", "", None), repr(found)
    assert found.steps >= 2
    assert found.by_kind.get("parameters", 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_refuses_to_save_is_an_error_of_the_dry_run() -> None:
    found = play(CELLS["saved as it goes"], "fsdp")
    assert found.error is not None
    assert found.error.text.startswith("torch.save() would write this rank's shards only")


def test_what_needs_values_says_nothing_about_a_real_run() -> None:
    found = play("import torch\nx = torch.randn(8)\ntorch.repeat_interleave(x, torch.randint(0, 3, (8,)))")
    assert found.verdict == "cannot be run dry"
    assert "on line 3 (torch.repeat_interleave(x" in found.refused


class OnAnotherMachine:
    """A value that cannot be rebuilt in another process."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("nothing",)


def test_a_value_that_cannot_be_rebuilt_is_no_failure_of_the_cell() -> None:
    found = play("print(value)", inputs={"value": OnAnotherMachine()})
    assert found.verdict == "cannot be run dry"
    assert "`value` cannot be rebuilt" in found.refused


def test_trackers_do_nothing_and_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise RuntimeError('the tracker was loaded')")
    source = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport wandb\nrun = wandb.init(project='x')\n"
        f"run.log({{'loss': 1}})\nwith wandb.init() as run: run.summary['a'] = 1\n"
        f"open({str(tmp_path / 'written.txt')!r}, 'w').close()\n"
    )
    found = play(source, path=(str(tmp_path),))
    assert found.error is None, repr(found)
    assert found.files == [str(tmp_path / "written.txt")]


def test_attention_takes_the_memory_of_a_kernel_of_gpus() -> None:
    """The plain one would hold a matrix of 8 GB."""
    found = play(
        "import torch\nq = torch.randn(2, 16, 8192, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)\nout.sum().backward()"
    )
    assert found.error is None, repr(found)
    assert 1e8 < found.peak_bytes < 4e8


def test_the_lines_whose_values_are_guessed_are_listed() -> None:
    found = play(CELLS["values decide"], "ddp")
    assert {line for _, line in found.guesses} == {11, 12, 13, 14}
    assert "values had to be guessed on line 11, line 12, line 13, line 14" in repr(found)
