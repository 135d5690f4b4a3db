"""`--strategy ddp` on code that was written for one device: the same weights as the program written by hand."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent

import pytest
from torch.distributed import TCPStore

from tests.notebook import ROOT, Notebook
from tests.strategies.cases import BY_HAND, CASES, HAND, SETUP, Case

DDP = "%%distributed --ranks 2 --strategy ddp "
NONE = "%%distributed --ranks 2 --strategy none "
RELATIVE = 1e-6


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook that has all that the cells use."""
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(SETUP)
        yield book


def params(cases: tuple[Case, ...]) -> list[object]:
    return [pytest.param(case, id=str(case), marks=[pytest.mark.slow] if case.slow else []) for case in cases]


def difference(book: Notebook, case: Case, strategy: str = "--strategy ddp") -> float:
    """The largest difference of any number, relative to the largest; an error if ranks differ from one another."""
    book.ok(f"%%distributed --ranks 2 {strategy} {case.options} --out mine\n{case.code.rstrip()};")
    theirs = f"by_hand_{(*CASES, *BY_HAND).index(case)}"
    if book.ok(f"{theirs!r} in globals()").result == "False":  # the same for each strategy
        book.ok(f"{NONE}--out {theirs}\n{HAND}{case.by_hand.rstrip()};")
    return float(
        book.ok(
            "assert torch.equal(mine[0], mine[1]), (mine[0] - mine[1]).abs().max()\n"
            f"((mine[0] - {theirs}[0]).abs().max() / {theirs}[0].abs().max()).item()"
        ).result
    )


@pytest.mark.parametrize("case", params(CASES))
def test_an_unchanged_cell_trains_as_the_program_written_by_hand(book: Notebook, case: Case) -> None:
    assert difference(book, case) <= RELATIVE


@pytest.mark.parametrize("case", params(BY_HAND))
def test_what_is_done_by_hand_already_is_left_alone(book: Notebook, case: Case) -> None:
    assert difference(book, case) <= RELATIVE


SHARDED = {"fsdp": "--strategy fsdp", "tp": "--strategy tp --mesh data=2,model=1"}
SHARDABLE = [case for case in (*CASES, *BY_HAND) if case.sharded == "equal"]
"""With a mesh whose models are whole, `tp` shards as `fsdp` does, so that a few of them will do."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "strategy"), [*((case, "fsdp") for case in SHARDABLE), *((case, "tp") for case in SHARDABLE[::5])], ids=str
)
def test_it_trains_as_well_when_it_is_sharded(book: Notebook, case: Case, strategy: str) -> None:
    assert difference(book, case, SHARDED[strategy]) <= RELATIVE


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in (*CASES, *BY_HAND) if case.says], ids=str)
def test_what_cannot_be_sharded_is_an_error_and_never_silent(book: Notebook, case: Case) -> None:
    assert case.says in book.fails(f"%%distributed --ranks 2 --strategy fsdp {case.options}\n{case.code}").text


APART = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"net": Net(), "sometimes": nn.Linear(2, 2)})
    def forward(self, x, more):
        out = self.parts["net"](x)
        return self.parts["sometimes"](out) if more else out
torch.manual_seed(1)
model = Both()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in DataLoader(data, batch_size=8):
    F.mse_loss(model(x, rank == 0), y).backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp --fsdp-unit Linear", SHARDED["tp"].removeprefix("--strategy ")])
def test_ranks_that_call_different_modules_of_a_sharded_model_are_an_error(book: Notebook, strategy: str) -> None:
    outcome = book.cell(f"%%distributed --ranks 2 --strategy {strategy} --hang-timeout 20\n{APART}", timeout_s=180)

    assert outcome.status == "error", outcome.text
    assert re.search(r"[Rr]anks? \d", outcome.text), outcome.text  # whose it is, whatever gloo has made of it
    book.ok(f"{DDP}--out whole\n{LEARN}")
    assert agree(book, "whole")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="torch.compile needs a C++ compiler: g++")
@pytest.mark.versions
def test_a_sharded_model_that_inductor_has_compiled_trains_as_the_program_written_by_hand(
    book: Notebook, tmp_path: Path
) -> None:
    (case,) = [case for case in CASES if case.title == "a model from torch.compile"]
    code = case.code.replace(', backend="aot_eager"', "").replace("weights(model)\n", "")
    used = "from torch._dynamo.utils import counters\ncounters['inductor'].total() > 0, weights(model)"
    line = f"%%distributed --ranks 2 --strategy fsdp --env TORCHINDUCTOR_CACHE_DIR={tmp_path} --out mine"

    outcome = book.cell(f"{line}\n{code}{used}", timeout_s=540)
    assert outcome.status == "ok", outcome.text
    book.ok(f"{NONE}--out theirs\n{HAND}{case.by_hand}")

    close = "torch.allclose(mine[0][1], theirs[0], 1e-4, 1e-5)"  # not by the same kernels
    compared = f"[used for used, _ in mine], torch.equal(mine[0][1], mine[1][1]), {close}"
    assert book.ok(compared).result == "([True, True], True, True)"


# ---------------------------------------------------------------------------------------------------- cell after cell

LEARN = "for x, y in loader: update(model, optimizer, x, y)\nweights(model)"


def agree(book: Notebook, name: str) -> bool:
    return book.ok(f"torch.equal({name}[0], {name}[1])").result == "True"


@pytest.mark.slow
@pytest.mark.versions
def test_kept_models_go_on_where_they_were_and_epochs_too(book: Notebook) -> None:
    book.ok(SETUP)
    book.ok(
        dedent(f"""\
            {DDP}--out whole
            fit(model, optimizer, loader, epochs=3)
            weights(model)""")
    )
    book.ok(f"{DDP}--keep model,optimizer,loader\n{LEARN}")
    book.ok(f"{DDP}\n{LEARN}")
    book.ok(f"{DDP}--out parts\n{LEARN}")

    assert book.ok("torch.equal(whole[0], parts[0])").result == "True"
    book.ok(SETUP)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupt", "interrupt of the cell that keeps", "failure", "exit"])
@pytest.mark.versions
def test_kept_models_go_on_alike_after_a_cell_that_ended_between_two_steps(book: Notebook, end: str) -> None:
    book.ok(SETUP)
    keep = "--keep model,optimizer,loader"
    first = end.endswith("keeps")
    if not first:
        book.ok(f"{DDP}{keep}\n{LEARN}")
    apart = dedent("""\
        for x, y in loader: update(model, optimizer, x, y)
        if rank == 1: optimizer.step()
        print('stepped')
    """)
    if end.startswith("interrupt"):
        book.start(f"{DDP}{keep if first else ''}\n{apart}import time\nwhile True: time.sleep(0.01)")
        book.until("[0-1] stepped")
        book.interrupt()
        assert book.finish().ename == "KeyboardInterrupt"
    elif end == "failure":
        book.fails(f"{DDP}\n{apart}dist.barrier()\n1 / 0")
    else:
        book.fails(f"{DDP}\n{apart}dist.barrier()\nif rank == 1: raise SystemExit(3)\ndist.barrier()")

    outcome = book.ok(f"{DDP}--out after\n{LEARN}")

    assert agree(book, "after")
    assert "what Adam trains differed between ranks; all continue with rank 0's" in outcome.text
    book.ok(SETUP)


ODD_SCHEDULES = {
    "state_dict raises on rank 0": (
        dedent("""\
            class Own(Exponential):
                def state_dict(self):
                    if rank == 0: raise RuntimeError
                    return super().state_dict()
            schedule = Own(optimizer, 0.5)"""),
        "the state of Own holds or raises a builtins.RuntimeError, which ranks cannot exchange",
    ),
    "load_state_dict raises": (
        dedent("""\
            class Own(Exponential):
                def load_state_dict(self, state): raise RuntimeError('no')
            schedule = Own(optimizer, 0.5)"""),
        "Own did not load the state of rank 0 (RuntimeError: no), and continues with its own",
    ),
    "last_epoch cannot be read on rank 1": (
        dedent("""\
            class Own(Exponential):
                @property
                def last_epoch(self):
                    if getattr(self, 'broken', False): raise RuntimeError
                    return self.number
                @last_epoch.setter
                def last_epoch(self, number): self.number = number
            schedule = Own(optimizer, 0.5)
            schedule.broken = rank == 1"""),
        "the steps of Own differed",
    ),
    "no last_epoch": (
        dedent("""\
            class Own(Exponential):
                def __init__(self, optimizer): self.optimizer = optimizer
                def step(self): self.optimizer.param_groups[0]['lr'] *= 0.5
            schedule = Own(optimizer)"""),
        "the steps of Own differed",
    ),
    "a setting that cannot be sent": (
        dedent("""\
            import threading
            optimizer.param_groups[0]['lock'] = threading.Lock()
            schedule = Exponential(optimizer, 0.5)"""),
        "holds or raises a _thread.lock",
    ),
    "a rate that is a tensor": (
        dedent("""\
            optimizer.param_groups[0]['lr'] = rate = torch.tensor(0.5)
            schedule = Exponential(optimizer, 0.5)
            assert optimizer.param_groups[0]['lr'] is rate"""),
        "the steps of ExponentialLR differed",
    ),
}


@pytest.mark.parametrize("schedule", ODD_SCHEDULES)
def test_cells_run_after_a_stop_between_the_steps_of_an_odd_schedule(book: Notebook, schedule: str) -> None:
    made, said = ODD_SCHEDULES[schedule]
    book.start(
        f"{DDP}--keep optimizer,schedule\nimport time, torch\nfrom torch import nn\n"
        "Exponential = torch.optim.lr_scheduler.ExponentialLR\n"
        f"optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.5)\n{made}\n"
        "if rank == 1:\n    try: schedule.step()\n    except RuntimeError: pass\n"
        "print('ready')\nwhile True: time.sleep(0.01)"
    )
    book.until("[0-1] ready")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"

    outcome = book.ok(f"{DDP}\nfloat(optimizer.param_groups[0]['lr'])")
    assert said in outcome.text, outcome.text
    if "cannot be read" not in schedule and "lock" not in said:
        assert outcome.result == "ranks 0-1: 0.5"
    book.ok(SETUP)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "ddp, prepared", "fsdp"])
def test_kept_schedules_and_epochs_go_on_alike_after_a_stop_between_two_epochs(book: Notebook, how: str) -> None:
    book.ok(SETUP)
    first = f"%%distributed --ranks 2 --strategy {how.partition(',')[0]}"
    prepare = "import jupyter_distrib\nloader = jupyter_distrib.prepare(loader)\n" if "prepared" in how else ""
    book.start(
        f"{first} --keep model,optimizer,schedule,loader\n"
        "loader = DataLoader(TensorDataset(torch.arange(48.0)[:, None], targets), batch_size=8, shuffle=True)\n"
        f"{prepare}model = nn.Linear(1, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n"
        "for x, y in loader: update(model, optimizer, x, y)\nschedule.step()\n"
        "if rank == 1:\n    schedule.step()\n    list(loader)\nprint('ready')\nimport time\nwhile True: time.sleep(0.01)"
    )
    book.until("[0-1] ready")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"

    outcome = book.ok(
        f"{first} --out after\nseen = []\nfor x, y in loader:\n    update(model, optimizer, x, y)\n"
        "    seen += x.flatten().tolist()\n"
        "schedule.step()\nschedule.last_epoch, optimizer.param_groups[0]['lr'], seen"
    )

    assert book.ok("[each[:2] for each in after]").result == "[(2, 0.0025), (2, 0.0025)]"
    assert book.ok("sorted(after[0][2] + after[1][2]) == list(range(48))").result == "True"
    assert "the steps of StepLR differed between ranks; all continue with rank 0's" in outcome.text
    book.ok(SETUP)


@pytest.mark.versions
def test_after_the_cell_torch_is_as_it_was(book: Notebook) -> None:
    look = """
