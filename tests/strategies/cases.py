"""Single-device training cells, each with the data-parallel program that a person would write for it by hand.

A cell ends with a flat tensor of what it has trained. `code` runs under a strategy as it stands; `by_hand` runs under
`--strategy none` and makes its own process group, so nothing of a strategy can help it.
"""

from __future__ import annotations

from dataclasses import dataclass

SETUP = """
import copy, itertools, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset, WeightedRandomSampler)
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(0)
features, targets = torch.randn(48, 6), torch.randn(48, 2)
data = TensorDataset(features, targets)

class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh())
        self.head = nn.Linear(16, 2)
    def forward(self, x):
        return self.head(self.body(x))

def gathered(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t

def weights(*models):
    return torch.cat([gathered(t).detach().flatten().double() for m in models for t in m.state_dict().values()])

def update(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

torch.manual_seed(1)
model = Net()
before = weights(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)

def fit(model, optimizer, loader, epochs=2):
    for epoch in range(epochs):
        for x, y in loader:
            update(model, optimizer, x, y)

class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
    def train_step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
    def fit(self, dataset, epochs):
        self.loader = DataLoader(dataset, batch_size=8, shuffle=True)
        for _ in range(epochs):
            for batch in self.loader:
                self.train_step(batch)

class Numbers(IterableDataset):
    def __iter__(self):
        for i in range(45):
            yield features[i], targets[i]

class Backwards:
    def __len__(self):
        return 48
    def __iter__(self):
        return iter(range(47, -1, -1))
"""

HAND = """
dist.init_process_group("gloo")
torch.manual_seed(1)
def divided(dataset=data, batch=8, epochs=2, **more):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, **more)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from loader
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of training code."""

    title: str
    """As the table of the documentation names it."""
    code: str
    by_hand: str
    options: str = ""
    slow: bool = True
    """Left out of the quick tests."""
    sharded: str = "equal"
    """What comes of it under `--strategy fsdp`, as the table says it."""
    note: str = ""
    """What the table adds to that."""
    says: str = ""
    """If that is an error: what can be read under the cell; the ranks that wait for one another are not tested here."""

    def __str__(self) -> str:
        return self.title.replace(" ", "-")


_SIMPLE = """
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in divided():
    update(model, optimizer, x, y)
weights(model.module)
"""

CASES = (
    Case(
        title="model built in the cell",
        slow=False,
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
weights(model)
""",
        by_hand=_SIMPLE,
    ),
    Case(
        title="model captured from the notebook",
        code="""
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        update(model, optimizer, x, y)
weights(model)
""",
        by_hand=_SIMPLE,
    ),
    Case(
        title="model, optimizer, loader and loop from other cells",
        slow=False,
        code="""
fit(model, optimizer, loader)
weights(model)
""",
        by_hand=_SIMPLE,
    ),
    Case(
        title="a Trainer class",
        code="""
torch.manual_seed(1)
trainer = Trainer(Net(), 0.05)
trainer.fit(data, 2)
weights(trainer.model)
""",
        by_hand="""
trainer = Trainer(DistributedDataParallel(Net()), 0.05)
for batch in divided():
    trainer.train_step(batch)
weights(trainer.model.module)
""",
    ),
    Case(
        title="two models and two optimizers (GAN)",
        code="""
torch.manual_seed(1)
maker, critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 6)), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
of_maker, of_critic = torch.optim.Adam(maker.parameters(), lr=1e-2), torch.optim.Adam(critic.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, z in loader:
        fake = maker(z)
        of_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_maker.zero_grad()
        (-critic(fake).mean()).backward()
        of_maker.step()
weights(maker, critic)
""",
        by_hand="""
maker, critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 6)), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
maker, critic = DistributedDataParallel(maker), DistributedDataParallel(critic)
of_maker, of_critic = torch.optim.Adam(maker.parameters(), lr=1e-2), torch.optim.Adam(critic.parameters(), lr=1e-2)
for x, z in divided():
    fake = maker(z)
    of_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(x).mean()).backward()
    of_critic.step()
    of_maker.zero_grad()
    (-critic(fake).mean()).backward()
    of_maker.step()
