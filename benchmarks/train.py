"""The training that is timed: under torchrun as a script, and its text as the body of a cell.

The names at the top come from the environment; in a cell, the benchmark replaces them. HOW says how the model is made
data parallel (`ddp`: by hand; `prepare`; `unchanged`: not at all, since the strategy does it). Without SHARES, a rank
of ours does not measure where the time of its training goes. GO and DONE are pipes: `turns.py` says what goes through
them.
"""

import os
import time

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MODEL = os.environ.get("BENCH_MODEL", "cnn")
HOW = os.environ.get("BENCH_HOW", "ddp")
REPORTS = False
SHARES = True
GO = os.environ.get("BENCH_GO", "")
DONE = os.environ.get("BENCH_DONE", "")

if not SHARES:
    from jupyter_distrib.worker.pytorch import phase_clock

    vars(phase_clock.clock)["_thread"] = None  # it measures no thread; what the strategy has wrapped around it stays

torch.manual_seed(0)
data = TensorDataset(torch.rand(1024, 1, 8, 8), torch.randint(10, (1024,)))
if MODEL == "cnn":  # of the size of the handwritten digits
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )
elif MODEL == "tiny":  # so that what stands around a step is seen
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
else:  # 4.2 million parameters: 17 MB of gradients a step
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 2048),
        torch.nn.ReLU(),
        torch.nn.Linear(2048, 2000),
        torch.nn.ReLU(),
        torch.nn.Linear(2000, 10),
    )
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(data, batch_size=32, shuffle=True)
if HOW == "prepare":
    import jupyter_distrib

    model, optimizer, loader = jupyter_distrib.prepare(model, optimizer, loader)
elif HOW == "ddp":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
loss_of = torch.nn.CrossEntropyLoss()


def epochs():
    while True:
        yield from loader


batches = epochs()


def train(steps):
    for _ in range(steps):
        one_step()


def train_and_report(steps):
    import jupyter_distrib

    for step in jupyter_distrib.progress(range(steps), label="step"):
        loss = one_step()
        jupyter_distrib.report(loss=loss.item(), lr=0.01)
        if step % 20 == 0:
            print("step", step, "loss", round(loss.item(), 4))


def one_step():
    images, labels = next(batches)
    optimizer.zero_grad()
    loss = loss_of(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def take_turns():
    together = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    is_first = not together or torch.distributed.get_rank() == 0
    with open(GO if is_first else os.devnull) as go, open(DONE if is_first else os.devnull, "w") as done:
        while True:
            steps = torch.tensor(int(go.readline() or 0))
            if together:
                torch.distributed.broadcast(steps, 0)
                torch.distributed.barrier()
            if not steps:
                break
            began_s = time.perf_counter()
            (train_and_report if REPORTS else train)(int(steps))
            if together:
                torch.distributed.barrier()
            print(time.perf_counter() - began_s, file=done, flush=True)


take_turns()
if HOW == "ddp":
    torch.distributed.destroy_process_group()