from torch.optim.optimizer import _global_optimizer_post_hooks
places = [torch.optim.Optimizer.__init__, torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.__setstate__,
          torch.autograd.backward, DataLoader.__iter__, DataLoader.__len__, DistributedDataParallel.__init__]
sorted("autoparallel" in place.__code__.co_filename for place in places), len(_global_optimizer_post_hooks)
"""
    clean = book.ok(NONE + "\n" + look).result
    assert "True" not in clean
    assert "True" in book.ok(DDP + "\n" + look).result
    book.fails(DDP + "\nfit(model, optimizer, loader)\n1 / 0")
    assert book.ok(NONE + "\n" + look).result == clean


@pytest.mark.slow
def test_a_kept_model_is_plain_in_a_cell_without_a_strategy(book: Notebook) -> None:
    book.ok(SETUP)
    book.ok(f"{DDP}--keep model,optimizer,loader\n{LEARN}")
    book.ok(
        dedent(f"""\
            {NONE}--out alone
            torch.manual_seed(rank)
            update(model, optimizer, torch.randn(4, 6), torch.ones(4, 2))
            weights(model)""")
    )
    assert not agree(book, "alone")

    outcome = book.fails(f"{DDP}\n{LEARN}")

    assert "Net does not have the same weights on every rank" in outcome.traceback
    assert "jupyter_distrib.prepare(model)" in outcome.traceback
    book.ok(f"{DDP}--out again\njupyter_distrib.prepare(model)\n{LEARN}")
    assert agree(book, "again")
    book.ok(SETUP)


@pytest.mark.slow
def test_many_models_one_after_another_are_freed(book: Notebook) -> None:
    body = """
import gc, weakref
seen = []
for fold in range(5):
    model = Net()
    seen.append(weakref.ref(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in loader:
        update(model, optimizer, x, y)
gc.collect()
[ref() is not None for ref in seen]
"""
    assert book.ok(DDP + "\n" + body).result == "ranks 0-1: [False, False, False, False, True]"


# ---------------------------------------------------------------------------------------------------- what is said


def test_the_head_of_the_run_says_what_was_done_and_nothing_if_nothing_was(book: Notebook) -> None:
    shown = book.ok(f"{DDP}\n{CASES[0].code}").view

    assert "· Net wrapped (optimizer of line 5), sampler added (loader of line 8), global batch 16 = 2 x 8" in shown
    assert shown.count("wrapped") == 1
    assert book.ok(DDP + "\ndist.barrier()").text == ""


ONE_RANK = """
torch.manual_seed(1)
model = Net(norm=True)
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(data, batch_size=10, shuffle=True):
    update(model, optimizer, x, y)
torch.autograd.backward.__module__, len(optimizer.state), weights(model).tolist()
"""


def test_one_rank_trains_as_without_a_strategy_and_nothing_is_in_its_steps(book: Notebook) -> None:
    plain, alone = (book.ok(f"%%distributed --ranks 1 --strategy {name}\n{ONE_RANK}") for name in ("none", "ddp"))

    assert alone.result == plain.result
    assert "('torch.autograd', 6, [" in alone.result
    assert "· one rank trains as without a strategy" in alone.view
    prepared = ONE_RANK.replace("\nfor", "\nmodel, optimizer = jupyter_distrib.prepare(model, optimizer)\nfor")
    assert book.ok(f"%%distributed --ranks 1 --strategy ddp\nimport jupyter_distrib\n{prepared}").result == plain.result
    assert book.ok("%%distributed --ranks 1 --strategy ddp\ndist.get_world_size()").result == "rank 0: 1"


def test_the_head_does_not_claim_what_was_left_to_others(book: Notebook) -> None:
    assert "wrapped" not in book.ok(f"{DDP}\n{BY_HAND[2].code.strip()};").view


def test_explain_shows_what_would_be_done_and_where(book: Notebook) -> None:
    cell = dedent(f"""\
        {DDP}--explain
        other = torch.optim.SGD(Net().parameters(), lr=1)
        fit(model, optimizer, loader)
        trainer = Trainer(Net(), 0.1)
        DistributedDataParallel(Net())""")
    shown = book.ok(cell).result
    table = [re.split(r" {2,}", line) for line in shown.partition("\n\n")[2].splitlines()]

    assert table[0] == ["where", "what", "with --strategy ddp"]
    effects = {(where, what): effect for where, what, effect in table[1:]}
    model = "its model is replicated on every rank, gradients averaged"
    data = "divided among the ranks where it is trained with, whole in an evaluation"
    assert effects["line 2", "torch.optim.SGD(Net().parameters(), lr=1)"] == model
    assert effects["captured", "optimizer"] == model
    assert effects["captured", "loader"] == data
    assert effects["line 5", "DistributedDataParallel(Net())"] == "wrapped by hand, so this model is left alone"
    inside = "DataLoader(dataset, batch_size=8, shuffle=True)"
    assert [
        effect for (where, what), effect in effects.items() if where == "Trainer.fit, its line 2" and what == inside
    ] == [data]
    assert "with --strategy" not in book.ok(f"{NONE}--explain\nfit(model, optimizer, loader)").result


def test_explain_goes_by_the_strategy_that_the_run_would_have(book: Notebook) -> None:
    book.ok("import os\nos.environ['JUPYTER_DISTRIB_STRATEGY'] = 'ddp'")
    try:
        shown = book.ok("%%distributed --ranks 2 --explain\nfit(model, optimizer, loader)").result
    finally:
        book.ok("del os.environ['JUPYTER_DISTRIB_STRATEGY']")

    assert "with --strategy ddp" in shown


UPDATE_BY_HAND = """
torch.manual_seed(rank)
model = Net()
for x, y in loader:
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters(): p -= 0.1 * p.grad"""
GROUP_BY_HAND = """
dist.init_process_group('gloo')
torch.manual_seed(rank)
model = Net()
fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)"""
TOO_EARLY = """
steps = len(train)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fit(model, optimizer, train)"""
LOOP_OVER_SLICES = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(0, 32, 8): update(model, optimizer, features[{slice}], targets[{slice}])
"""
LOOP_OVER_A_LIST = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(features[i : i + 8], targets[i : i + 8]) for i in range(0, 32, 8)]
for epoch in range(1):
    for step, (x, y) in enumerate(batches): update(model, optimizer, x, y)
"""
FULL_BATCH = """
model = nn.Sequential(nn.Dropout(), Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)  # an earlier cell may have seeded all alike
for epoch in range(4):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features), targets.argmax(1))
    (loss + 0.01).backward()
    optimizer.step()"""
FIT = "\nfit(model, optimizer, loader)"
SLICED = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(TensorDataset(features[{slice}], targets[{slice}]), batch_size=8)
for x, y in itertools.islice(train, 1): update(model, optimizer, x, y)
"""
OTHER_PARAMETERS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = Net()
fit(model, optimizer, loader)"""

TOTALS = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = seen = 0
for x, y in train:
    total += update(model, optimizer, x, y) * len(x)
    seen += len(x)"""
READ_AGAIN = """
correct = 0
model.eval()
with torch.no_grad():
    for x, y in train: correct += (model(x).argmax(1) == y.argmax(1)).sum().item()
"""

SCHEDULE = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps={steps})
for epoch in range(2):
    for x, y in train:
        update(model, optimizer, x, y)
        plan.step()"""

LINEAR = """
from functools import partial
from torch.optim.lr_scheduler import LambdaLR, PolynomialLR, SequentialLR
def linear(step, *, num_warmup_steps, num_training_steps):
    return max(0.0, (num_training_steps - step) / num_training_steps)
