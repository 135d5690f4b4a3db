"""Public notebooks of other platforms that log to MLflow, which nobody here has written: their own lines, made smaller, from
top to bottom, and what the store holds then. `tests/compat/test_public_notebooks.py` has those without MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Outcome
from tests.processes import is_alive, wait_until
from tests.settings_files import write_trusted
from tests.trackers.local_store import opened, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SMALL_MODEL = """\
import torch, transformers
torch.manual_seed(0)

def small_model(num_labels=4):
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=num_labels))

def small_data(count=32):
    return [{"input_ids": [1 + i % 9] * 6, "attention_mask": [1] * 6, "labels": i % 4} for i in range(count)]
"""


def executed(folder: Path, platforms: str, cells: list[str]) -> list[Outcome]:
    """What each cell left, in a notebook with a local store and the import names of these platforms."""
    with opened(folder, **QUIET) as book:
        book.ok(f"%distributed_compat {platforms}")
        outcomes = []
        for cell in cells:
            outcomes.append(book.cell(cell, timeout_s=180))
            assert outcomes[-1].status == "ok", outcomes[-1].text
        pid = book.pid
        book.client.shutdown()  # trackers end in the background, and the notebook waits for them when it is shut down
        assert wait_until(lambda: not is_alive(pid), 60)
        return outcomes


def needs(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"needs {name}: sh .ci/trackers")


def test_a_classifier_of_news_on_eight_gpus_logs_one_run_with_its_model(tmp_path: Path) -> None:
    needs("mlflow", "transformers", "sklearn")
    *_, training, main = executed(
        tmp_path,
        "databricks",
        [
            SMALL_MODEL,
            """\
import os
from dataclasses import dataclass

def _env(name: str, default: str) -> str:
    return os.environ.get(name, default)

@dataclass
class Config:
    num_gpus: int = int(_env("NUM_GPUS", "2"))
    gpu_type: str = None
    epochs: float = float(_env("EPOCHS", "2"))
    train_batch_size: int = int(_env("TRAIN_BATCH_SIZE", "4"))
    learning_rate: float = float(_env("LEARNING_RATE", "5e-5"))
    output_dir: str = _env("OUTPUT_DIR", "modernbert_agnews_ddp")

CFG = Config()
LABELS = ["World", "Sports", "Business", "Sci/Tech"]
""",
            """\
from serverless_gpu import distributed

def _train_impl():
    import time
    import numpy as np
    import torch
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import Trainer, TrainingArguments, set_seed

    cfg = CFG
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_main = rank == 0

    def log(msg):
        print(f"[rank {rank}/{world_size}] {msg}")

    set_seed(42)
    log(f"CUDA devices visible: {torch.cuda.device_count()}")
    model = small_model(len(LABELS))

    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        preds = np.argmax(logits, axis=-1)
        return {"accuracy": accuracy_score(labels, preds), "f1_macro": f1_score(labels, preds, average="macro")}

    args = TrainingArguments(
        output_dir=cfg.output_dir,
        num_train_epochs=cfg.epochs,
        per_device_train_batch_size=cfg.train_batch_size,
        per_device_eval_batch_size=8,
        learning_rate=cfg.learning_rate,
        bf16=torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        report_to=[],
        ddp_find_unused_parameters=False,
        seed=42,
    )
    trainer = Trainer(model=model, args=args, train_dataset=small_data(), eval_dataset=small_data(8),
                      compute_metrics=compute_metrics)
    t0 = time.time()
    trainer.train()
    train_secs = time.time() - t0
    metrics = trainer.evaluate()
    log(f"train_seconds={train_secs:.1f} steps={trainer.state.global_step}")

    if is_main:
        import mlflow

        nested = mlflow.active_run() is not None
        with mlflow.start_run(run_name="modernbert-agnews-multigpu", nested=nested):
            mlflow.log_params({
                "effective_batch_size": cfg.train_batch_size * world_size,
                "world_size": world_size,
                "training_mode": f"ddp-{world_size}x{cfg.gpu_type}",
            })
            mlflow.log_metric("train_seconds", train_secs)
            mlflow.log_metrics({
                k.replace("eval_", ""): float(v) for k, v in metrics.items() if isinstance(v, (int, float))
            })
    return metrics

