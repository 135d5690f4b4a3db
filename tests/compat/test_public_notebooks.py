"""Public notebooks of other platforms, which nobody here has written: their own lines, made smaller, from top to bottom.

What a notebook takes from its platform and not from the interface, such as `dbutils`, secrets and paths, is left out, and so
is the download of data. Those that need a library are in the folder of its tests.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def executed(folder: Path, platforms: str, cells: list[str], env: dict[str, str] | None = None) -> list[Outcome]:
    """What each cell left, in a notebook with the import names of these platforms."""
    with Notebook(folder, env) as book:
        book.ok(f"%load_ext jupyter_distrib\n%distributed_compat {platforms}")
        return [book.ok(cell) for cell in cells]


def test_the_first_example_of_the_serverless_gpu_pages(tmp_path: Path) -> None:
    *_, last = executed(
        tmp_path,
        "databricks",
        [
            "from serverless_gpu import distributed\nfrom serverless_gpu import runtime as rt",
            """\
@distributed(gpus=2)
def hello_world(name: str) -> list[int]:
    if rt.get_local_rank() == 0:
        print('hello world', name)
    return rt.get_global_rank()

result = hello_world.distributed('Example')
""",
            "assert result == [0, 1]\nresult[0], len(result)",
        ],
    )
    assert last.result == "(0, 2)"


def test_the_quick_start_of_the_page_on_distributed_training_in_notebooks(tmp_path: Path) -> None:
    trained, shown = executed(
        tmp_path,
        "databricks",
        [
            """\
from databricks.air import distributed

@distributed(num_accelerators=2)
def train():
    import os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(10, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        loss = model(torch.randn(8, 10, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.4f} on {dist.get_world_size()} processes")
    weight = model.module.weight.detach().sum().item()
    dist.destroy_process_group()
    return weight

results = train.distributed()
""",
            "results[0] == results[1], len(results)",
        ],
    )
    assert "on 2 processes" in trained.view
    assert shown.result == "(True, 2)"


BUILDERS = """\
import torch
from torch import nn
from pyspark.ml.torch.distributor import TorchDistributor
NUM_WORKERS, LOCAL_MODE, USE_GPU, EPOCHS = 2, True, False, 6

class Discriminator(nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_features, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, x):
        return self.net(x)
"""
ADVERSARIAL = """\
def distributed_train_gan(gen_builder, disc_builder, shard_path, noise_dim, label="GAN", epochs=EPOCHS, batch_size=16,
                          num_processes=NUM_WORKERS, local_mode=LOCAL_MODE):
    def train_fn():
        import torch as _torch
        import torch.nn as _nn
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        backend = "nccl" if _torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend=backend)
        rank, world = dist.get_rank(), dist.get_world_size()
        g_base, d_base = gen_builder(), disc_builder()
        G = DDP(g_base) if world > 1 else g_base
        D = DDP(d_base) if world > 1 else d_base
        X = _torch.load(f"{shard_path}/_shard={rank}.pt")
        optG, optD = _torch.optim.Adam(G.parameters(), lr=1e-3), _torch.optim.Adam(D.parameters(), lr=1e-3)
        bce = _nn.BCELoss()
        n = X.shape[0]
        for ep in range(epochs):
            perm = _torch.randperm(n)
            for i in range(0, n, batch_size):
                real = X[perm[i:i + batch_size]]
                bs = real.shape[0]
                fake = G(_torch.randn(bs, noise_dim)).detach()
                optD.zero_grad()
                d_loss = bce(D(real), _torch.ones(bs, 1)) + bce(D(fake), _torch.zeros(bs, 1))
                d_loss.backward()
                optD.step()
                optG.zero_grad()
                g_loss = bce(D(G(_torch.randn(bs, noise_dim))), _torch.ones(bs, 1))
                g_loss.backward()
                optG.step()
            if rank == 0 and ((ep + 1) % 5 == 0 or ep == epochs - 1):
                print(f"    [{label}][rank0/{world}] epoch {ep + 1}/{epochs} D={d_loss.item():.4f} G={g_loss.item():.4f}")
        dist.barrier()
        state = None
        if rank == 0:
            state = {
                "G": {k: v.detach().cpu() for k, v in g_base.state_dict().items()},
                "D": {k: v.detach().cpu() for k, v in d_base.state_dict().items()},
            }
        dist.destroy_process_group()
        return state

    print(f"[TorchDistributor] {label}: launching {num_processes}-way DDP")
    states = TorchDistributor(num_processes=num_processes, local_mode=local_mode, use_gpu=USE_GPU).run(train_fn)
    G, D = gen_builder(), disc_builder()
    G.load_state_dict(states["G"]); G.eval()
    D.load_state_dict(states["D"]); D.eval()
    return G, D
"""


def test_an_adversarial_training_from_shards_returns_the_states_of_rank_0(tmp_path: Path) -> None:
    *_, trained, shown = executed(
        tmp_path,
        "spark",
        [
            BUILDERS,
            ADVERSARIAL,
            "for rank in range(NUM_WORKERS):\n    torch.save(torch.randn(40, 3), f'_shard={rank}.pt')",
            (
                "G, D = distributed_train_gan(lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)),"
                " lambda: Discriminator(3), '.', 2)"
            ),
            "G.training, D(G(torch.randn(4, 2))).shape",
        ],
    )
    assert "[GAN][rank0/2] epoch 5/6 D=" in trained.view
    assert shown.result == "(False, torch.Size([4, 1]))"


def test_a_trainer_whose_method_is_run_from_a_file_of_modules(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        dedent("""\
            class args:
                epochs = 2
                features = 3
        """)
    )
    (tmp_path / "model.py").write_text(
        dedent("""\
            import torch

            class BERT4Rec(torch.nn.Module):
                def __init__(self, args):
                    super().__init__()
                    self.layer = torch.nn.Linear(args.features, 1)

                def forward(self, x):
                    return self.layer(x)
        """)
    )
    (tmp_path / "trainer.py").write_text(
        dedent("""\
            import os
            import torch
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel as DDP
            from torch.utils.data import DataLoader, DistributedSampler

            class Trainer:
                def __init__(self, args, model, dataset):
                    self.args, self.model, self.dataset = args, model, dataset

                def train(self):
                    dist.init_process_group('gloo')
                    model = DDP(self.model)
                    sampler = DistributedSampler(self.dataset)
                    loader = DataLoader(self.dataset, batch_size=4, sampler=sampler)
                    optimizer = torch.optim.Adam(model.parameters())
                    for epoch in range(self.args.epochs):
                        sampler.set_epoch(epoch)
                        for (x,) in loader:
                            optimizer.zero_grad()
                            loss = model(x).pow(2).mean()
                            loss.backward()
                            optimizer.step()
                    if dist.get_rank() == 0:
                        torch.save(self.model.state_dict(), 'best.pt')
                    dist.destroy_process_group()

                def test(self):
                    self.model.load_state_dict(torch.load('best.pt'))
                    return sorted(self.model.state_dict())
        """)
    )
    (outcome,) = executed(
        tmp_path,
        "spark",
        [
            """\
from pyspark.ml.torch.distributor import TorchDistributor

import torch
from model import BERT4Rec
from config import *
from trainer import Trainer

if __name__ == "__main__":
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    dataset = torch.utils.data.TensorDataset(torch.randn(32, args.features))
    model = BERT4Rec(args)
    trainer = Trainer(args, model, dataset)
    distributor.run(trainer.train)
    print(trainer.test())
"""
        ],
    )
    assert outcome.stdout == "['layer.bias', 'layer.weight']\n"


HOROVOD = [
    """\
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
from time import time

PYTORCH_DIR = 'horovod_pytorch'
LOG_DIR = os.path.join(PYTORCH_DIR, str(time()), 'MNISTDemo')
os.makedirs(LOG_DIR)
batch_size, num_epochs, momentum, log_interval = 10, 3, 0.5, 100

class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(576, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv1(x)), 2))
        x = self.fc1(x.view(-1, 576))
        return F.log_softmax(x)