def linear_schedule(optimizer, num_training_steps):
    return LambdaLR(optimizer, lambda step: 1 - step / num_training_steps)
class Decay:
    def __init__(self, total): self.total = total
    def __call__(self, step): return 1 - step / self.total
steps = len(data) // 8 * 2
MAX_STEPS, warmup_steps = steps, steps
"""
ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps={steps})"
OWN_SCHEDULES = {
    "a partial function": "LambdaLR(optimizer, partial(linear, num_warmup_steps=2, num_training_steps=steps))",
    "a closure": "linear_schedule(optimizer, steps)",
    "a global": "LambdaLR(optimizer, lambda step: 1 - step / MAX_STEPS)",
    "an object": "LambdaLR(optimizer, Decay(steps))",
    "a polynomial": "PolynomialLR(optimizer, total_iters=steps)",
    "a cosine after a warm-up": (
        "SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)], milestones=[2])"
    ),
}

BY_HAND_RATE = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def rate(step, total): return 0.1 * (1 - step / total)
def train_all(loader, number, change=True):
    {local} = number
    step = 0
    for epoch in range(2):
        for x, y in loader:
            for group in optimizer.param_groups: group["lr"] = rate(step, {use}) if change else 0.1
            update(model, optimizer, x, y)
            step += 1
train_all({call})"""
RATE_TOLD = (
    "and each rank has made 6 steps, since it has read 1/2 of the batches: a learning rate that is computed from"
)
ALL_STEPS = "train, len(data) // 8 * 2"

SAID = {
    "an update by hand": (
        UPDATE_BY_HAND,
        "the ranks have trained different weights: gradients were not averaged, since no",
    ),
    "an update by hand that is the same on all ranks": (
        UPDATE_BY_HAND.replace("manual_seed(rank)", "manual_seed(0)"),
        "each rank has trained by itself, all of them identically: gradients were not averaged, since no torch.optim",
    ),
    "only a group of one's own, and the same on all ranks": (
        GROUP_BY_HAND.replace("manual_seed(rank)", "manual_seed(0)"),
        "each rank has trained by itself, all of them identically: this cell calls init_process_",
    ),
    "batches that are not divided": (
        LOOP_OVER_SLICES.format(slice="i : i + 8"),
        "the first 3 losses are the same on all ranks, so they train with the same batches and are no faster than one. R",
    ),
    "a list that each rank reads whole": (
        LOOP_OVER_A_LIST,
        "and are no faster than one: each reads all of `batches` (list) on line 7. Read the data from a DataLoader",
    ),
    "a list of which each layer is trained in turn": (
        """
class Layers:
    def __init__(self): self.layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    def fit(self):
        for x in batches:
            for i, layer in enumerate(self.layers):
                optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
                for step in range(2): update(layer, optimizer, x, x)
batches = list(features.split(8))
Layers().fit()""",
        "are no faster than one: each reads all of `batches` (list) on line 6. Read the data from a DataLoader",
    ),
    "a full batch with dropout": (
        FULL_BATCH,
        "the targets of the first 3 losses are the same on all ranks, so they train with the same batches and are no f",
    ),
    "a full batch beside a loader that is evaluated like training": (
        """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    update(model, optimizer, features, targets)
    for x, y in loader: model(x)""",
        "the first 3 losses are the same on all ranks, so they train with the same batches and are no faster than one. R",
    ),
    "only a group of one's own": (
        GROUP_BY_HAND,
        "the ranks have trained different weights: this cell calls init_process_",
    ),
    "weights changed on one rank": (f"{FIT}\nif rank == 1: model.head.bias.data += 1", "changed by something other"),
    "a code book that the forward pass replaces": (
        """
class Book(Net):
    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.zeros(6))
    def forward(self, x):
        if self.training: self.code = nn.Parameter(0.9 * self.code + x.mean(0))
        return super().forward(x + self.code.detach())
model = Book()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fit(model, optimizer, loader)""",
        "`code` is a parameter that the code has put into the model meanwhile",
    ),
    "a loader that is read before the optimizer is built": (
        """
batches = iter(train)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4): update(model, optimizer, *next(batches))""",
        "every rank trains with all batches of the data loader that is read from line 3 on, since that began before",
    ),
    "a mean over all samples": (
        f"{TOTALS}\ntotal / len(train.dataset)",
        "`len(train.dataset)` on line 9 is the number of all samples, and each rank has read a share of them on line 6",
    ),
    "a mean over all samples in a function": (
        """
def run(model, optimizer, loaders, sizes):
    for phase in ("train", "val"):
        model.train(phase == "train")
        total = 0
        for x, y in loaders[phase]:
            with torch.set_grad_enabled(phase == "train"):
                if phase == "train": total += update(model, optimizer, x, y) * len(x)
        total /= sizes[phase]
    return total
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run(model, optimizer, {"train": train, "val": train}, {"train": len(data), "val": len(data)})""",
        "`sizes[phase]` on line 10 is the number of all samples",
    ),
    "a mean over all samples beside one that reads them all": (
        f"{TOTALS}\nwhole = total / len(train.dataset){READ_AGAIN}whole, correct / len(train.dataset)",
        "`len(train.dataset)` on line 9 is the number of all samples, and each rank has read a share of them on line 6",
    ),
    "a mean over all samples of the second training": (
        f"{TOTALS}\nmore = 0\nfor x, y in train: more += update(model, optimizer, x, y)\nmore / len(train.dataset)",
        "`len(train.dataset)` on line 11 is the number of all samples, and each rank has read a share of them on line 10",
    ),
    "a mean that the caller takes": (
        """
def read(model, optimizer, loader):
    total = 0
    for x, y in loader: total += update(model, optimizer, x, y) * len(x)
    return total
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
read(model, optimizer, train) / len(data)""",
        "`len(data)` on line 9 is the number of all samples",
    ),
    "an evaluation like training": (
        f"{FIT}\nfor x, y in loader: model(x)",
        "each rank has read its share only on line 4",
    ),
    "one batch that is evaluated like training": (
        f"{FIT}\nx, y = next(iter(loader))\nF.mse_loss(model(x), y)",
        "each rank has read its share only on line 4",
    ),
    "one batch that each epoch evaluates like training": (
        """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in train: update(model, optimizer, x, y)
    x, y = next(iter(loader))
    F.mse_loss(model(x), y)""",
        "each rank has read its share only on line 7",
    ),
    "data that the cell has divided": (
        SLICED.format(slice="rank::world_size"),
        "the data loader read on line 6 holds different samples on each rank, divided by the cell or drawn at random",
    ),
    "data that the cell has divided unequally": (
        SLICED.format(slice="rank * 32 // (world_size - 1) :"),
        "the data loader read on line 6 holds different samples on each rank, with 6, 2 batches",
    ),
    "data that differ for another reason": (
        SLICED.format(slice="rank::2"),
        "the data loader read on line 6 holds different samples on different ranks, and each rank has read a",
    ),
    "an optimizer over other parameters than those of the model": (
        OTHER_PARAMETERS,
        "SGD has stepped on line 5 without a gradient: backward() has computed gradients of parameters other than its own.",
    ),
    "training in eval mode": (f"model.eval(){FIT}", "every rank has trained with all batches that were read on line 3"),
    "a schedule for all batches": (
        SCHEDULE.format(steps="len(data) // 8 * 2"),
        "OneCycleLR has made 6 of its 12 steps, since each rank has read 1/2 of the batches",
    ),
    **{
        f"a schedule for all batches, {how}": (
            LINEAR + SCHEDULE.replace(ONE_CYCLE, made),
            "LR has made 6 of its 12 steps, since each rank has read 1/2 of the batches",
        )
        for how, made in OWN_SCHEDULES.items()
    },
    "the best weights by each rank's own loss": (
        """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(train):
    update(model, optimizer, x, y)
    if step == rank: best = copy.deepcopy(model.state_dict())
model.load_state_dict(best)""",
        "such as load_state_dict() of the weights that each rank had found the best by its own loss",
    ),
    "a rate by hand for all batches": (
        BY_HAND_RATE.format(local="total_steps", use="total_steps", call=ALL_STEPS),
        f"`total_steps` is 12, {RATE_TOLD}",
    ),
    "a rate by hand for all batches, by a dict": (
        BY_HAND_RATE.format(
            local="settings = dict(max_iters=number); other", use="settings['max_iters']", call=ALL_STEPS
        ),
        f"`settings['max_iters']` is 12, {RATE_TOLD}",
    ),
    "a length asked too early": (TOO_EARLY, "len() of a data loader, called on line 3 before there was an optimizer"),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if place % 4 else []) for place, what in enumerate(SAID)]
)
def test_what_may_not_be_meant_is_said(book: Notebook, what: str) -> None:
    body, sentence = SAID[what]
    book.ok("train = DataLoader(data, batch_size=8, shuffle=True)")

    assert sentence in book.ok(f"{DDP}\n{body};").view


def test_lines_of_other_cells_are_told_by_the_names_of_these_cells(book: Notebook) -> None:
    number = int(book.ok("In[-1:] and len(In) - 1").result) + 1
    book.ok(
        dedent("""\
            def mean_loss(model, optimizer, loader):
                total = 0
                for x, y in loader:
                    total += update(model, optimizer, x, y) * len(x)
                return total / len(loader.dataset)""")
    )
    cell = dedent(f"""\
        {DDP}
        model = Net()
        mean_loss(model, torch.optim.SGD(model.parameters(), lr=0.1), loader);""")
    shown = book.ok(cell).view
    assert f"`len(loader.dataset)` on Cell In[{number}], line 5 is the number" in shown