run_train = distributed(gpus=CFG.num_gpus, gpu_type=CFG.gpu_type)(_train_impl)
""",
            """\
def main():
    if os.environ.get("RANK") is not None and os.environ.get("WORLD_SIZE") is not None:
        return _train_impl()
    result = run_train.distributed()
    print("Distributed training finished.")
    return result

if __name__ == "__main__":
    metrics = main()
""",
            "len(metrics), metrics[0]['eval_accuracy'] == metrics[1]['eval_accuracy']",
        ],
    )
    assert "Distributed training finished." in training.stdout
    assert "steps=8" in training.view, "each of the two ranks has half of the data"
    assert main.result == "(2, True)"
    found = runs(tmp_path)
    (logged,) = [run for run in found if run.params.get("world_size")]
    assert (logged.params["world_size"], logged.params["effective_batch_size"], logged.status) == ("2", "8", "FINISHED")
    assert "f1_macro" in logged.metrics
    assert len(found) <= 2, "the run of the call, and the one that the notebook nests into it"


def test_a_fine_tuning_whose_run_id_is_returned_takes_its_model_afterwards(tmp_path: Path) -> None:
    needs("mlflow", "transformers")
    *_, logged = executed(
        tmp_path,
        "databricks",
        [
            SMALL_MODEL + "import os\nMODEL_NAME, OUTPUT_DIR = 'small', 'checkpoints'",
            """\
from serverless_gpu import distributed
from serverless_gpu import runtime as rt

@distributed(gpus=2)
def run_train():
    import logging
    import mlflow
    import os
    from transformers import Trainer, TrainingArguments
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    model = small_model()
    trainer = Trainer(
        model = model,
        train_dataset = small_data(),
        args = TrainingArguments(
            per_device_train_batch_size = 2,
            gradient_accumulation_steps = 2,
            warmup_steps = 2,
            max_steps = 4,
            learning_rate = 2e-4,
            logging_steps = 1,
            weight_decay = 0.01,
            lr_scheduler_type = "linear",
            seed = 3407,
            output_dir = OUTPUT_DIR,
            report_to = "mlflow",
            run_name = f"{MODEL_NAME}-finetune-unsloth",
        ),
    )
    trainer.train()
    if rt.get_global_rank() == 0:
        logging.info("Saving trained model...")
        trainer.save_model(OUTPUT_DIR)
    mlflow_run_id = None
    if mlflow.last_active_run() is not None:
        mlflow_run_id = mlflow.last_active_run().info.run_id
    return mlflow_run_id
""",
            "run_id = run_train.distributed()[0]",
            """\
import mlflow
with mlflow.start_run(run_id=run_id):
    mlflow.log_param("base_model", MODEL_NAME)
    mlflow.log_artifacts(OUTPUT_DIR, "model")
    print(sorted(os.listdir(OUTPUT_DIR))[-1], len(run_id))
""",
        ],
    )
    assert logged.stdout == "training_args.bin 32\n"
    (run,) = runs(tmp_path, 1)
    assert (len(run.metrics["loss"]), run.params["base_model"], run.params["max_steps"]) == (4, "small", "4")


def test_a_run_that_is_begun_before_the_training_has_its_curves_and_the_registered_model(tmp_path: Path) -> None:
    needs("mlflow", "transformers", "accelerate")
    *_, training, shown = executed(
        tmp_path,
        "databricks",
        [
            SMALL_MODEL + "import os\nREGISTRY, NAME = 'sqlite:///registry.db', 'main.modernbert_agnews'",
            """\
from serverless_gpu import distributed

def _logmodel_model_kw():
    import mlflow
    return {"name": "model"} if int(mlflow.__version__.split(".")[0]) >= 3 else {"artifact_path": "model"}

