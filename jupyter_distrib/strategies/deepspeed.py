"""The strategy `deepspeed`: the unchanged training code of a cell trains through a DeepSpeed engine.

The kernel reads the configuration and checks it before a rank starts; a rank makes the engine when the optimizer is
built. `jupyter_distrib.prepare` returns the engine in place of the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.interfaces.strategy import StrategyRun, StrategyStart, TrainingStrategy
from jupyter_distrib.options import Option, shown
from jupyter_distrib.strategies.ddp import BATCH, NO_GUESS, SHARD_EVAL

ZERO = Option(
    flag="--zero",
    metavar="STAGE",
    meaning="divide among the ranks: 1 the optimizer's state, 2 gradients too, 3 parameters too; 0 nothing",
    choices=("0", "1", "2", "3"),
    default="that of --config, else 1",
    synonyms=("stage", "zero-stage"),
)
CONFIG = Option(
    flag="--config",
    metavar="NAME|FILE",
    meaning="DeepSpeed's configuration: the name of a dict of the notebook, or a JSON file",
    synonyms=("ds-config", "deepspeed-config"),
)
_OFFLOADS = ("offload_optimizer", "offload_param")


class DeepSpeedStrategy(TrainingStrategy):
    """ZeRO by DeepSpeed's engine."""

    options: ClassVar[tuple[Option, ...]] = (ZERO, CONFIG, BATCH, SHARD_EVAL, NO_GUESS)
    summary = "trained through DeepSpeed's engine"

    @classmethod
    def ready(cls, options: Mapping[str, str], start: StrategyStart) -> Mapping[str, str]:
        """Return the options with the configuration itself in place of its name or file, which ranks may not have."""
        config = read_config(options.get("config", ""), start.names)
        check(config, options.get("zero", ""), ranks=start.ranks, on_cpu=start.on_cpu)
        return {**options, "config": json.dumps(config)} if config else options

    def begin(self, run: StrategyRun) -> None:
        from jupyter_distrib.interfaces import identity
        from jupyter_distrib.worker.pytorch import randomness

        if not run.everyone:
            raise DistributedError(
                "--strategy deepspeed trains on all ranks, and --on runs the cell on some of them: leave --on out, or "
                "use --strategy none."
            )
        config, size = read_config(run.options.get("config", ""), {}), identity.world_size()
        check(config, run.options.get("zero", ""), ranks=size, on_cpu=identity.device().type == "cpu")
        from jupyter_distrib.worker.autoparallel.training.engines import EngineTraining

        randomness.adopt_rank_0(run.note)
        full = completed(config, run.options.get("zero", ""), size)
        said = "train_batch_size" in config or "train_micro_batch_size_per_gpu" in config
        samples = full["train_micro_batch_size_per_gpu"] if said else None
        self.training = training = EngineTraining(run, full, samples)
        training.begin()

    def returning(self, value: object) -> None:
        assert self.training is not None
        self.training.returning(value)  # type: ignore[attr-defined]

    def check_checkpoint(self, function: str, objects: Mapping[str, Any]) -> None:
        assert self.training is not None
        self.training.check_checkpoint(function, objects)  # type: ignore[attr-defined]


def read_config(text: str, names: Mapping[str, object]) -> dict[str, Any]:
    """Return the configuration that `--config` names: a dict of the notebook, the path of a JSON file, or JSON itself.

    Raises:
        OptionsError: There is no such configuration, or it cannot be sent.
    """
    if not text:
        return {}
    if text.startswith("{"):
        found: object = json.loads(text)
    elif text.isidentifier() and text in names:
        found = names[text]
    elif os.path.isfile(text):
        found = _of_file(text)
    else:
        raise OptionsError(f"--config must be a name of the notebook or a JSON file; there is no {shown(text)}")
    if not isinstance(found, Mapping):
        raise OptionsError(
            f"--config {text} is of type {type(found).__name__}, and DeepSpeed's configuration is a dict"
        )
    try:
        copied: dict[str, Any] = json.loads(json.dumps(found))
    except (TypeError, ValueError) as error:
        raise OptionsError(f"--config {text} cannot be written as JSON: {error}") from None
    return copied


def _of_file(path: str) -> object:
    try:
        with open(path, encoding="utf-8") as file:
            found: object = json.load(file)
    except ValueError as error:
        raise OptionsError(f"--config {path} does not hold JSON: {error}") from None
    return found


def check(config: Mapping[str, Any], zero: str, *, ranks: int | None, on_cpu: bool) -> None:
    """Raise an error for a configuration that cannot work on these ranks; `ranks` None: any number."""
    own = config.get("zero_optimization", {})
    if zero and own.get("stage") not in (None, int(zero)):
        raise OptionsError(f"--zero {zero} and --config, with stage {own['stage']}, differ: leave one of them out")
    if ranks is not None:
        _check_batch(config, ranks)
    if not on_cpu:
        return
    if config.get("fp16", {}).get("enabled"):
        raise DistributedError(
            "DeepSpeed trains in fp16 on GPUs only, and these ranks are on the CPU: leave fp16 out of the "
            "configuration, or use bf16."
        )
    for name in _OFFLOADS:
        if own.get(name, {}).get("device", "none") != "none":
            raise DistributedError(
                f"{name} moves memory of GPUs to the CPU, and these ranks are on the CPU: leave it out of the "
                "configuration of DeepSpeed."
            )


def _check_batch(config: Mapping[str, Any], ranks: int) -> None:
    whole, each = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    times = config.get("gradient_accumulation_steps") or 1
    if whole is None:
        return
    if each is None and whole % (times * ranks):
        raise OptionsError(
            f"DeepSpeed's configuration says train_batch_size {whole}, which gradient_accumulation_steps {times} x "
            f"{ranks} ranks do not divide: change one of them"
        )
    if each is not None and "gradient_accumulation_steps" in config and whole != each * times * ranks:
        raise OptionsError(
            f"DeepSpeed's configuration says train_batch_size {whole}, and train_micro_batch_size_per_gpu {each} x "
            f"gradient_accumulation_steps {times} x {ranks} ranks is {each * times * ranks}: change one of them, or "
            "leave train_batch_size out"
        )
    if each is not None and whole % (each * ranks):
        raise OptionsError(
            f"DeepSpeed's configuration says train_batch_size {whole}, which train_micro_batch_size_per_gpu {each} x "
            f"{ranks} ranks = {each * ranks} does not divide: change one of them"
        )


def completed(config: Mapping[str, Any], zero: str, ranks: int) -> dict[str, Any]:
    """Return the configuration with the batch sizes, and with the defaults of an unchanged loop: no gradient clipping
    unless configured, and any optimizer is allowed."""
    own = config.get("zero_optimization", {})
    full = {
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **config,
        "zero_optimization": {**own, "stage": int(zero or own.get("stage", 1))},
    }
    if "train_batch_size" not in config and "train_micro_batch_size_per_gpu" not in config:
        full["train_micro_batch_size_per_gpu"] = 1  # the loaders determine the batch size
    if "train_batch_size" in config and "train_micro_batch_size_per_gpu" not in config:
        times = config.get("gradient_accumulation_steps") or 1
        full["train_micro_batch_size_per_gpu"] = config["train_batch_size"] // (times * ranks)
    return full