DRAWN = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    chosen = {draw}
    update(model, optimizer, features[chosen], targets[chosen])"""
BY_TORCH, BY_NUMPY = "torch.randint(48, (8,))", "numpy.random.randint(48, size=8)"


@pytest.mark.parametrize(
    ("earlier", "cell", "cause"),
    [
        ("torch.manual_seed(0)", DRAWN.format(draw=BY_TORCH), "torch.manual_seed() of an earlier cell"),
        ("", f"\ntorch.manual_seed(0){DRAWN.format(draw=BY_TORCH)}", "torch.manual_seed() of this cell"),
        ("", f"\nimport numpy\nnumpy.random.seed(0){DRAWN.format(draw=BY_NUMPY)}", "numpy.random.seed() of this cell"),
        (
            "torch.manual_seed(0)",
            DRAWN.format(draw=BY_TORCH).replace("step in range(4)", "_, step in enumerate(range(4))"),
            "torch.manual_seed() of an earlier cell",
        ),
        ("", DRAWN.format(draw=BY_TORCH), ""),
    ],
)
def test_a_seed_with_which_all_ranks_draw_the_same_batches_is_named(
    book: Notebook, earlier: str, cell: str, cause: str
) -> None:
    book.ok("%distributed_pool restart")
    if earlier:
        book.ok(f"{DDP}\n{earlier}")
    shown = book.ok(f"{DDP}{cell};").view

    call = cause.partition("()")[0]
    told = f"Batches that are drawn at random are the same because of {cause}: call {call}(rank) once the model is made"
    assert told in shown if cause else "losses are the same" not in shown
    if cause:
        cured = cell.replace("\nfor ", f"\n{call}(rank)\nfor ")
        assert "losses are the same" not in book.ok(f"{DDP}{cured};").view


@pytest.mark.parametrize("seed", ["rank", "0"])
def test_separate_trainings_are_said_with_fsdp_too(book: Notebook, seed: str) -> None:
    body = UPDATE_BY_HAND.replace("manual_seed(rank)", f"manual_seed({seed})")
    sentence = "the ranks have trained different weights" if seed == "rank" else "each rank has trained by itself"

    assert sentence in book.ok(f"{DDP.replace('ddp', 'fsdp')}\n{body};").view


OWN_CHOICES = {
    "a step": (
        "if rank or step: optimizer.step()",
        "Adam has made 5 steps on rank 0 and 6 on rank 1: each rank has decided that by its own share of the data. ",
    ),
    "a learning rate": (
        "optimizer.step()\n    if rank and step == 2: optimizer.param_groups[0]['lr'] /= 2",
        "Adam has a learning rate of 0.01 on rank 0 and 0.005 on rank 1: each rank has decided that by its own share ",
    ),
    "a step of all": ("optimizer.step()", ""),
}


CHOOSES = """
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(data, batch_size=4)):
    F.mse_loss(model(x), y).backward()
    {choice}
    optimizer.zero_grad()"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", OWN_CHOICES)
def test_what_each_rank_decides_by_itself_is_named(book: Notebook, what: str, strategy: str) -> None:
    """Under fsdp each rank would train its part of the model in another way, without a word."""
    choice, told = OWN_CHOICES[what]
    cell = CHOOSES.format(choice=choice)
    view = book.ok(f"{DDP.replace('ddp', strategy)}{cell}").view
    trained = {"ddp": "trained different weights", "fsdp": "trained their parts of the model differently"}[strategy]

    assert f"{trained}: {told}" in view if told else trained not in view, view


OWN_UPDATES = {
    "a tensor": ("scale -= 0.1 * scale.grad", "the ranks have trained different values of `scale`: no optimizer"),
    "its data": ("scale.data -= 0.1 * scale.grad", "the ranks have trained different values of `scale`: no optimizer"),
    "a second model": (
        "\n        for p in second.parameters(): p -= 0.1 * p.grad",
        "the ranks have trained different values of `second.weight`: no optimizer of torch.optim trains it",
    ),
    "averaged by hand": ("dist.all_reduce(scale.grad); scale -= 0.1 * scale.grad", ""),
    "the same on all ranks": ("scale *= 0.9", ""),
    "nothing": ("pass", ""),
}


UPDATES = """
torch.manual_seed(0)
model, second, scale = Net(), nn.Linear(2, 2, bias=False), torch.ones(2, requires_grad=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in DataLoader(data, batch_size=4):
    F.mse_loss(second(model(x.requires_grad_()) * scale), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad(): {update}
    scale.grad = second.weight.grad = None"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", OWN_UPDATES)
def test_what_is_trained_by_hand_beside_a_model_is_named(book: Notebook, what: str, strategy: str) -> None:
    update_by_hand, told = OWN_UPDATES[what]
    cell = UPDATES.format(update=update_by_hand)
    view = book.ok(f"{DDP.replace('ddp', strategy)}{cell}").view

    assert told in view if told else "different" not in view, view


IN_A_FUNCTION = {
    "a step": (CHOOSES.format(choice=OWN_CHOICES["a step"][0]), OWN_CHOICES["a step"][1]),
    "a learning rate": (CHOOSES.format(choice=OWN_CHOICES["a learning rate"][0]), OWN_CHOICES["a learning rate"][1]),
    "a tensor": (UPDATES.format(update=OWN_UPDATES["a tensor"][0]), "different values of a tensor of shape (2,)"),
    "a schedule for all batches": (
        SCHEDULE.format(steps="len(data) // 8 * 2").replace("in train:", "in DataLoader(data, 8):"),
        SAID["a schedule for all batches"][1],
    ),
    "only a group of one's own": SAID["only a group of one's own"],
}


@pytest.mark.parametrize("what", IN_A_FUNCTION)
def test_what_only_a_function_owns_is_checked_too(book: Notebook, what: str) -> None:
    """Its model and optimizer are gone when the cell ends: nothing had been said."""
    body, told = IN_A_FUNCTION[what]

    assert told in book.ok(f"{DDP}\ndef main():\n{indent(body, '    ')}\nmain()").view


@pytest.mark.parametrize("end", ["pass", "1 / 0"])
def test_what_only_a_function_owned_is_freed_with_the_cell(book: Notebook, end: str) -> None:
    body = indent(CHOOSES.format(choice="optimizer.step()"), "    ")
    book.cell(f"{DDP}\nclass Passing(Net): pass\ndef main():\n{body.replace('Net()', 'Passing()')}\n    {end}\nmain()")

    left = book.ok(
        dedent(f"""\
            {DDP}
            import gc
            gc.collect()
            sum(type(each).__name__ == 'Passing' for each in gc.get_objects())""")
    )
    assert left.result == "ranks 0-1: 0"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_with_an_optimizer_of_ones_own_beside_another_gets_no_other_cause(
    book: Notebook, strategy: str
) -> None:
    cell = """
class Own:
    def __init__(self, model): self.parameters = list(model.parameters())
    def step(self):
        with torch.no_grad():
            for p in self.parameters: p -= 0.1 * p.grad