def _train_impl():
    import logging
    import time
    import mlflow.pyfunc
    from transformers import Trainer, TrainingArguments

    class Pipeline(mlflow.pyfunc.PythonModel):
        def predict(self, model_input: list[str]) -> list[str]:
            return model_input

    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_main = rank == 0
    args = TrainingArguments(
        output_dir="modernbert_agnews_ddp",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=2,
        report_to=["mlflow"],
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=small_model(), args=args, train_dataset=small_data(), eval_dataset=small_data(8))
    if is_main:
        import mlflow
        logging.getLogger("mlflow.tracking.context.registry").setLevel(logging.ERROR)
        mlflow.set_registry_uri(REGISTRY)
        mlflow.start_run(run_name="modernbert-agnews-multigpu")
    t0 = time.time()
    trainer.train()
    train_secs = time.time() - t0
    metrics = trainer.evaluate()
    if is_main:
        for _k, _v in {"ddp_world_size": world_size, "training_mode": f"ddp-{world_size}x"}.items():
            try:
                mlflow.log_param(_k, _v)
            except Exception:
                pass
        mlflow.log_metric("train_seconds", train_secs)
        mlflow.log_metrics({k.replace("eval_", ""): float(v) for k, v in metrics.items()})
        info = mlflow.pyfunc.log_model(
            python_model=Pipeline(), **_logmodel_model_kw(), registered_model_name=NAME, pip_requirements=[]
        )
        from mlflow.tracking import MlflowClient
        MlflowClient().set_registered_model_alias(NAME, "champion", info.registered_model_version)
        mlflow.end_run()
    return metrics

run_train = distributed(gpus=2, gpu_type=None)(_train_impl)
""",
            "result = run_train.distributed()\nprint('Distributed training finished.')",
            (
                "from mlflow import MlflowClient\n"
                "MlflowClient(registry_uri=REGISTRY).get_model_version_by_alias(NAME, 'champion').version"
            ),
        ],
    )
    assert "Distributed training finished." in training.stdout
    assert shown.result in ("1", "'1'")
    (run,) = runs(tmp_path, 1)
    assert (run.name, run.status, run.params["ddp_world_size"]) == ("modernbert-agnews-multigpu", "FINISHED", "2")
    assert len(run.metrics["loss"]) >= 4
    assert len(run.metrics["train_seconds"]) == 1


def test_a_fine_tuning_in_a_run_of_its_own_function_or_logged_after_the_training(tmp_path: Path) -> None:
    needs("mlflow", "transformers", "accelerate")
    *_, first, second = executed(
        tmp_path,
        "databricks",
        [
            SMALL_MODEL + "import os\nOUTPUT_DIR, RUN_NAME, TRAINING_MODE = 'adapters', 'qwen-fraud', 'distributed'",
            """\
import mlflow
from contextlib import contextmanager

mlflow.set_experiment("/Users/me/agency-finetuning")

@contextmanager
def start_mlflow_run(mlflow_module, run_name: str):
    try:
        with mlflow_module.start_run(run_name=run_name, log_system_metrics=True) as run:
            yield run
    except TypeError:
        with mlflow_module.start_run(run_name=run_name) as run:
            yield run

def trainer_of(run_name):
    from transformers import Trainer, TrainingArguments
    args = TrainingArguments(output_dir=OUTPUT_DIR, max_steps=3, logging_steps=1, report_to="mlflow", run_name=run_name,
                             save_strategy="no", per_device_train_batch_size=2, per_device_eval_batch_size=2)
    return Trainer(model=small_model(), args=args, train_dataset=small_data(), eval_dataset=small_data(8))

def train_qwen35_unsloth(save_artifacts: bool = True) -> str:
    import mlflow
    trainer = trainer_of(RUN_NAME)
    with start_mlflow_run(mlflow, RUN_NAME) as run:
        mlflow.log_params({"training_mode": TRAINING_MODE, "lora_r": 16})
        train_output = trainer.train()
        metrics = getattr(train_output, "metrics", {}) or {}
        for metric_name, metric_value in metrics.items():
            if isinstance(metric_value, (int, float)):
                mlflow.log_metric(f"trainer_{metric_name}", float(metric_value))
        if save_artifacts:
            trainer.save_model(OUTPUT_DIR)
            mlflow.log_param("adapter_output_dir", OUTPUT_DIR)
        return run.info.run_id
""",
            """\
from serverless_gpu import distributed

@distributed(gpus=2)
def run_distributed_train():
    from serverless_gpu import runtime as rt
    return train_qwen35_unsloth(save_artifacts=rt.get_global_rank() == 0)

