"""The training that is timed: under torchrun as a script, and its text as the body of a cell.

Prints, on rank 0, `steps/s: NUMBER`. Which model, and how it is made data parallel (`ddp`: by hand; `prepare`;
`unchanged`: not at all, since the strategy does it), stands in the three names at the top, which the benchmark
replaces.
"""

import os
import time

import torch

MODEL = os.environ.get("BENCH_MODEL", "cnn")
STEPS = int(os.environ.get("BENCH_STEPS", "200"))
HOW = os.environ.get("BENCH_HOW", "ddp")

torch.manual_seed(0)
images, labels = torch.rand(1024, 1, 8, 8), torch.randint(10, (1024,))
if MODEL == "cnn":  # of the size of the handwritten digits
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )
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
if HOW == "prepare":
    import jupyter_distrib

    model, optimizer = jupyter_distrib.prepare(model, optimizer)
elif HOW == "ddp":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
loss_of = torch.nn.CrossEntropyLoss()


def train(steps):
    for step in range(steps):
        start = 32 * (step % 32)
        optimizer.zero_grad()
        loss_of(model(images[start : start + 32]), labels[start : start + 32]).backward()
        optimizer.step()


train(20)
torch.distributed.barrier()
began_s = time.perf_counter()
train(STEPS)
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    print("steps/s:", STEPS / (time.perf_counter() - began_s))
if HOW == "ddp":
    torch.distributed.destroy_process_group()