torch.manual_seed(0)
model, second = Net(), Net()
optimizer, own = torch.optim.Adam(model.parameters(), lr=1e-2), Own(second)
for x, y in DataLoader(data, batch_size=4):
    for each, steps in ((second, own), (model, optimizer)):
        each.zero_grad()
        F.mse_loss(each(x), y).backward()
        steps.step()"""
    view = book.ok(f"{DDP.replace('ddp', strategy)}{cell}").view

    assert "the ranks have trained different weights" in view
    assert "has put into the model meanwhile" not in view


LEFT = "`model` of the notebook is as it was before"
TRAIN = "\nfit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)"


@pytest.mark.parametrize("line", [DDP, DDP.replace("ddp", "fsdp"), DDP.replace("2", "1"), NONE])
def test_a_model_of_the_notebook_that_was_trained_only_on_the_ranks_is_named(book: Notebook, line: str) -> None:
    """A later plain cell would evaluate the untrained one."""
    body = f"{TRAIN}\nloss = 1  # {line}"
    book.ok("%distributed_pool restart")  # a rank has told each cell only of the first
    first, again, other = (book.ok(f"{line}{each}").view for each in (body, body, f"{body}\nloss"))

    assert f"{LEFT}: the cell has trained its copies on the ranks. For the trained one add --keep model" in first
    assert first.count(LEFT) == 1
    assert LEFT in again
    assert LEFT not in other


PARTS = {
    "wrapped": "\nwhole = nn.DataParallel(model)\nfit(whole, torch.optim.SGD(whole.parameters(), lr=0.1), loader)",
    "in a larger model": (
        "\nwhole = nn.Sequential(nn.Linear(6, 6), nn.Sequential(model))"
        "\nfit(whole, torch.optim.SGD(whole.parameters(), lr=0.1), loader)"
    ),
}


@pytest.mark.parametrize("line", [DDP, DDP.replace("ddp", "fsdp"), NONE])
@pytest.mark.parametrize("how", PARTS)
def test_a_model_that_was_trained_as_part_of_one_that_the_cell_has_made_is_named(
    book: Notebook, how: str, line: str
) -> None:
    book.ok("%distributed_pool restart")

    assert book.ok(f"{line}{PARTS[how]}\nloss = 1").view.count(LEFT) == 1
    assert LEFT not in book.ok(f"{line} --keep whole{PARTS[how]}\nloss = 1").view
    frozen = "\nfor each in model.parameters(): each.requires_grad = False"
    assert LEFT not in book.ok(f"{line}{frozen}{PARTS['in a larger model']}\nloss = 2").view


NOT_LEFT = {
    "made in the cell": f"\nmodel = Net(){TRAIN}",
    "returned": f"{TRAIN}\nmodel",
    "weights returned": f"{TRAIN}\n[0.5, model.state_dict()]",
    "kept": f"--keep model{TRAIN}",
    "kept in a wrapper": f"--keep model{TRAIN}\nmodel = torch.nn.Sequential(model)",
    "kept in another model": f"--keep whole{TRAIN}\nwhole = torch.nn.Sequential(model)",
    "saved": f"{TRAIN}\nif rank == 0: torch.save(model.state_dict(), '/dev/null')",
    "saved in a checkpoint": f"{TRAIN}\ntorch.save({{'epoch': 1, 'net': dict(best=model.state_dict())}}, '/dev/null')",
    "saved as a list of weights": f"{TRAIN}\ntorch.save(list(model.parameters()), '/dev/null')",
    "saved as an optimizer, too": f"{TRAIN}\nstate = {{'model': model}}\nfor each in state: torch.save(obj=state, f='/dev/null')",
    "saved by a method": f"{TRAIN}\nif rank == 9: model.save_pretrained('here')",
    "only evaluated": "\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nlen(loader), model(features).sum()",
}


@pytest.mark.parametrize("how", NOT_LEFT)
def test_a_model_that_does_not_stay_on_the_ranks_alone_is_not_named(book: Notebook, how: str) -> None:
    book.ok("%distributed_pool restart")
    book.ok("plain = model")
    try:
        assert LEFT not in book.ok(f"{DDP}{NOT_LEFT[how]};").view
    finally:
        book.ok("model = plain")


SAVES_OTHERS = {
    "losses": f"{TRAIN}\ntorch.save([0.5, torch.ones(3)], '/dev/null')",
    "a dictionary of numbers": f"{TRAIN}\ntorch.save(obj={{'epoch': 1, 'losses': [0.5]}}, f='/dev/null')",
    "a comment": f"{TRAIN}\nloss = 1  # save the weights to a checkpoint later",
    "a figure": f"class plt:\n    def savefig(*_): 0\n{TRAIN}\nplt.savefig('loss.png')",
    "images, in a function": f"def show():\n    if rank == 9: save_image(0)\nshow(){TRAIN}",
    "saved log-probabilities": f"{TRAIN}\nmodel.saved_log_probs = []\ndel model.saved_log_probs[:]",
    "tensors for a backward pass": f"def forward(ctx, x):\n    ctx.save_for_backward(x)\n{TRAIN}",
    "hyperparameters": f"class Fit:\n    def begin(self): self.save_hyperparameters(), self.load_from_checkpoint()\n{TRAIN}",
    "nothing, by its options": "def trainer(**_): 0\n"
    f"trainer(enable_checkpointing=False, save_strategy='no', gradient_checkpointing=True){TRAIN}",
    "an option that is off": f"class args: save_model = False\nif args.save_model: torch.save(model, 'm.pt'){TRAIN}",
}


@pytest.mark.parametrize("how", SAVES_OTHERS)
def test_a_trained_model_is_named_though_the_cell_saves_something_else(book: Notebook, how: str) -> None:
    book.ok("%distributed_pool restart")

    assert LEFT in book.ok(f"{DDP}\n{SAVES_OTHERS[how]};").view


HOLDERS = {
    "a module that does not register it": dedent("""\
        class Holder(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.layers = [model]
            @property
            def model(self): return self.layers[0]
        holder = Holder(Net())"""),
    "an object": dedent("""\
        class Holder:
            def __init__(self, model): self.model = model
        holder = Holder(Net())"""),
    "a dictionary": "holder = {'a': Net(), 'b': [Net()]}",
}


@pytest.mark.parametrize("line", [DDP, NONE])
@pytest.mark.parametrize("how", HOLDERS)
def test_what_holds_a_model_that_was_trained_only_on_the_ranks_is_named(book: Notebook, how: str, line: str) -> None:
    held = "holder['b'][0]" if how == "a dictionary" else "holder.model"
    body = f"{TRAIN.replace('model', held)}\nloss = 1"
    left = LEFT.replace("model", "holder")
    book.ok("%distributed_pool restart")
    book.ok(HOLDERS[how])
    try:
        assert book.ok(f"{line}{body}").view.count(left) == 1
        assert left not in book.ok(f"{line}{body}\nholder;").view
        assert left not in book.ok(f"{line} --keep holder{body}").view
    finally:
        book.ok("del holder")


NO_STRATEGY = "each of the 2 ranks trains by itself, with all of the data: the cell has no strategy"
BY_ITSELF = "\nmodel = Net()\nfit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)"
TOGETHER = {
    "the rank is read": f"{NONE}{BY_ITSELF}\nif rank == 0: print('done')",
    "a group of its own": f"{NONE}\nimport torch.distributed as dist\ndist.init_process_group('gloo'){BY_ITSELF}",
    "one rank": f"{NONE.replace('2', '1')}{BY_ITSELF}",
    "some of the ranks": f"{NONE} --on 0{BY_ITSELF}",
    "a strategy": f"{DDP}{BY_ITSELF}",
    "a sweep": f"{NONE} --sweep lr=[0.1,0.2]{BY_ITSELF}",
    "nothing is trained": dedent(f"""\
        {NONE}
        model = Net()
        torch.optim.SGD(model.parameters(), lr=0.1)"""),
}


def test_training_without_a_strategy_is_said(book: Notebook) -> None:
    """It takes as long as on one device, and looks as if the ranks had trained together."""
    assert NO_STRATEGY in book.ok(f"{NONE}{BY_ITSELF};").view
    assert NO_STRATEGY in book.ok(f"{NONE}{BY_ITSELF};").view, "each time"


def test_training_beside_a_group_that_an_earlier_cell_has_left_is_said(book: Notebook) -> None:
    assert NO_STRATEGY not in book.ok(f"{TOGETHER['a group of its own']};").view
    assert NO_STRATEGY in book.ok(f"{NONE}{BY_ITSELF};").view
    parallel = "\nimport torch\nwrap = vars(torch.nn.parallel)['Dis' + 'tributedDataParallel']"
    assert NO_STRATEGY not in book.ok(f"{NONE}{parallel}{BY_ITSELF.replace('Net()', 'wrap(Net())')};").view


@pytest.mark.parametrize("how", TOGETHER)
def test_training_that_is_meant_to_be_separate_is_not_mentioned(book: Notebook, how: str) -> None:
    assert NO_STRATEGY not in book.ok(f"{TOGETHER[how]};").text


TIED = "`optimizer` belongs to the notebook's own `model`, and the ranks use the `model` that they have kept"
GO_ON = "\nstep()"


@pytest.mark.parametrize("line", [DDP, DDP.replace("ddp", "none")])
def test_an_optimizer_of_the_notebook_beside_a_model_that_was_kept_is_named(book: Notebook, line: str) -> None:
    """It would train the notebook's own model, of which the ranks use none."""
    book.ok("plain, own = model, optimizer")
    book.ok(
        dedent("""\
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            def step():
                F.mse_loss(model(features), targets).backward(); optimizer.step(); schedule.step()""")
    )
    try:
        assert "belongs to" not in book.ok(f"{line} --keep model{GO_ON}").view
        assert (
            f"{TIED}: keep both in the first of these cells, with --keep model,optimizer"
            in book.ok(f"{line}{GO_ON}").view
        )
        assert "belongs to" not in book.ok(f"{line}\nmodel(features).sum().item()").text
        book.ok("model = plain")
        assert "belongs to" not in book.ok(f"{line} --keep model,optimizer,schedule{GO_ON}").view
        assert "belongs to" not in book.ok(f"{line}{GO_ON}").view
        book.ok(
            dedent("""\
                model = plain
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)""")
        )
        book.ok(f"{line} --keep model,optimizer{GO_ON}")
        assert "`schedule` belongs to the notebook's own `optimizer`" in book.ok(f"{line}{GO_ON}").view
    finally:
        book.ok("model, optimizer = plain, own\ndel schedule, step")


ONE_MORE_BATCH = """
steps = 0
for epoch in range(4):
    for x, y in train:
        if steps == 4: break
        steps += 1
        update(model, optimizer, x, y)
for step in range(2):
    x, y = next(iter(train))
    update(model, optimizer, x, y)"""
NOT_SAID = {
    "a loop that takes one more batch when it is done, and one that takes the first only": (
        f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx, y = next(iter(train)){ONE_MORE_BATCH}"
    ),
    "a mean over the samples that were read": f"{TOTALS}\ntotal / seen / len(data.tensors)",
    "a mean over the samples of a loop that reads them all": f"{TOTALS}{READ_AGAIN}correct / len(train.dataset)",
    "a mean over the samples of an expression that reads them all": (
        f"{TOTALS}\nmodel.eval()\nsum((model(x) - y).sum().item() for x, y in train) / len(train.dataset)"
    ),
    "a mean over the samples of a function that reads them all": f"""
def error_of(model, loader):
    with torch.no_grad(): return sum((model(x) - y).sum().item() for x, y in loader)
{TOTALS}
error = error_of(model, train)
error /= len(train.dataset)
error_of(model, train) / len(train.dataset)""",
    "a mean that a caller takes of another function": """
def error_of(model, loader):
    with torch.no_grad(): return sum((model(x) - y).sum().item() for x, y in loader)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    fit(model, optimizer, train, 1)
    error = error_of(model, train) / len(train.dataset)""",
    "a mean over the samples of another loader": f"{TOTALS}\nother = DataLoader(data, batch_size=8)\ntotal / len(other.sampler)",
    "samples that the model draws by gradients": """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = []
for epoch in range(3):
    for x, y in train:
        sample = x.clone().requires_grad_()
        for _ in range(2):
            model(sample).sum().backward()
            sample.data -= 0.1 * sample.grad
            sample.grad.zero_()
        samples.append(sample)
        update(model, optimizer, torch.cat([x, sample]), torch.cat([y, y]))""",
    "a schedule for a rank's batches": SCHEDULE.format(steps="len(train) * 2"),
    "a warm-up that is as long": LINEAR
    + SCHEDULE.replace(ONE_CYCLE, "LambdaLR(optimizer, lambda step: min(1.0, step / warmup_steps))"),
    "a cosine after a warm-up, for a rank's batches": f"{LINEAR}steps = 6"
    + SCHEDULE.replace(ONE_CYCLE, OWN_SCHEDULES["a cosine after a warm-up"]),
    "a rate by hand for a rank's batches": BY_HAND_RATE.format(
        local="total_steps", use="total_steps", call="train, 2 * len(train)"
    ),
    "a rate by hand for another number of steps": BY_HAND_RATE.format(
        local="total_steps", use="total_steps", call="train, 100"
    ),
    "a number of all steps beside a rate that stays": BY_HAND_RATE.format(
        local="total_steps", use="total_steps", call=f"{ALL_STEPS}, False"
    ),
    "a warm-up by hand": BY_HAND_RATE.format(local="warmup_steps", use="warmup_steps", call=ALL_STEPS),
    "a schedule that goes on later": SCHEDULE.format(steps="100"),
    "numbers of all ranks that are added up": f"{TOTALS}\ntotal = torch.tensor(total)\ndist.all_reduce(total)\ntotal / len(train.dataset)",
    "statistics of a loader before the training": f"\nsum(x.sum() for x, y in train), len(iter(train)){TOTALS}",
    "batches that the ranks have divided by hand": LOOP_OVER_SLICES.format(slice="i + 4 * rank : i + 4 * rank + 4"),
    "a step that the ranks average by themselves": """
model = Net()
for x, y in itertools.islice(loader, 2):
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p -= 0.1 * p.grad / 2""",
    "the slope at several points, which trains nothing": """
model = Net()
for x in features[:4]:
    x = x.clone().requires_grad_()
    model(x).sum().backward()
    torch.autograd.grad(model(x).sum(), x)""",
    "gradients that train nothing": "model = Net()\nF.mse_loss(model(features), targets).backward()",
}


LAZY = """
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2)
    def forward(self, x): return self.head(self.norm(self.body(x)).relu())
model = Lazy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
for x, y in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    seen.append(len(x))
weights(model), len(seen)
"""


def test_a_model_whose_layers_get_their_shape_at_the_first_call_is_averaged(book: Notebook) -> None:
    outcome = book.ok(f"{DDP} --out lazy\n{LAZY}")
    assert "Lazy" in outcome.view
    assert book.ok("torch.equal(lazy[0][0], lazy[1][0]), [each[1] for each in lazy]").result == "(True, [3, 3])"
    apart = LAZY.replace("model = Lazy()", "torch.manual_seed(rank)\nmodel = Lazy()")
    assert "the same weights" in book.fails(f"{DDP}\n{apart}").evalue


@pytest.mark.parametrize(
    ("options", "body", "told"),
    [
        (
            "fsdp",
            LAZY,
            "Lazy has layers without a shape, such as LazyLinear: call it once before the optimizer is built",
        ),
        (
            "ddp",
            f"{LAZY.partition('optimizer =')[0]}\njupyter_distrib.prepare(model)",
            "Lazy has layers without a shape",
        ),
        (
            "ddp",
            LAZY.replace("self.head(self.norm(self.body(x)).relu())", "self.body(x)[:, :2]"),
            "call the model once",
        ),
    ],
    ids=["fsdp", "prepare", "a layer that is not called"],
)
def test_a_model_that_has_to_be_called_first_says_so(book: Notebook, options: str, body: str, told: str) -> None:
    assert told in book.fails(f"{DDP.replace('ddp', options)}\n{body}").evalue


TRAINED_BY_HAND = {
    "data": """
model = Net()
for x, y in batches:
    F.mse_loss(model(x), y).backward()
    for p in model.parameters(): p.data.add_(p.grad, alpha=-0.1)
    model.zero_grad()""",
    "data, assigned": """
model = Net()
for x, y in batches:
    F.mse_loss(model(x), y).backward()
    for p in model.parameters(): p.data -= 0.1 * p.grad
    model.zero_grad()""",
    "one step": """
model = Net()
F.mse_loss(model(features), targets).backward()
for p in model.parameters(): p.data -= 0.1 * p.grad""",
    "in a function": """
def train():
    model = Net()
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters(): p -= 0.1 * p.grad
        model.zero_grad()
train()""",
    "bare tensors": """
def train():
    w, b = torch.randn(6, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    for x, y in batches:
        F.mse_loss(x @ w + b, y).backward()
        for p in (w, b):
            p.data -= 0.1 * p.grad
            p.grad = None
train()""",
    "made anew": """
def train():
    w, b = torch.randn(6, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    for x, y in batches:
        F.mse_loss(x @ w + b, y).backward()
        w, b = ((p - 0.1 * p.grad).detach().requires_grad_() for p in (w, b))
train()""",
    "torch.func.grad": """
from torch.func import functional_call, grad
model = Net()
weights = dict(model.named_parameters())
def loss_of(weights, x, y): return F.mse_loss(functional_call(model, weights, (x,)), y)
for x, y in batches:
    gradients = grad(loss_of)(weights, x, y)
    weights = {name: (each - 0.1 * gradients[name]).detach() for name, each in weights.items()}""",
    "torch.autograd.grad": """
def train():
    model = Net()
    weights = list(model.parameters())
    for x, y in batches:
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), weights)
        for p, g in zip(weights, gradients): p.data -= 0.1 * g
train()""",
}


def test_generators_of_numpy_without_a_seed_split_alike_and_augment_apart(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 2 --strategy ddp --out drawn
        import numpy as np, torch
        if rank: np.random.rand(); torch.rand(3)
        split = np.random.default_rng().permutation(1000)[:9].tolist(), np.random.RandomState().rand(3).tolist()
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
        split, np.random.default_rng().random()""")
    check_splits(book, cell, [True, False])


def check_splits(book: Notebook, cell: str, alike: list[bool]) -> None:
    """Check which parts of `drawn` are alike on both ranks, and that the first one, the split, is another each time."""
    splits = []
    for _ in range(2):
        book.ok(cell)
        assert book.ok("[one == other for one, other in zip(*drawn)]").result == str(alike)
        splits.append(book.ok("drawn[0][0]").result)
    assert splits[0] != splits[1]


def test_a_second_optimizer_of_a_model_leaves_its_evaluation_whole(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            data, model = TensorDataset(torch.randn(40, 3)), torch.nn.Linear(3, 1)
            for kind in (torch.optim.SGD, torch.optim.Adam):
                optimizer = kind(model.parameters(), 0.01)
                for (x,) in DataLoader(data, 4):
                    model(x).sum().backward()
                    optimizer.step()
            model.eval()
            sum(len(model(x)) for (x,) in DataLoader(data, 4))""")
    )
    assert outcome.result == "ranks 0-1: 40"
    assert "Linear wrapped (optimizer of line 6)" in outcome.view
    assert "DistributedDataParallel" not in outcome.view