""",
    """\
def train_one_epoch(model, device, data_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(data_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print('Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}'.format(
                epoch, batch_idx * len(data), len(data_loader) * len(data),
                100. * batch_idx / len(data_loader), loss.item()))

def save_checkpoint(model, optimizer, epoch):
  filepath = LOG_DIR + '/checkpoint-{epoch}.pth.tar'.format(epoch=epoch)
  state = {
    'model': model.state_dict(),
    'optimizer': optimizer.state_dict(),
  }
  torch.save(state, filepath)
""",
    "import torch.optim as optim\nimport horovod.torch as hvd\nfrom sparkdl import HorovodRunner",
    """\
def train_hvd(learning_rate):
  hvd.init()
  device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
  if device.type == 'cuda':
    torch.cuda.set_device(hvd.local_rank())
  train_dataset = torch.utils.data.TensorDataset(torch.randn(60, 1, 28, 28), torch.randint(10, (60,)))

  from torch.utils.data.distributed import DistributedSampler
  train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
  train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=batch_size, sampler=train_sampler)
  model = Net().to(device)
  optimizer = optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=momentum)
  optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
  hvd.broadcast_parameters(model.state_dict(), root_rank=0)
  for epoch in range(1, num_epochs + 1):
    train_one_epoch(model, device, train_loader, optimizer, epoch)
    if hvd.rank() == 0:
      save_checkpoint(model, optimizer, epoch)
""",
    "hr = HorovodRunner(np=2)\nhr.run(train_hvd, learning_rate = 0.001)",
    "print(*sorted(os.listdir(LOG_DIR)), *sorted(torch.load(LOG_DIR + '/checkpoint-3.pth.tar')))",
]


def test_horovodrunner_s_notebook_of_mnist_trains_and_saves_on_rank_0(tmp_path: Path) -> None:
    *_, shown = executed(tmp_path, "horovod", HOROVOD)
    assert shown.stdout.split() == [*(f"checkpoint-{epoch}.pth.tar" for epoch in (1, 2, 3)), "model", "optimizer"]