distributed_run_ids = run_distributed_train.distributed()
RUN_ID = next((run_id for run_id in distributed_run_ids if run_id), None)
print(len(set(distributed_run_ids)), RUN_ID)
""",
            """\
@distributed(gpus=2, gpu_type=None)
def run_training():
    import os
    import mlflow
    trainer = trainer_of("qwen3-8b-fullweight-sft-agency")
    train_result = trainer.train()
    trainer.log_metrics("train", train_result.metrics)
    eval_metrics = trainer.evaluate()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank == 0:
        mlflow.log_params({"training_method": "full_weight_sft", "num_gpus": 2})
    print(f"  Eval loss: {eval_metrics['eval_loss']:.4f}")

run_training.distributed()
""",
        ],
    )
    own, after = runs(tmp_path, 2)
    assert first.stdout.split() == ["1", own.id]
    assert "Eval loss" in second.view
    assert (own.name, own.params["adapter_output_dir"], len(own.metrics["loss"])) == ("qwen-fraud", "adapters", 3)
    assert (after.name, after.params["num_gpus"]) == ("qwen3-8b-fullweight-sft-agency", "2")
    assert len(after.metrics["eval_loss"]) == 1
    assert {own.experiment, after.experiment} == {"/Users/me/agency-finetuning"}


LIGHTNING = """\
import torch
import lightning as L
import lightning as pl
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
"""


def test_classes_that_are_given_to_a_training_with_lightnings_logger(tmp_path: Path) -> None:
    needs("mlflow", "lightning")
    write_trusted(tmp_path, 'remote = "here"\n[pools.here]\nkind = "local"\n')
    *_, trained = executed(
        tmp_path,
        "databricks",
        [
            LIGHTNING + "import mlflow\nmlflow.pytorch.autolog()",
            """\
config = {
    'model': {'model_name': 'detr', 'num_classes': 3},
    'data': {'batch_size': 4, 'num_workers': 0, 'image_size': 8},
    'training': {'max_epochs': 2, 'use_serverless_gpu': True, 'serverless_gpu_type': None, 'serverless_gpu_count': 2},
}

class DetectionModel(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(8, config["num_classes"])

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class DetectionDataModule(pl.LightningDataModule):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def setup(self, stage=None):
        self.train_dataset = TensorDataset(torch.randn(32, self.config["image_size"]), torch.randint(3, (32,)))

    def train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.config["batch_size"],
                          num_workers=self.config["num_workers"])

class UnifiedTrainer:
    def __init__(self, config, model, data_module, logger):
        self.config, self.model, self.data_module, self.logger = config, model, data_module, logger

    def train(self):
        trainer = pl.Trainer(max_epochs=self.config["max_epochs"], accelerator="auto", devices=2, strategy="ddp",
                             logger=self.logger, log_every_n_steps=1, enable_progress_bar=False,
                             enable_checkpointing=False)
        trainer.fit(self.model, self.data_module)
        return {k: float(v) for k, v in trainer.callback_metrics.items()}

def get_input_adapter(model_name, image_size):
    return (model_name, image_size)
""",
            """\
from serverless_gpu import distributed

@distributed(
    gpus=config['training']['serverless_gpu_count'],
    gpu_type=config['training']['serverless_gpu_type'],
    remote=True
)
def distributed_train(config_dict, DetectionModel, DetectionDataModule, UnifiedTrainer, get_input_adapter):
    import lightning as pl
    from lightning.pytorch.loggers import MLFlowLogger

    model_config = config_dict['model_config'].copy()
    model_config["num_workers"] = config_dict['data_config']["num_workers"]
    model = DetectionModel(model_config)
    adapter = get_input_adapter(model_config["model_name"], image_size=config_dict['data_config'].get("image_size", 800))
    data_module = DetectionDataModule(config_dict['data_config'])
    data_module.adapter = adapter
    data_module.setup()
    logger = MLFlowLogger(
        experiment_name=config_dict.get('mlflow_experiment_name', 'serverless-gpu-simple-training'),
        run_name=config_dict.get('mlflow_run_name', 'simple-distributed-training'),
        tags=config_dict.get('mlflow_tags', {})
    )
    trainer = UnifiedTrainer(config=config_dict, model=model, data_module=data_module, logger=logger)
    return trainer.train()