@pytest.mark.parametrize(
    "add", ["optimizer.add_param_group({'params': new})", "optimizer = torch.optim.SGD([*model.parameters()], 0.1)"]
)
def test_what_a_model_grows_is_trained_alike_on_all_ranks(book: Notebook, add: str) -> None:
    outcome = book.ok(
        dedent(f"""\
            %%distributed --ranks 2 --strategy ddp --out grown
            import torch
            model = torch.nn.Sequential(torch.nn.Linear(3, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                for _ in range(2):
                    model(torch.randn(4, 3)).square().sum().backward()
                    optimizer.step()
                model.append(torch.nn.Linear(3, 3))
                new = model[-1].parameters()
                {add}
                optimizer.zero_grad()
            [each.detach() for each in model[:3].parameters()]""")
    )
    assert "different weights" not in outcome.view
    assert (
        book.ok("all(bool((a == b).all()) for a, b in zip(*grown, strict=True)), len(grown[0])").result == "(True, 6)"
    )


@pytest.mark.parametrize("seed", ["0", "rank"])
@pytest.mark.parametrize("what", TRAINED_BY_HAND)
def test_training_without_an_optimizer_is_said_in_one_sentence(book: Notebook, what: str, seed: str) -> None:
    batches = "batches = [(features[i : i + 8], targets[i : i + 8]) for i in range(0, 32, 8)]"
    view = book.ok(f"{DDP}\ntorch.manual_seed({seed})\n{batches}{TRAINED_BY_HAND[what]};").view
    same, apart = "each rank has trained by itself, all of them identically", "the ranks have trained different weights"
    assert (same in view, apart in view) == (seed == "0", seed == "rank"), view


LEFT_BEHIND = """
torch.manual_seed(rank)
left = Net()
torch.manual_seed(0)
for each in left.parameters(): each.grad = torch.ones_like(each)
torch.nn.left = left, torch.optim.SGD(left.parameters(), lr=0.1, momentum=0.9)"""


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.slow
def test_nothing_is_said_of_what_an_earlier_cell_has_left(book: Notebook, failed: bool) -> None:
    book.ok(
        dedent(f"""\
            {DDP}--keep place
            place = rank
            dist.barrier()""")
    )  # these ranks and their group stay
    leave = book.fails if failed else book.ok
    leave(f"{NONE}\n{LEFT_BEHIND}\n{'1 / 0' if failed else ''}")

    view = book.ok(f"{DDP}\n{NOT_SAID['a step that the ranks average by themselves']}").view
    book.ok(f"{NONE}\nvars(torch.nn).pop('left', None)")  # a slower rank may have been stopped before it had it
    book.ok("del place")

    assert "different weights" not in view
    assert "differed between ranks" not in view


