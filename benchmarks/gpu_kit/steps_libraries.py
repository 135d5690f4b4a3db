"""Trainings as people write them: fsdp in bfloat16, loaders with workers, libraries that train, compiled models."""

from __future__ import annotations

import importlib.util
import statistics

from benchmarks.gpu_kit.place import PID, Place, running
from benchmarks.gpu_kit.step import Findings, Skipped, step, until
from benchmarks.gpu_kit.steps_stop import MEET, MODEL, STEPS_OF

FINITE = """
import torch
[(bool(torch.isfinite(p.to_local()).all()), str(p.dtype)) for p in model.parameters()][0]
"""


@step("K26", "fsdp in bfloat16: it trains, saves, and what is kept trains on after Stop", limit_s=60, without_gpu="cpu")
def sharded(place: Place, find: Findings) -> None:
    options = f"{place.ranks()} --strategy fsdp --precision bf16 --keep model,optimizer"
    steps = STEPS_OF.format(numbers="range(5)", flag="pass", more="pass")
    with place.notebook() as book:
        pids = book.settled(f"{place.ranks()} --strategy ddp")
        book.ok(f"%%distributed {options}\n{MODEL}{steps}")
        flags = place.flags("sharded", 1)
        endless = STEPS_OF.format(
            numbers="__import__('itertools').count()", flag=place.flag_line("sharded"), more="pass"
        )
        for number in range(1, 3):
            _, outcome = book.stopped(f"%%distributed {options}\nimport torch\n{endless}", flags, 0.2)
            find.that(
                f"stop {number} is a KeyboardInterrupt", outcome.ename == "KeyboardInterrupt", outcome.text[-300:]
            )
            trained = book.cell(f"%%distributed {options}\nimport torch\n{steps}", 20.0)
            find.that(f"stop {number}: what is kept trains on", trained.status == "ok", trained.text[-300:])
        (seen,) = book.values(options, FINITE)
        find.that("its weights are finite, in float32", seen == (True, "torch.float32"), seen)
        folder = str(place.folder / "saved")
        saves = f"from jupyter_distrib import checkpoints\ncheckpoints.save({folder!r}, model=model)"
        saved = book.cell(f"%%distributed {options}\n{saves}", 20.0)
        find.that("it is saved", saved.status == "ok", saved.text[-300:])
        find.that("on the same rank", book.values(place.ranks(), PID) == pids)


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=4, pin_memory={pin}, persistent_workers=True)
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pinned, number = True, 0
for epoch in {epochs}:
    for x, y in loader:
        pinned = pinned and (x.is_pinned() or x.is_cuda)  # ddp may have moved it already
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number == 40:
            {flag}
