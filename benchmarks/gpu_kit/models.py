"""Models and trainings of the steps, imported by ranks and by plain programs alike: a ResNet, a GPT, a small net with
BatchNorm. Needs nothing but torch."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {"resnet": {"full": (64, (3, 4, 6, 3), 32, 224), "small": (8, (1, 1), 4, 32)}}


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *_conv(given, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU(), *_conv(width, out, 1)
        )
        self.aside = nn.Identity() if stride == 1 and given == out else nn.Sequential(*_conv(given, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.aside(x))


def _conv(given: int, out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(given, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)


def resnet(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return a ResNet; by default ResNet-50 without its first pooling."""
    layers: list[nn.Module] = [*_conv(3, width, 7, 4), nn.ReLU()]
    given = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            layers.append(Bottleneck(given, width << stage, 2 if stage and not number else 1))
            given = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    """GPT-2; by default with 124 million parameters."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, length: int = 512, words: int = 50257
    ) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.word.weight

    def forward(self, x: Tensor) -> Tensor:
        places = self.place.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(self.word(x) + places)))


class Branches(nn.Module):
    """A net of which every second step uses only one half."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.calls = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        used = self.halves if self.calls % 2 else self.halves[:1]
        return torch.stack([half(x) for half in used]).sum(0)


def made(name: str, device: torch.device, *, full: bool) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model on its device, and what computes its loss on fixed data."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "resnet":
        width, depths, batch, pixels = SIZES["resnet"]["full" if full else "small"]
        model = resnet(width, depths)
        x, y = torch.randn(batch, 3, pixels, pixels, device=device), torch.randint(0, 1000, (batch,), device=device)
    elif name == "gpt":
        model = Gpt() if full else Gpt(32, 2, 2, 16, 100)
        x = torch.randint(0, 50257 if full else 100, (8, 512) if full else (2, 16), device=device)
        y = x.flatten()
    else:
        model, x, y = Branches(), torch.randn(8, 64, device=device), torch.randint(0, 64, (8,), device=device)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            out = model(x)
        return functional.cross_entropy(out.float().view(len(y), -1), y)

    return model.to(device), loss


def timed(name: str, device: torch.device, wrap: Callable[[nn.Module], nn.Module], steps: int, full: bool) -> float:
    """Train; return the seconds of a step behind the first ones, in which nothing may wait for the GPU."""
    model, loss = made(name, device, full=full)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped = wrap(model)
    for _ in range(5):
        _train(wrapped, loss, optimizer)
    wait(device)
    began_s = time.monotonic()
    with no_syncs(device):
        for _ in range(steps):
            _train(wrapped, loss, optimizer)
    wait(device)
    return (time.monotonic() - began_s) / steps


def syncs(name: str, device: torch.device, steps: int) -> float:
    """Train; return how often a step has waited for the GPU."""
    model, loss = made(name, device, full=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(5):
        _train(model, loss, optimizer)
    with warnings.catch_warnings(record=True) as caught, no_syncs(device, "warn"):
        warnings.simplefilter("always")
        for _ in range(steps):
            _train(model, loss, optimizer)
    return sum("synchroniz" in str(each.message) for each in caught) / steps


def _train(model: nn.Module, loss: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


class no_syncs:  # noqa: N801 - used as a function
    """Have torch raise where the host waits for the GPU; without a GPU nothing."""

    def __init__(self, device: torch.device, how: str = "error") -> None:
        self._on, self._how = device.type == "cuda", how

    def __enter__(self) -> None:
        if self._on:
            torch.cuda.set_sync_debug_mode(self._how)

    def __exit__(self, *_: object) -> None:
        if self._on:
            torch.cuda.set_sync_debug_mode("default")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def losses(device: torch.device, rank: int, wrap: Callable[[nn.Module], Any], steps: int = 20) -> list[float]:
    """Train a net with BatchNorm on this rank's own data, deterministically; return its losses."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = nn.Sequential(
        *_conv(3, 16, 3), nn.ReLU(), *_conv(16, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model = nn.Sequential(model, nn.Linear(16, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = wrap(model)
    data = torch.Generator().manual_seed(1 + rank)
    out = []
    for _ in range(steps):
        x, y = torch.randn(8, 3, 16, 16, generator=data), torch.randint(0, 10, (8,), generator=data)
        loss = functional.cross_entropy(wrapped(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def time_here(name: str, steps: str, size: str) -> None:
    """Be the one rank of torchrun; print the seconds of a step."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    print(timed(name, device, nn.parallel.DistributedDataParallel, int(steps), size == "full"))
    torch.distributed.destroy_process_group()


def main(backend: str, store: str, device_name: str) -> None:
    """Be one rank of the plain program with DistributedDataParallel; print its losses."""
    rank, count, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    print(losses(device, rank, nn.parallel.DistributedDataParallel))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "timed":
        time_here(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