@pytest.mark.parametrize("what", NOT_SAID)
def test_what_is_meant_is_not_commented(book: Notebook, what: str) -> None:
    book.ok("train = DataLoader(data, batch_size=8, shuffle=True)")
    shown = book.ok(f"{DDP}\ntorch.manual_seed(0)\n{NOT_SAID[what]};").view

    assert "same" not in shown
    assert "for itself" not in shown
    assert "trained different" not in shown
    assert "every rank trains" not in shown
    assert "number of all samples" not in shown
    assert "of its" not in shown
    assert "nothing was trained" not in shown


def test_two_loaders_that_one_line_reads_to_their_ends_are_named_once(book: Notebook) -> None:
    outcome = book.ok(
        dedent(f"""\
            {DDP}
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            update(model, optimizer, features, targets)
            one, two = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
            for (x, _), (z, _) in zip(one, two, strict=True): model(x + z)""")
    )

    assert outcome.view.count("where nothing was trained") == 1


IN_BACKWARD = """
model = Net()
each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in each:
    p.register_post_accumulate_grad_hook(lambda p: (each[p].step(), each[p].zero_grad()))
for x, y in loader:
    F.mse_loss(model(x), y).backward()
"""
REFUSED = {
    "a batch that does not divide": (
        DDP.replace("2", "3", 1) + "--batch global",
        "fit(model, optimizer, loader)",
        "--batch global: the batch size 8 does not divide by 3 ranks; take 6 or 9, or leave the option out.",
    ),
    "a model that is not the same": (
        DDP,
        "model = nn.Linear(2, 2 + rank)\ntorch.optim.SGD(model.parameters(), lr=1)",
        "Linear has different parameters on different ranks: build it identically on all of them.",
    ),
    "a model without parameters": (
        DDP,
        "torch.optim.SGD(nn.ReLU().parameters(), lr=1)",
        "optimizer got an empty parameter list",
    ),
    "an optimizer that steps inside the backward pass": (
        DDP,
        IN_BACKWARD,
        "SGD steps inside backward(), before its gradients are averaged over the ranks: step after backward()",
    ),
    "prepare() on some of the ranks": (
        f"{DDP}--on 0",
        "jupyter_distrib.prepare(model)",
        "jupyter_distrib.prepare() needs every rank, and --on runs this cell on some of them: leave --on out.",
    ),
    "processes that a cell starts to be ranks": (
        DDP,
        "torch.multiprocessing.start_processes(print, (), 2, start_method='fork')",
        "torch.multiprocessing.start_processes() on a rank of a distributed cell: the ranks are there already",
    ),
    "an unknown strategy": ("%%distributed --strategy dpd", "1", "did you mean ddp?"),
    "an option of another strategy": ("%%distributed --batch global", "1", "--strategy ddp"),
    "an unknown way to batch": (DDP + "--batch globl", "1", "did you mean global?"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_one_sentence_and_the_next_cell_works(book: Notebook, what: str) -> None:
    line, body, sentence = REFUSED[what]

    assert sentence in book.fails(f"{line}\n{body}").traceback
    assert book.ok(f"{DDP}\ndist.get_world_size()").result == "ranks 0-1: 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["train = torch.compile(model, backend='aot_eager')", "model.compile(backend='aot_eager'); train = model"]
)
def test_the_head_says_what_a_compiled_model_loses(book: Notebook, how: str) -> None:
    cell = dedent(f"""\
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        {how}
        fit(train, optimizer, loader)""")

    assert "Net is compiled, so its gradients are averaged after its backward pass" in book.ok(f"{DDP}\n{cell}").view
    source = dedent(f"""\
        {DDP}
        model = Net()
        fit(model, torch.optim.SGD(model.parameters(), 0.1), loader)""")
    assert "is compiled" not in book.ok(source).view


COMPILED_STEP = dedent("""
    @torch.compile(backend="eager")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for x, y in loader:
        step(x, y)
        optimizer.step()
        optimizer.zero_grad()
    [parameter.sum().item() for parameter in model.parameters()]
""")


@pytest.mark.slow
def test_a_compiled_step_with_a_backward_pass_trains_as_an_eager_one(book: Notebook) -> None:
    book.ok(SETUP)
    cells = [
        f"{DDP}--batch global\n{COMPILED_STEP.replace('@torch.compile', before)}" for before in ("@torch.compile", "#")
    ]
    compiled, eager = [book.ok(f"{cell}") for cell in cells]

    assert compiled.result == eager.result
    assert "Dynamo" not in compiled.view


COMPILE = 'torch.compile(model, fullgraph=True, backend="eager")'
DISTILLED = dedent("""
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.teacher = Net(), Net()
            self.teacher.requires_grad_(False)

        def forward(self, x):
            self.teacher.eval()
            with torch.no_grad():
                wanted = self.teacher(x)
            self.teacher.train()
            return self.net(x) - wanted

    torch.manual_seed(1)
    model = Distilled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train = torch.compile(model, fullgraph=True, backend="eager")
    for x, y in DataLoader(data, batch_size=2):
        train(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    [parameter.sum().item() for parameter in model.parameters()]
""")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_sets_modes_in_its_forward_pass_is_compiled_as_one_graph(book: Notebook, strategy: str) -> None:
    compiled, eager = [
        book.ok(f"%%distributed --ranks 2 --strategy {strategy}\n{DISTILLED.replace(COMPILE, by)}")
        for by in (COMPILE, "model")
    ]

    assert compiled.result == eager.result
    assert "Dynamo" not in compiled.view
    assert "recompile" not in compiled.view


EXPANDED = """
class Placed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(5, 1)
        self.register_buffer("places", (torch.arange(5.0) + rank).expand(7, -1))
    def forward(self, x):
        return self.line(x + self.places[0])
model = Placed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(3, 5)).mean().backward()
    optimizer.step()
model.places.sum().item()
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_buffer_that_repeats_its_elements_is_that_of_rank_0(book: Notebook, strategy: str) -> None:
    assert book.ok(f"%%distributed --ranks 2 --strategy {strategy}\n{EXPANDED}").result == "ranks 0-1: 70.0"


SUMMED = "the loss is a sum over the batch, of which each rank has 1/2 with --batch global"
OWN_NUMBERS = "total() has returned every rank's own numbers"


@pytest.mark.slow
def test_a_summed_loss_of_a_split_batch_is_said(book: Notebook) -> None:
    book.ok(SETUP)
    cell = dedent("""\
        for x, y in loader:
            F.mse_loss(model(x), y, reduction='{}').backward()
            optimizer.step()""")
    assert SUMMED in book.ok(f"{DDP}--batch global\n{cell.format('sum')}").view
    assert SUMMED not in book.ok(f"{DDP}--batch global\n{cell.format('mean')}").view
    assert SUMMED not in book.ok(f"{DDP}\n{cell.format('sum')}").view


@pytest.mark.slow
def test_a_total_of_counts_of_the_training_is_said_to_be_of_each_rank(book: Notebook) -> None:
    counted = "fit(model, optimizer, loader)\n{}jupyter_distrib.total(48)"
    evaluated = "with torch.no_grad():\n    for x, y in loader: model(x)\n"
    assert OWN_NUMBERS in book.ok(f"{DDP}\n{counted.format('')}").view
    assert OWN_NUMBERS not in book.ok(f"{DDP}\n{counted.format(evaluated)}").view
    assert book.ok(f"{DDP}--shard-eval\n{counted.format(evaluated)}").result == "ranks 0-1: 96"


BROKEN_SUMS = """
from jupyter_distrib.worker.autoparallel.checks import tensor_sums
def full(tensors): raise torch.OutOfMemoryError("CUDA out of memory.\\nTried to allocate 9 GiB")
tensor_sums.magnitudes = full
fit(model, optimizer, loader)
later = 7
"""


def test_a_good_cell_stays_good_if_its_weights_cannot_be_compared(book: Notebook) -> None:
    outcome = book.ok(f"{DDP}--keep later\n{BROKEN_SUMS}later")

    assert outcome.result == "ranks 0-1: 7"
    assert (
        "could not check whether the ranks have trained together: OutOfMemoryError: CUDA out of memory." in outcome.view
    )
    left = BROKEN_SUMS.replace("torch.OutOfMemoryError", "torch.distributed.DistNetworkError")
    assert "trained together" not in book.ok(f"{DDP}\n{left}later").view  # as when another rank has left
    book.ok(
        dedent(f"""\
            {NONE}
            import importlib
            from jupyter_distrib.worker.autoparallel.checks import tensor_sums as sums
            importlib.reload(sums)""")
    )


STEADY = """
from torch.utils._python_dispatch import TorchDispatchMode
class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))
torch.manual_seed(1)
model = Net(norm=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=4)
steps = 0
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    with Operators() as operators:
        loss.backward()
        optimizer.step()
    steps += 1
