"""What Trainer, Lightning and Accelerate report by themselves: one run of each tracker, and each number once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trackers import local_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = """\
%%distributed --ranks 2
import torch, transformers
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x=None, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}
data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(32)]
arguments = transformers.TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=3, logging_steps=1, report_to=["mlflow", "wandb", "tensorboard"],
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)
transformers.Trainer(Model(), arguments, train_dataset=data).train()
None
"""
LIGHTNING = """\
%%distributed --ranks 2
import lightning, torch, mlflow
from lightning.pytorch.loggers import MLFlowLogger
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
logger = MLFlowLogger(tracking_uri=mlflow.get_tracking_uri(), experiment_name="lightning")
trainer = lightning.Trainer(
    max_epochs=1, devices=world_size, accelerator="cpu", strategy="ddp", logger=logger, log_every_n_steps=1,
    enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(Model(), loader)
None
"""
ACCELERATE = """\
%%distributed --ranks 2
from accelerate import Accelerator
accelerator = Accelerator(log_with="mlflow")
accelerator.init_trackers("accelerate", config={"lr": 1})
for step in range(3):
    accelerator.log({"loss": 1 / (step + 1)}, step=step)
accelerator.end_training()
None
"""


def test_trainer_reports_to_one_run_of_each_tracker(tmp_path: Path) -> None:
    for name in ("mlflow", "wandb", "tensorboard", "transformers"):
        pytest.importorskip(name)
    # Its monitor of the machine leaves a socket in the folder of temporary files.
    with local_store.opened(tmp_path, WANDB_MODE="offline", WANDB_X_DISABLE_STATS="true", HF_HUB_OFFLINE="1") as book:
        book.ok(TRAINER)
        (run,) = local_store.runs(tmp_path, 1)
        assert len(run.metrics["loss"]) == len(run.metrics["grad_norm"]) == 3
        assert run.params["max_steps"] == "3"
        assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1
        assert len([*tmp_path.glob("out/runs/*/events.out.tfevents.*")]) == 1


def test_lightnings_logger_writes_into_the_run_of_the_cell_in_its_experiment(tmp_path: Path) -> None:
    for name in ("mlflow", "lightning"):
        pytest.importorskip(name)
    with local_store.opened(tmp_path) as book:
        book.ok(LIGHTNING)
        (run,) = local_store.runs(tmp_path, 1)
        assert (run.experiment, len(run.metrics["loss"])) == ("lightning", 4)


def test_accelerates_tracker_writes_into_the_run_of_the_cell(tmp_path: Path) -> None:
    for name in ("mlflow", "accelerate"):
        pytest.importorskip(name)
    with local_store.opened(tmp_path) as book:
        book.ok(ACCELERATE)
        (run,) = local_store.runs(tmp_path, 1)
        assert (len(run.metrics["loss"]), run.params["lr"]) == (3, "1")