pinned
"""


@step("K27", "a loader with four workers and pinned memory trains, and Stop leaves none", limit_s=60, without_gpu="cpu")
def loader(place: Place, find: Findings) -> None:
    options = f"{place.ranks()} --strategy ddp"
    with place.notebook() as book:
        pids = book.settled(options)
        code = LOADER.format(pin=place.on_gpu, epochs="range(2)", flag="pass")
        outcome = book.cell(f"%%distributed {options} --out pinned\n{code}", 40.0)
        find.that("it trains", outcome.status == "ok", outcome.text[-300:] if outcome.status != "ok" else "")
        find.figure("two epochs of 128 batches", f"{outcome.wall_s:.2f} s")
        if place.on_gpu:
            find.that(
                "batches are in pinned memory, or on the GPU", book.ok("print(pinned[0])").stdout.strip() == "True"
            )
        before = len(running("jupyter_distrib.worker.process.forkserver"))
        flags = place.flags("loads", 1)
        endless = LOADER.format(
            pin=place.on_gpu, epochs="__import__('itertools').count()", flag=place.flag_line("loads")
        )
        took_s, outcome = book.stopped(f"%%distributed {options}\n{endless}", flags, 0.2)
        find.that("Stop is a KeyboardInterrupt", outcome.ename == "KeyboardInterrupt", outcome.text[-300:])
        find.within("Stop", took_s, 3.0)
        trained = book.cell(f"%%distributed {options}\n{code}", 40.0)
        find.that("the next cell trains", trained.status == "ok", trained.text[-300:] if trained.status != "ok" else "")
        gone_s = until(lambda: len(running("jupyter_distrib.worker.process.forkserver")) <= before, 5.0)
        find.that("no worker is left", gone_s is not None, running("jupyter_distrib.worker.process.forkserver"))
        find.that("on the same rank", book.values(options, PID) == pids)


DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)
"""
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator
accelerator = Accelerator()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
(accelerator.num_processes, next(model.parameters()).device.type)
"""
)
LIGHTNING = (
    DATA
    + """
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(strategy="ddp", devices=world_size, accelerator={accelerator!r}, max_epochs=1, **quiet)
trainer.fit(Net(), loader)
(trainer.world_size, trainer.strategy.root_device.type)
"""
)
TRAINER = """
import torch, tempfile
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
data = [{"input_ids": torch.randint(0, 64, (16,)), "labels": torch.tensor(i % 2)} for i in range(64)]
arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=5, report_to=[], disable_tqdm=True, save_strategy="no")
trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=data)
trainer.train()
(arguments.world_size, trainer.model.device.type)
"""


@step("K28", "accelerate, Lightning and the transformers Trainer train through nccl", limit_s=110, without_gpu="cpu")
def libraries(place: Place, find: Findings) -> None:
    # These libraries take LOCAL_RANK for the number of a GPU, so two ranks on one GPU are not for them.
    count = 2 if not place.on_gpu else min(2, len(place.gpus))
    wanted = (count, "cuda" if place.on_gpu else "cpu")
    cells = {
        "accelerate": ACCELERATE,
        "lightning": LIGHTNING.replace("{accelerator!r}", repr("gpu" if place.on_gpu else "cpu")),
        "transformers": TRAINER,
    }
    there = {name: code for name, code in cells.items() if importlib.util.find_spec(name) is not None}
    if not there:
        raise Skipped("none of them is installed")
    with place.notebook(all_gpus=True) as book:
        for name, code in there.items():
            with find.going_on(name):
                outcome = book.cell(f"%%distributed {place.ranks(count)} --out seen\n{code}", 40.0)
                seen = book.cell("print(list(seen))").stdout.strip() if outcome.status == "ok" else ""
                find.that(
                    f"{name} counts {count} on the device", seen == str([wanted] * count), seen or outcome.text[-500:]
                )
                find.figure(f"{name}: the cell", f"{outcome.wall_s:.1f} s")


COMPILED = """
import time, torch
from benchmarks.gpu_kit import models
{init}
torch.manual_seed(0)
net = models.Gpt({size}).to(device)
x = torch.randint(0, {words}, (8, {length}), device=device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
model = torch.compile({wrap}(net){how})
def step():
    with torch.autocast(device.type, torch.bfloat16):
        out = model(x)
    torch.nn.functional.cross_entropy(out.float().flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(5):
    step()
times = []
for _ in range({rounds}):
    models.wait(device)
    began_s = time.monotonic()
    for _ in range(10):
        step()
    models.wait(device)
    times.append((time.monotonic() - began_s) / 10)
min(times)
"""


@step("K29", "a step of compiled ddp is as fast as one of torch's own compiled DDP", limit_s=110, without_gpu="cpu")
def compiled(place: Place, find: Findings) -> None:
    size, words, length, rounds = ("depth=4", 50257, 512, 5) if place.on_gpu else ("32, 2, 2, 16, 100", 100, 16, 1)
    how = "" if place.on_gpu else ", backend='aot_eager'"
    init = f"torch.distributed.init_process_group({place.backend!r})"
    with place.notebook() as book:
        took: dict[str, list[float]] = {"own": [], "ddp": []}
        for _ in range(2):
            for name, options, begin, wrap in (
                ("ddp", place.ranks(), init, "torch.nn.parallel.DistributedDataParallel"),
                ("own", f"{place.ranks()} --strategy ddp", "", ""),
            ):
                code = COMPILED.format(
                    init=begin, wrap=wrap, size=size, words=words, length=length, rounds=rounds, how=how
                )
                took[name] += book.values(options, code, 50.0)
        own, ddp = statistics.median(took["own"]), statistics.median(took["ddp"])
        find.that(
            "at most 1.03 of DDP",
            own <= 1.03 * ddp or not place.on_gpu,
            f"{own / ddp:.3f} ({1e3 * own:.2f}, {1e3 * ddp:.2f} ms)",
        )


@step("K30", "a GPU that two ranks have is refused with a hint, and the next cell runs", limit_s=45, without_gpu=None)
def duplicate(place: Place, find: Findings) -> None:
    with place.notebook(twice="one") as book:
        outcome = book.cell(f"%%distributed --gpus 2 --strategy ddp\n{MEET}", 30.0)
        find.that("it is refused", outcome.status == "error", outcome.text[-300:])
        find.that(
            "with a hint",
            "two ranks" in outcome.text.lower() or "same gpu" in outcome.text.lower(),
            outcome.text[-700:],
        )
        find.within("that takes", outcome.wall_s, 15.0)
        after = book.cell("%%distributed --gpus 1\n1")
        find.that("the next cell runs", after.status == "ok", after.text[-300:])