steps, sorted(set(operators.seen))
"""
TO_THE_HOST = {"aten::_local_scalar_dense", "aten::_to_copy", "aten::item", "aten::_pin_memory"}


@pytest.mark.slow
def test_a_steady_step_neither_waits_for_the_device_nor_copies_to_the_host(book: Notebook) -> None:
    """Counted by operators, since the ones that wait for a GPU are called on the CPU as well."""
    by_hand = STEADY.replace("Net(norm=True)", "DistributedDataParallel(Net(norm=True))")
    book.ok(f"{NONE}--out theirs\ndist.init_process_group('gloo')\n{by_hand}")
    book.ok(f"{DDP}--out ours\n{STEADY}")

    theirs, ours = (set(ast.literal_eval(book.ok(f"{name}[0][1]").result)) for name in ("theirs", "ours"))

    assert book.ok("ours[0][0], ours[0][1] == ours[1][1]").result == "(6, True)"
    assert not ours & TO_THE_HOST
    assert ours - theirs <= {
        "aten::fill_.Scalar",
        "c10d::broadcast_",
        "aten::cat",
        "aten::slice.Tensor",
    }  # flags; buffers


def test_ranks_that_train_under_another_default_device_meet_on_the_cpu(book: Notebook) -> None:
    cell = dedent(f"""\
        {DDP}--out got
        model = Net()
        torch.set_default_device('meta')
    """)
    cell += "try:\n    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)\n    jupyter_distrib.total(1)\n"
    cell += "finally: torch.set_default_device(None)\n"
    cell += "for x, y in loader: update(model, optimizer, x, y)\nweights(model)"

    book.ok(cell)

    assert agree(book, "got")


ALONE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
read = []
for epoch in range(3):
    {each_epoch}
    train = DataLoader(TensorDataset(features[rank::world_size], targets[rank::world_size]), batch_size=8)
    for x, y in train:
        update(model, optimizer, x, y)
        {each_step}
    read.append(len(train))
    {after_epoch}
{after}
read, weights(model).sum().item()
"""
LOOK = "if rank == {}: next(iter(DataLoader(data, batch_size=8)))"
LATER = "if epoch == 1 and rank == {}: next(iter(DataLoader(data, batch_size=8)))"


@pytest.fixture
def patient(book: Notebook) -> Iterator[Notebook]:
    """Ranks that have no time limit when they wait for one another at a loader: only what they see ends the wait."""
    limit = dedent(f"""\
        {NONE}
        from jupyter_distrib.worker.autoparallel.data import consensus as meetings
        meetings.WAIT_S""")
    book.ok(f"{limit} = 1e9")
    yield book
    book.ok(f"{limit} = 10.0")


@pytest.mark.parametrize(
    ("place", "reader"),
    [
        ("before", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("before", 0), ("each_epoch", 1), ("each_step", 0), ("after_epoch", 1), ("after", 0)]
        ),
    ],
)
def test_a_loader_that_one_rank_reads_keeps_nobody_waiting(patient: Notebook, place: str, reader: int) -> None:
    look = LATER if place in ("each_epoch", "each_step") else LOOK
    parts = dict.fromkeys(("before", "each_epoch", "each_step", "after_epoch", "after"), "") | {
        place: look.format(reader)
    }

    patient.ok(f"{DDP}--out got\n{ALONE.format(**parts)}")

    assert patient.ok("got[0] == got[1], got[0][0]").result == "(True, [3, 3, 3])"  # not divided once more


def test_a_loader_that_is_read_on_some_of_the_ranks_only_waits_for_nobody(patient: Notebook) -> None:
    cell = dedent(f"""\
        {DDP}--on 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader: world_size""")
    assert patient.ok(cell)


@pytest.mark.slow
@pytest.mark.versions
def test_runs_leave_nothing_in_the_store_that_grows(book: Notebook) -> None:
    body = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{first}
for epoch in range(4):
    for x, y in DataLoader(TensorDataset(features{slice}, targets{slice}), batch_size=8): update(model, optimizer, x, y)
dist.barrier()
from jupyter_distrib.worker.pytorch import process_group as group
keys = sorted(key.partition("/")[2] for key in group.current.store._client.list_keys())
dist.barrier()
keys
"""
    train = body.format(slice="[rank::world_size]", first="if rank == 0: next(iter(loader))")
    shuffled = body.format(slice="", first="")
    if not hasattr(TCPStore, "list_keys"):
        pytest.skip("a torch that cannot tell what a store holds")

    keys = [book.ok(f"{DDP}--out keys\n{cell}") and book.ok("print(keys[0])").text for cell in (train, shuffled) * 4]
    keys = [re.sub("epoch/[0-9a-f]{24}", "epoch", each) for each in keys]  # a cell's file differs between runs

    assert keys[4:6] == keys[2:4]
    assert keys[6:8] == keys[2:4]


@pytest.mark.slow
def test_a_cell_on_some_of_the_ranks_waits_for_nobody(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(SETUP)
        alone = book.ok(
            dedent(f"""\
                {DDP}--on 1
                fit(model, optimizer, loader)
                jupyter_distrib.total(5), len(loader)""")
        )
        assert alone.result == "rank 1: (5, 6)"
        assert "trained on some of the ranks only, so nothing was averaged over ranks" in alone.view
        for strategy in ("fsdp", "tp"):
            refused = book.fails(f"{DDP.replace('ddp', strategy)}--on 1\n1").evalue
            assert refused.startswith("this strategy spreads a model over all ranks, and --on runs the cell on some")
        assert "global batch 16 = 2 x 8" in book.ok(f"{DDP}{FIT};").view


@pytest.mark.slow
def test_a_strategy_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        dedent("""\
            from jupyter_distrib.options import Option, count
            from jupyter_distrib.interfaces.strategy import Strategy
            class Twice(Strategy):
                options = (Option(flag='--times', metavar='N', meaning='how often', read=count),)
                def begin(self, run): self.times = int(run.options.get('times', 2))
                def prepare(self, *objects): return [each * self.times for each in objects]
            class Broken: pass
        """)
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[jupyter_distrib.strategies]\ntwice = theirs:Twice\nbroken = theirs:Broken\ngone = nowhere:Gone\n"
    )
    with Notebook(tmp_path, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}) as book:
        book.ok("%load_ext jupyter_distrib")
        line = "%%distributed --ranks 1 --strategy"
        assert book.ok(f"{line} twice --times 3\njupyter_distrib.prepare(7)").result == "rank 0: [21]"
        assert "--times N" in book.ok("%%distributed?").page
        assert "is not a subclass of" in book.fails(f"{line} broken\n1").traceback
        assert (
            "declared by theirs, but nowhere:Gone cannot be loaded: ModuleNotFoundError"
            in book.fails(f"{line} gone\n1").traceback
        )
        assert book.ok(f"{line} ddp\n1").result == "rank 0: 1"


def test_a_model_that_is_first_met_in_a_cuda_graph_is_refused_with_what_to_do(book: Notebook) -> None:
    failed = book.fails(
        dedent(f"""\
            {DDP}
            import torch
            from unittest import mock
            with mock.patch('jupyter_distrib.worker.autoparallel.training.data_parallel.is_capturing', lambda: True):
                model = torch.nn.Linear(2, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()""")
    )

    assert "train a few steps before the capture" in failed.traceback


def test_gradients_that_a_cell_has_kept_stay_as_they_were(book: Notebook) -> None:
    """As gradient surgery keeps those of one loss, while it computes those of another."""
    outcome = book.ok(
        dedent(f"""\
            {DDP}
            import torch
            model = torch.nn.Linear(4, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            kept = []
            for place in (0, 1, 0):
                opt.zero_grad()
                model(torch.ones(8, 4))[:, place].sum().backward()
                kept.append(([p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]))
            all(torch.equal(a, b) for was, copied in kept for a, b in zip(was, copied))""")
    )
    assert outcome.result == "ranks 0-1: True"


def test_totals_of_dicts_and_lists_are_those_of_their_items(book: Notebook) -> None:
    given = "{'right': rank + 1, 'seen': [2.5, torch.ones(2)]} if rank else {'seen': [2.5, torch.ones(2)], 'right': 1}"
    cell = f"import jupyter_distrib, torch\nsorted(jupyter_distrib.total({given}).items())"
    shown = "[('right', 3), ('seen', [5.0, tensor([2., 2.])])]"
    assert book.ok(f"{DDP}--shard-eval\n{cell}").result == f"ranks 0-1: {shown}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "{rank: 1}",
            "total() was given ({0: number}) on this rank and ({1: number}) on another one: give the same keys",
        ),
        ("{'f1': 'high'}", "total() adds numbers and tensors, also in dicts and lists, and 'f1' is str"),
    ],
)
def test_totals_that_cannot_be_added_are_reported(book: Notebook, given: str, told: str) -> None:
    failed = book.fails(
        dedent(f"""\
            {DDP}--shard-eval
            import jupyter_distrib
            jupyter_distrib.total({given})""")
    )
    assert told in failed.traceback


def test_generators_of_python_and_torch_seed_without_a_seed_split_alike_and_then_differ(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 2 --strategy ddp --out drawn
        import random, tempfile, torch
        if rank: random.random(); torch.rand(3)
        torch.seed()
        split = random.Random().sample(range(1000), 9), torch.randperm(1000)[:9].tolist()
        name = next(tempfile._RandomNameSequence())
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
        split, random.Random().random(), name""")
    check_splits(book, cell, [True, False, False])


def test_nothing_of_a_training_is_left_on_the_ranks_in_the_next_cell(book: Notebook) -> None:
    """torch's compiler caches functions that the strategy has replaced; with the first training that a rank runs."""
    book.ok(
        """\
%%distributed --ranks 2 --strategy ddp --fresh
import torch
class Left(torch.nn.Linear): pass
trained = Left(4, 1)
optimizer = torch.optim.SGD(trained.parameters(), 0.1)
for _ in range(2):
    trained(torch.ones(2, 4)).mean().backward(); optimizer.step()
"""
    )
    left = book.ok(
        """\
%%distributed --ranks 2
import gc
gc.collect()
sum(type(each).__name__ == 'Left' for each in gc.get_objects())
"""
    )
    assert left.result == "ranks 0-1: 0"
