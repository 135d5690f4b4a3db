"""`--strategy deepspeed`: the unchanged loop of one device trains through DeepSpeed's engine, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.pools.command.test_restarts import POOL as TWO_NODES
from tests.product.test_export import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LINE = "%%distributed --ranks 2 --out got --strategy deepspeed "
UNCHANGED = """
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(samples, batch_size=4)
for a, b in loader:
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WEIGHTS = """
torch.cat([each.flatten() for each in model.state_dict().values()])
"""
BY_HAND = """%%distributed --ranks 2 --out expected
import deepspeed
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
settings = config({stage}, zero_allow_untested_optimizer=True{more})
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for step in range(20):
    a, b = x[step * 8 + rank : step * 8 + 8 : 2], y[step * 8 + rank : step * 8 + 8 : 2]
    engine.backward(nn.functional.mse_loss(engine(a), b))
    engine.step()
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    weights = weights_of(model)
weights
"""


TWO_MODELS = """
model, other = net(), net()
first = torch.optim.SGD(model.parameters(), lr=0.05)
second = torch.optim.SGD(other.parameters(), lr=0.05)
for a, b in DataLoader(samples, batch_size=4):
    for each, optimizer in ((model, first), (other, second)):
        optimizer.zero_grad()
        nn.functional.mse_loss(each(a), b * (1 + (each is other))).backward()
        optimizer.step()
"""