""",
            """\
trainer_config = {'model_config': config['model'], 'data_config': config['data'], **config['training']}
try:
    distributed_result = distributed_train.distributed(
        trainer_config,
        DetectionModel,
        DetectionDataModule,
        UnifiedTrainer,
        get_input_adapter
    )
    print(f"Final metrics: {distributed_result}")
except Exception as e:
    print(f"Training failed: {e}")
    raise
""",
        ],
    )
    assert trained.stdout.count("{'train_loss': ") == 2
    (run,) = runs(tmp_path, 1)
    assert run.experiment == "serverless-gpu-simple-training"
    assert len(run.metrics["train_loss"]) >= 8


TABLE = (
    LIGHTNING
    + """\
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.callbacks import EarlyStopping
from pyspark.ml.torch.distributor import TorchDistributor
import mlflow
import os

experiment_path = '/Users/me/pytorch_distributor'
log_path = "pl_training_logger"
input_columns = ['a', 'b', 'c', 'defect']

class DeltaDataModule(pl.LightningDataModule):
    def __init__(self, train_path, test_path):
        self.train_path = train_path
        self.test_path = test_path
        super().__init__()

    def dataloader(self, path: str, batch_size=8):
        rows = [{name: torch.rand(()) for name in input_columns} for _ in range(32)]
        return DataLoader(rows, batch_size=batch_size)

    def train_dataloader(self):
        return self.dataloader(self.train_path)

class BinaryClassifier(pl.LightningModule):
    def __init__(self, target_column, input_size, hidden_size=8):
        super().__init__()
        self.target_column = target_column
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.fc3 = nn.Linear(hidden_size, 1)

    def forward(self, x):
        return torch.sigmoid(self.fc3(F.relu(self.fc1(x))))

    def training_step(self, batch, batch_idx):
        target = batch[self.target_column].float()
        feature_keys = [key for key in batch.keys() if key != self.target_column]
        features = torch.stack([batch[key] for key in feature_keys], dim=1).float()
        loss = F.binary_cross_entropy(self(features), target.view(-1, 1))
        self.log('train_loss', loss, on_step=True, on_epoch=True, logger=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)

def train_model(dataloader, input_size, num_gpus=1, single_node=True):
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model = BinaryClassifier('defect', input_size)
    model.to(device)
    mlflow.autolog(disable=True)
    mlflow.set_experiment(experiment_path)
    logger = MLFlowLogger(experiment_name=experiment_path)
    early_stopping = EarlyStopping(monitor='train_loss', patience=3, mode='min', log_rank_zero_only=True)
    trainer = pl.Trainer(max_epochs=2, logger=logger, callbacks=[early_stopping], default_root_dir=log_path, DEVICES)
    trainer.fit(model, dataloader)
    return model
"""
)


@pytest.mark.parametrize(
    "devices", ["devices=1, num_nodes=int(os.environ.get('WORLD_SIZE', 1))", "log_every_n_steps=2"]
)
def test_a_table_that_torchdistributor_trains_on_with_lightning_as_before_in_the_notebook(
    tmp_path: Path, devices: str
) -> None:
    needs("mlflow", "lightning")
    *_, shown = executed(
        tmp_path,
        "spark",
        [
            TABLE.replace("DEVICES", devices),
            (
                "input_size = len(input_columns) - 1\n"
                "distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)\n"
                "data_module = DeltaDataModule('train', 'test')"
            ),
            "model = train_model(data_module, input_size)",
            "model = distributor.run(train_model, data_module, input_size)",
            "type(model).__name__",
        ],
    )
    assert shown.result == "'BinaryClassifier'"
    alone, distributed = runs(tmp_path, 2)
    assert {alone.experiment, distributed.experiment} == {"/Users/me/pytorch_distributor"}
    assert "train_loss_epoch" in distributed.metrics


def test_autologging_in_a_folder_of_its_own_is_in_the_run_that_the_notebook_hands_on(tmp_path: Path) -> None:
    needs("mlflow", "lightning")
    *_, shown = executed(
        tmp_path,
        "spark",
        [
            LIGHTNING
            + """\