weights(maker.module, critic.module)
""",
    ),
    Case(
        title="gradient accumulation",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        (F.mse_loss(model(x), y) / 3).backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for i, (x, y) in enumerate(divided(batch=4)):
    with model.no_sync() if (i + 1) % 3 else torch.enable_grad():
        (F.mse_loss(model(x), y) / 3).backward()
    if (i + 1) % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
weights(model.module)
""",
    ),
    Case(
        title="gradient clipping",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in divided():
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
weights(model.module)
""",
    ),
    Case(
        title="a learning-rate scheduler for each step",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps_per_epoch=len(loader), epochs=2)
for epoch in range(2):
    for x, y in loader:
        update(model, optimizer, x, y)
        scheduler.step()
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps_per_epoch=3, epochs=2)
for x, y in divided():
    update(model, optimizer, x, y)
    scheduler.step()
weights(model.module)
""",
    ),
    Case(
        title="frozen parameters, thawed later",
        code="""
torch.manual_seed(1)
model = Net()
model.body.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(4):
    model.body.requires_grad_(epoch % 2 == 1)
    for x, y in loader:
        update(model, optimizer, x, y)
weights(model)
""",
        by_hand="""
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i, (x, y) in enumerate(divided(epochs=4)):
    if i % 3 == 0:
        model.body.requires_grad_(i // 3 % 2 == 1)
        wrapped = DistributedDataParallel(model)
    update(wrapped, optimizer, x, y)
weights(model)
""",
    ),
    Case(
        title="parameters that get no gradient, now and then",
        sharded="not if ranks call different modules",
        code="""
torch.manual_seed(1)
model = nn.ModuleDict({"net": Net(), "sometimes": nn.Linear(2, 2), "never": nn.Linear(2, 2)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
step = 0
for epoch in range(4):
    for x, y in loader:
        out = model["net"](x)
        if step % 3 == 1 or (step == 6 and rank == 0):
            out = model["sometimes"](out)
        optimizer.zero_grad()
        F.mse_loss(out, y).backward()
        optimizer.step()
        step += 1
weights(model)
""",
        by_hand="""
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"net": Net(), "sometimes": nn.Linear(2, 2), "never": nn.Linear(2, 2)})
    def forward(self, x, more):
        out = self.parts["net"](x)
        return self.parts["sometimes"](out) if more else out
model = DistributedDataParallel(Both(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
for step, (x, y) in enumerate(divided(epochs=4)):
    optimizer.zero_grad()
    F.mse_loss(model(x, step % 3 == 1 or (step == 6 and rank == 0)), y).backward()
    optimizer.step()
weights(model.module)
""",
    ),
    Case(
        title="BatchNorm",
        code="""
torch.manual_seed(1)
model = Net(norm=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        update(model, optimizer, x, y)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net(norm=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in divided():
    update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="an evaluation under no_grad",
        code="""
torch.manual_seed(1)
model = Net(norm=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
held_out = DataLoader(Subset(data, range(47)), batch_size=8)
losses = []
for epoch in range(2):
    model.train()
    for x, y in loader:
        update(model, optimizer, x, y)
    model.eval()
    with torch.no_grad():
        total = sum(F.mse_loss(model(x), y, reduction="sum") for x, y in held_out)
    losses += [total / 94, len(held_out)]
torch.cat([weights(model), torch.tensor(losses).double()])
""",
        by_hand="""
model = DistributedDataParallel(Net(norm=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for i, (x, y) in enumerate(divided()):
    model.train()
    update(model, optimizer, x, y)
    if i % 3 == 2:
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0)
        model.eval()
        with torch.no_grad():
            losses += [F.mse_loss(model.module(features[:47]), targets[:47]), 6]
torch.cat([weights(model.module), torch.tensor(losses).double()])
""",
    ),
    Case(
        title="an evaluation with --shard-eval",
        options="--shard-eval",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fit(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
held_out = DataLoader(Subset(data, range(33)), batch_size=8)
with torch.no_grad():
    total = sum(F.mse_loss(model(x), y, reduction="sum") for x, y in held_out)
    seen = sum(len(x) for x, y in held_out)
assert seen == (17, 16)[rank]
total, seen = jupyter_distrib.total(total, seen)
torch.cat([weights(model), torch.tensor([total / 66, seen]).double()])
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in divided():
    update(model, optimizer, x, y)
with torch.no_grad():
    loss = F.mse_loss(model.module(features[:33]), targets[:33])
torch.cat([weights(model.module), torch.tensor([loss, 33]).double()])
""",
    ),
    Case(
        title="an IterableDataset",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Numbers(), batch_size=4)
for epoch in range(2):
    for x, y in loader:
        update(model, optimizer, x, y)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mine = list(Numbers())[:44][rank::2]
for epoch in range(2):
    for x, y in DataLoader(mine, batch_size=4):
        update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="a sampler of one's own",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, sampler=Backwards())
for epoch in range(2):
    for x, y in loader:
        update(model, optimizer, x, y)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, y in DataLoader(Subset(data, list(Backwards())[rank::2]), batch_size=8):
        update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="a random sampler whose order differs between ranks",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(7 + rank)
for x, y in DataLoader(data, batch_size=8, sampler=WeightedRandomSampler([1.0] * 48, 31)):
    update(model, optimizer, x, y)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(7)
torch.empty((), dtype=torch.int64).random_()  # the seed that a data loader draws for its workers
order = list(WeightedRandomSampler([1.0] * 48, 31))
order += order[:1]
for x, y in DataLoader(Subset(data, order[rank::2]), batch_size=8):
    update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="a batch sampler of one's own",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batches = BatchSampler(SequentialSampler(range(45)), 9, drop_last=False)
for epoch in range(2):
    for x, y in DataLoader(data, batch_sampler=batches):
        update(model, optimizer, x, y)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batches = list(BatchSampler(SequentialSampler(range(45)), 9, drop_last=False))
for epoch in range(2):
    for x, y in DataLoader(data, batch_sampler=[*batches, batches[0]][rank::2]):
        update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="data loader workers",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
fit(model, optimizer, DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True))
weights(model)
""",
        by_hand=_SIMPLE,
    ),
    Case(
        title="bf16 autocast",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in divided():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()
weights(model.module)
""",
    ),
    Case(
        title="the batch size split, with --batch global",
        options="--batch global",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
fit(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in divided(batch=4):
    update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="a model that is used through its methods",
        code="""
class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 3), nn.Linear(3, 6)
    def encode(self, x): return self.inner(x).tanh()
    def loss(self, x): return F.mse_loss(self.outer(self.encode(x)), x)
torch.manual_seed(1)
model = Coder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, _ in loader:
        optimizer.zero_grad()
        model.loss(x).backward()
        optimizer.step()
weights(model)
""",
        by_hand="""
class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 3), nn.Linear(3, 6)
    def forward(self, x): return F.mse_loss(self.outer(self.inner(x).tanh()), x)
model = DistributedDataParallel(Coder())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, _ in divided():
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
weights(model.module)
""",
    ),
    Case(
        title="tensors that no module owns",
        sharded="refused",
        says="SGD (line 4) trains a tensor of shape (6,) that belongs to no module, and only modules can be sharded",
        code="""
scale, shift = torch.ones(6, requires_grad=True), nn.Parameter(torch.zeros(6))
optimizer = torch.optim.SGD([scale, shift], lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        (x * scale + shift).pow(2).mean().backward()
        optimizer.step()
torch.cat([scale, shift]).detach().double()
""",
        by_hand="""
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
    def forward(self, x): return x * self.scale + self.shift
model = DistributedDataParallel(Both())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in divided():
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
weights(model.module)
""",
    ),
    Case(
        title="a data set that grows from epoch to epoch",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
seen = Subset(data, list(range(16)))
loader = DataLoader(seen, batch_size=8, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        update(model, optimizer, x, y)
    seen.indices += range(len(seen), len(seen) + 16)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    some = Subset(data, list(range(16 * (epoch + 1))))
    sampler = DistributedSampler(some)
    sampler.set_epoch(epoch)
    for x, y in DataLoader(some, batch_size=8, sampler=sampler):
        update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="activation checkpointing inside the model, both ways",
        code="""
from torch.utils.checkpoint import checkpoint
class Saving(Net):
    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))
torch.manual_seed(1)
model = Saving()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for model.reentrant in (False, True):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.mse_loss(model(x.requires_grad_()), y).backward()
        optimizer.step()
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in divided():
    update(model, optimizer, x, y)
weights(model.module)
""",
    ),
    Case(
        title="activation checkpointing of parts that are called from outside the model",
        sharded="refused: parts of the model are called",
        says="a part or a method of a sharded model was called",
        code="""
from torch.utils.checkpoint import checkpoint
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for reentrant in (True, False):
    for x, y in loader:
        optimizer.zero_grad()
        x.requires_grad_()
        F.mse_loss(model.head(checkpoint(model.body, x, use_reentrant=reentrant)), y).backward()
        optimizer.step()
weights(model)
""",
        by_hand=_SIMPLE,
    ),
    Case(
        title="a gradient penalty",
        sharded="refused: no second derivatives",
        says="a gradient with create_graph=True (line 12) is to be differentiated again, and FSDP frees the parameters of Net",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        x.requires_grad_()
        out = model(x)
        slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.mse_loss(out, y) + slope.pow(2).mean()).backward()
        optimizer.step()
weights(model)
""",
        by_hand="""
model = Net()
for p in model.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in divided():
    optimizer.zero_grad()
    x.requires_grad_()
    out = model(x)
    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
    (F.mse_loss(out, y) + slope.pow(2).mean()).backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2
    optimizer.step()
weights(model)
""",
    ),
    Case(
        title="LBFGS, which chooses its step by the loss of a closure",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
for x, y in DataLoader(data, batch_size=12, shuffle=True):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
weights(model)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
for x, y in divided(batch=12, epochs=1):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        loss = loss.detach().double()
        dist.all_reduce(loss)
        return loss / 2
    optimizer.step(closure)
weights(model.module)
""",
        note="see below",
    ),
    Case(
        title="ReduceLROnPlateau, told the loss of training",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for x, y in itertools.chain.from_iterable(DataLoader(data, batch_size=4, shuffle=True) for _ in range(3)):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step(loss.item())
torch.cat([weights(model), torch.tensor([optimizer.param_groups[0]["lr"]]).double()])
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for x, y in divided(batch=4, epochs=3):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach().double()
    dist.all_reduce(loss)
    schedule.step(loss.item() / 2)
assert optimizer.param_groups[0]["lr"] < 0.4
torch.cat([weights(model.module), torch.tensor([optimizer.param_groups[0]["lr"]]).double()])
""",
    ),
    Case(
        title="a moving average of the model",
        sharded="refused: copy it before there is an optimizer, and `prepare()` the copy",
        says="give the copy to jupyter_distrib.prepare()",
        code="""
torch.manual_seed(1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average = copy.deepcopy(model).requires_grad_(False)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        update(model, optimizer, x, y)
        for slow, fast in zip(average.parameters(), model.parameters()):
            slow.lerp_(fast, 0.1)
weights(model, average)
""",
        by_hand="""
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average = copy.deepcopy(model.module).requires_grad_(False)
for x, y in divided():
    update(model, optimizer, x, y)
    for slow, fast in zip(average.parameters(), model.module.parameters()):
        slow.lerp_(fast, 0.1)
weights(model.module, average)
""",
    ),
    Case(
        title="a model from torch.compile",
        code="""
torch.manual_seed(1)
model = Net()
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(compiled.parameters(), lr=1e-2)
fit(compiled, optimizer, DataLoader(data, batch_size=8, shuffle=True))
weights(model)
""",
        by_hand=_SIMPLE,
    ),
)

_SLICED = """
torch.manual_seed(1)
model = {model}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mine = TensorDataset(features[rank::world_size], targets[rank::world_size])
fit(model, optimizer, DataLoader(mine, batch_size=8))
weights({whole})
"""
_SLICED_INDICES = """
torch.manual_seed(1)
model = {model}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mine = list(range(48))[rank * 48 // world_size : (rank + 1) * 48 // world_size]
fit(model, optimizer, DataLoader(data, batch_size=8, sampler=mine))
weights({whole})
"""
_SLICED_STREAM = """
class Mine(IterableDataset):
    def __iter__(self):
        return itertools.islice(data, rank, None, world_size)
torch.manual_seed(1)
model = {model}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
fit(model, optimizer, DataLoader(Mine(), batch_size=8))
weights({whole})
"""

BY_HAND = (
    Case(
        title="own process group, DistributedDataParallel and sampler",
        slow=False,
        code=HAND + _SIMPLE,
        by_hand=_SIMPLE,
    ),
    Case(
        title="own DistributedDataParallel and sampler",
        code=HAND.replace('dist.init_process_group("gloo")', "") + _SIMPLE,
        by_hand=_SIMPLE,
    ),
    Case(
        title="own DistributedDataParallel around a model that has its optimizer already",
        sharded="refused",
        says="Net is sharded already, by --strategy fsdp when its optimizer was built",
        code=HAND.replace('dist.init_process_group("gloo")', "")
        + """
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model = DistributedDataParallel(model)
for x, y in divided():
    update(model, optimizer, x, y)
weights(model.module)
""",
        by_hand=_SIMPLE,
    ),
    Case(
        title="own sampler only",
        code=HAND.replace('dist.init_process_group("gloo")', "")
        + _SIMPLE.replace("DistributedDataParallel(Net())", "Net()").replace(".module", ""),
        by_hand=_SIMPLE,
    ),
    Case(
        title="data sliced by hand, `features[rank::world_size]`",
        code=_SLICED.format(model="Net()", whole="model"),
        by_hand=_SLICED.format(model="DistributedDataParallel(Net())", whole="model.module"),
    ),
    Case(
        title="indices sliced by hand, in a sampler",
        code=_SLICED_INDICES.format(model="Net()", whole="model"),
        by_hand=_SLICED_INDICES.format(model="DistributedDataParallel(Net())", whole="model.module"),
    ),
    Case(
        title="an IterableDataset that asks for its rank",
        code=_SLICED_STREAM.format(model="Net()", whole="model"),
        by_hand=_SLICED_STREAM.format(model="DistributedDataParallel(Net())", whole="model.module"),
    ),
)


def table() -> str:
    """What the documentation says of all this, for strategies whose tests pass."""
    lines = ["| training code | `ddp` | `fsdp`, and `tp` with `data=2` |", "|---|---|---|"]
    lines += [f"| {case.title} | equal | {case.sharded}{case.note and f', but {case.note}'} |" for case in CASES]
    for case in BY_HAND:
        lines.append(f"| {case.title} | left alone, equal | {case.sharded.replace('equal', 'left alone, equal')} |")
    return "\n".join(lines)