def difference(book: Notebook) -> float:
    return float(book.ok("max((got[r] - expected[0]).abs().max().item() for r in (0, 1))").result)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_unchanged_loop_trains_as_deepspeed_by_hand(ours: Notebook, stage: int) -> None:
    ours.ok(BY_HAND.format(stage=stage, more=""))
    shown = ours.ok(f"{LINE}--zero {stage}{UNCHANGED}{WEIGHTS}")

    assert difference(ours) < 1e-6
    assert f"Sequential in DeepSpeed's engine, ZeRO stage {stage}, wrapped (optimizer of line 3)" in shown.view
    assert "sampler added (loader of line 5), global batch 8 = 2 x 4" in shown.view


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_two_nodes_train_as_those_of_one_and_go_on_when_one_is_lost(ours: Notebook, stage: int) -> None:
    lost = "import os, signal\nif rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    "
    dies = f"{lost}os.kill(os.getpid(), signal.SIGKILL)\n"
    by_hand = BY_HAND.format(stage=stage, more="").replace("--ranks 2", f"--ranks 2 {TWO_NODES}")
    ours.ok(by_hand)
    line = f"{LINE}--zero {stage} {TWO_NODES} --max-restarts 1\n"
    shown = ours.ok(f"{line}{dies}{UNCHANGED}{WEIGHTS}")

    assert difference(ours) < 1e-6
    assert "attempt 2 of 2, since rank 1" in shown.view
    ours.ok(BY_HAND.format(stage=stage, more="").replace("--ranks 2", "--ranks 2 --pool local"))
    assert difference(ours) < 1e-6


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loop_that_accumulates_by_itself_trains_as_one_device_does(ours: Notebook, stage: int) -> None:
    accumulating = """
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for number, (a, b) in enumerate(DataLoader(samples, batch_size=2), 1):
    (nn.functional.mse_loss(model(a), b) / 2).backward()
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
    ours.ok(f"{LINE}--zero {stage}{accumulating}{WEIGHTS}")

    ours.ok("expected = [alone()[1]]")
    assert difference(ours) < 1e-4


@pytest.mark.parametrize("stage", [0, 2])
def test_the_configuration_of_the_notebook_accumulates_and_clips(ours: Notebook, stage: int) -> None:
    more = ", gradient_accumulation_steps=2, gradient_clipping=0.5"
    ours.ok(BY_HAND.format(stage=stage, more=more).replace("gradient_clipping=0.5", '**{"gradient_clipping": 0.5}'))
    ours.ok(f"ours = {{**config({stage}), 'gradient_accumulation_steps': 2, 'gradient_clipping': 0.5}}")
    ours.ok(f"{LINE}--config ours{UNCHANGED}{WEIGHTS}")

    assert difference(ours) < 1e-6


def test_prepare_returns_the_engine(ours: Notebook) -> None:
    ours.ok(BY_HAND.format(stage=2, more=""))
    prepared = UNCHANGED.replace(
        "for a, b in loader",
        "engine, optimizer, loader = jupyter_distrib.prepare(model, optimizer, loader)\nfor a, b in loader",
    ).replace("model(a)", "engine(a)")
    ours.ok(f"{LINE}--zero 2{prepared}assert type(engine).__name__ == 'DeepSpeedEngine'\n{WEIGHTS}")

    assert difference(ours) < 1e-6


def test_kept_models_go_on_and_a_scheduler_steps(ours: Notebook) -> None:
    first = UNCHANGED.replace("for a, b in loader", "for a, b in list(loader)[:8]")
    ours.ok(f"{LINE}--zero 1 --keep model,optimizer,loader{first}{WEIGHTS}")
    again = UNCHANGED.partition("for a, b")[2].replace(" in loader", "for a, b in list(loader)[8:]", 1)
    ours.ok(f"{LINE}--zero 1\n{again}{WEIGHTS}")
    ours.ok("expected = got")
    ours.ok(f"{LINE}--zero 1{UNCHANGED}{WEIGHTS}")
    assert difference(ours) < 1e-6

    scheduled = UNCHANGED.replace(
        "loader = ", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)\nloader = "
    ).replace("    optimizer.step()\n", "    optimizer.step()\n    scheduler.step()\n")
    shown = ours.ok(f"{LINE}--zero 2{scheduled}optimizer.param_groups[0]['lr']")
    assert "lr_scheduler.step()` before" not in shown.text
    assert ours.ok("got[0], got[1]").result == "(0.003125, 0.003125)"


def test_after_a_stop_the_next_cell_trains_and_kept_ones_say_that_groups_are_gone(ours: Notebook) -> None:
    ours.ok(f"{LINE}--zero 2 --keep model,optimizer,loader{UNCHANGED}")
    hangs = UNCHANGED.partition("for a, b")[2].replace(" in loader", "for a, b in loader", 1)
    hangs += "    if rank: print('ready', flush=True); import time; time.sleep(100)\n"
    ours.start(f"{LINE}--zero 2\n{hangs}")
    ours.until("ready")
    ours.manager.interrupt_kernel()
    assert ours.finish().ename == "KeyboardInterrupt"

    refused = ours.fails(f"{LINE}--zero 2\nloss = model(x[:4]).sum(); loss.backward(); optimizer.step()")
    assert "engine is gone" in refused.evalue
    goes_on = UNCHANGED.replace(
        "model = net()", "weights = model.state_dict()\nmodel = net()\nmodel.load_state_dict(weights)"
    )
    ours.ok(f"{LINE}--zero 2{goes_on}{WEIGHTS}")
    assert ours.ok("torch.equal(got[0], got[1])").result == "True"
    ours.ok(f"{LINE}--zero 2{UNCHANGED}{WEIGHTS}")
    ours.ok("expected = [alone()[1]]")
    assert difference(ours) < 1e-4


REFUSED = {
    "--zero 2" + UNCHANGED.replace("    optimizer.step", "    nn.utils.clip_grad_norm_(model.parameters(), 1)\n    optimizer.step"):
        'clip_grad_norm_ finds no gradients: ZeRO has divided them among the ranks. Leave it out, and put "gradient_clipping"',
    "--zero 0" + UNCHANGED + "model": "the cell ends with a model that DeepSpeed's engine has bound to its rank",
    "--zero 3" + UNCHANGED + "[jupyter_distrib.prepare(model)]": "end it with model.state_dict(), which is whole, or keep",
    "--zero 1" + UNCHANGED + "jupyter_distrib.save('ckpt', model=model, optimizer=optimizer)":
        "jupyter_distrib.save(optimizer=...): ZeRO divides it among the ranks, and DeepSpeed keeps it in a form of its own",
    "--zero 1\nw = torch.ones(3, requires_grad=True)\ntorch.optim.SGD([w], lr=0.1)":
        "SGD (line 3) trains 0 models and 1 tensors that belong to no model",
    "--zero 1" + UNCHANGED + "nn.parallel.DistributedDataParallel(model)":
        "Sequential is trained by DeepSpeed already: leave out DistributedDataParallel, or use --strategy ddp",
    "--zero 0" + TWO_MODELS: "ZeRO stage 0 trains one model with one loss in a cell: use --zero 1, 2 or 3",
    "--config with_optimizer" + UNCHANGED: "AdamW (line 3) is built by the cell, and DeepSpeed's configuration names an optimizer",
    "--config eights" + UNCHANGED: "the loader of line 5 gives each rank batches of 4, and DeepSpeed's configuration says 8",
    "--zero 1 --on 0\n1": "--strategy deepspeed trains on all ranks, and --on runs the cell on some of them",
}  # fmt: skip


@pytest.mark.parametrize("cell", REFUSED)
def test_what_cannot_be_is_one_sentence(ours: Notebook, cell: str) -> None:
    ours.ok("eights = {'train_batch_size': 16}")
    ours.ok("with_optimizer = {'optimizer': {'type': 'Adam', 'params': {'lr': 0.1, 'torch_adam': True}}}")

    assert REFUSED[cell] in ours.fails(LINE + cell).evalue


def test_a_refused_configuration_starts_no_rank(ours: Notebook) -> None:
    ours.ok("ds = {'fp16': {'enabled': True}}")
    runs = "from jupyter_distrib.kernel.session import session; len(session.current().history)"
    before = ours.ok(runs).result
    refused = ours.fails(f"{LINE}--config ds\n1")

    assert refused.ename == "DistributedError"
    assert refused.view == ""
    assert ours.ok(runs).result == before


@pytest.mark.parametrize("stage", [0, 2])
def test_the_trained_weights_come_to_the_notebook_and_are_saved(ours: Notebook, stage: int) -> None:
    ours.ok(f"{LINE}--zero {stage}{UNCHANGED}jupyter_distrib.save('ckpt', model=model)\nmodel.state_dict()")
    ours.ok("import jupyter_distrib; loaded = net(); _ = jupyter_distrib.load('ckpt', model=loaded)")
    ours.ok("trained = net(); _ = trained.load_state_dict(got[1])")

    assert float(ours.ok("(weights_of(trained) - alone()[1]).abs().max().item()").result) < 1e-4
    assert ours.ok("torch.equal(weights_of(loaded), weights_of(trained))").result == "True"


def test_an_engine_saves_and_loads_what_zero_divides(ours: Notebook) -> None:
    engine = "engine = jupyter_distrib.prepare(model, optimizer)[0]\n"
    ours.ok(f"{LINE}--zero 3{UNCHANGED}{engine}engine.save_checkpoint('zero'){WEIGHTS}")
    ours.ok("expected = got")
    built = UNCHANGED.partition("loader =")[0]
    ours.ok(f"{LINE}--zero 3{built}{engine}engine.load_checkpoint('zero'){WEIGHTS}")

    assert difference(ours) == 0.0


def test_the_optimizer_of_the_configuration_trains_by_the_engine(ours: Notebook) -> None:
    ours.ok(
        "with_adam = {**config(2), 'optimizer': {'type': 'AdamW', 'params': {'lr': 0.05, 'weight_decay': 0.01, "
        "'torch_adam': True}}}"
    )
    loop = """