from pyspark.ml.torch.distributor import TorchDistributor
import mlflow
import os
db_host, db_token = 'http://localhost', 'hunter2'
experiment = mlflow.set_experiment('/Users/me/pytorch-distributor')

class UtilityAssetModel(pl.LightningModule):
    def __init__(self, in_channels, out_classes):
        super().__init__()
        self.model = nn.Linear(in_channels, out_classes)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
""",
            """\
def main_training_loop(num_tasks, num_proc_per_task, db_token, run_id=None):
  import lightning as pl
  import mlflow
  os.makedirs('utility_asset_model', exist_ok=True)
  os.chdir('utility_asset_model')
  mlflow.pytorch.autolog()
  os.environ['DATABRICKS_HOST'] = db_host
  os.environ['DATABRICKS_TOKEN'] = db_token
  model = UtilityAssetModel(in_channels=3, out_classes=6)
  loader = DataLoader(TensorDataset(torch.randn(32, 3), torch.randint(6, (32,))), batch_size=4)
  if num_tasks > 1:
    kwargs = {"strategy": "ddp"}
  else:
    kwargs = {}
  trainer = pl.Trainer(accelerator='cpu', devices=num_proc_per_task, num_nodes=num_tasks, max_epochs=2,
                       enable_checkpointing=True, **kwargs)
  if run_id is not None:
    mlflow.start_run(run_id=run_id)
  trainer.fit(model, loader)
  return model, trainer.checkpoint_callback.best_model_path
""",
            """\
NUM_TASKS, NUM_PROC_PER_TASK = 2, 1
with mlflow.start_run() as run:
  run_id = mlflow.active_run().info.run_id
  (model, ckpt_path) = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(
      main_training_loop, NUM_TASKS, NUM_PROC_PER_TASK, db_token, run_id)
""",
            "type(model).__name__, os.path.exists(ckpt_path)",
        ],
    )
    assert shown.result == "('UtilityAssetModel', True)"
    own, of_ranks = runs(tmp_path, 2)
    assert len(own.metrics["train_loss"]) == 2
    assert own.params["optimizer_name"] == "Adam"
    assert of_ranks.tags["mlflow.parentRunId"] == own.id
    assert "hunter2" not in f"{own} {of_ranks}"


def test_a_run_that_the_notebook_began_is_resumed_by_horovods_rank_0(tmp_path: Path) -> None:
    needs("mlflow")
    executed(
        tmp_path,
        "horovod",
        [
            """\
import mlflow
import torch
import horovod.torch as hvd
from sparkdl import HorovodRunner
EPOCHS, BATCH_SIZE = 3, 8

def train_and_evaluate_hvd():
    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    history = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH_SIZE, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        history.append(hvd.allreduce(loss.detach(), name='loss').item())
    if hvd.rank() == 0:
        with mlflow.start_run(run_id = active_run_uuid):
            mlflow.log_param('epochs', EPOCHS)
            mlflow.log_param('batch_size', BATCH_SIZE)
            mlflow.log_metric('val_loss', history[-1])
    return history[-1]
""",
            """\
with mlflow.start_run(run_name='horovod_driver') as run:

    active_run_uuid = mlflow.active_run().info.run_id
    hr = HorovodRunner(np=-1, driver_log_verbosity="all")
    hr.run(train_and_evaluate_hvd)

mlflow.end_run()
""",
            """\
with mlflow.start_run(run_name='horovod_distributed') as run:

    active_run_uuid = mlflow.active_run().info.run_id
    hr = HorovodRunner(np=2, driver_log_verbosity='all')
    hr.run(train_and_evaluate_hvd)

mlflow.end_run()
""",
        ],
    )
    driver, of_driver, distributed, of_distributed = runs(tmp_path, 4)
    for run, own, name in ((driver, of_driver, "horovod_driver"), (distributed, of_distributed, "horovod_distributed")):
        assert own.tags["mlflow.parentRunId"] == run.id, "what was measured on the ranks, within the notebook's own run"
        assert (run.name, run.params["epochs"], run.status) == (name, "3", "FINISHED")
        assert len(run.metrics["val_loss"]) == 1