model = net()
engine = jupyter_distrib.prepare(model)
for a, b in DataLoader(samples, batch_size=4):
    loss = nn.functional.mse_loss(engine(a), b)
    engine.backward(loss)
    engine.step()
"""
    ours.ok(f"{LINE}--config with_adam{loop}{WEIGHTS}")

    ours.ok("expected = [alone()[1]]")
    assert difference(ours) < 1e-4


def test_gpus_that_are_not_there_refuse_fp16_before_the_cell(ours: Notebook) -> None:
    ours.ok("ds = {'fp16': {'enabled': True}}")
    refused = ours.fails(f"{LINE.replace('--ranks 2', '--gpus 2')}--config ds\nprint('begun')")

    assert "DeepSpeed trains in fp16 on GPUs only, and these ranks are on the CPU" in refused.evalue
    assert "begun" not in refused.text
    assert ours.ok(f"{LINE}\nrank").status == "ok"


def test_two_models_with_two_losses_train_as_on_one_device(ours: Notebook) -> None:
    both = "torch.cat([p.flatten() for each in (model, other) for p in each.state_dict().values()])"
    ours.ok(f"{TWO_MODELS.replace('=4', '=8')}\nexpected = [{both}.clone()]")
    ours.ok(f"{LINE}--zero 1{TWO_MODELS}{both}")

    assert difference(ours) < 1e-5


def test_an_exported_cell_trains_to_the_same_weights_under_torchrun(ours: Notebook, tmp_path: Path) -> None:
    ours.ok("settings = config(2)")
    saves = "if rank == 0: torch.save(model.state_dict(), 'zero.pt')\n"
    ours.ok(f"{LINE}--config settings{UNCHANGED}{saves}{WEIGHTS}")
    ours.ok(f"import os; os.chdir({str(tmp_path)!r})")
    ours.ok("%distributed_export got train.py")

    torchrun(tmp_path, "train.py")

    loaded = "torch.cat([each.flatten() for each in torch.load('zero.pt').values()])"
    assert ours.ok(f"torch.equal({loaded}, got[0])").result == "True"
