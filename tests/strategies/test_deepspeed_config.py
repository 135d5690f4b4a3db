"""The configuration of `--strategy deepspeed` is read and checked in the kernel, without DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.interfaces.strategy import StrategyStart
from jupyter_distrib.strategies.deepspeed import DeepSpeedStrategy, completed, read_config


def ready(config: object, *, zero: str = "", ranks: int | None = 2, on_cpu: bool = True) -> dict[str, Any]:
    options = {"config": "ds", **({"zero": zero} if zero else {})}
    start = StrategyStart(names={"ds": config}, ranks=ranks, on_cpu=on_cpu)
    found: dict[str, Any] = json.loads(DeepSpeedStrategy.ready(options, start)["config"])
    return found


def test_a_dict_of_the_notebook_and_a_file_are_the_same(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))

    assert ready(config) == read_config(str(tmp_path / "ds.json"), {}) == read_config(json.dumps(config), {}) == config


def test_what_is_not_said_is_what_an_unchanged_loop_means() -> None:
    assert completed({}, "", 2) == {
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": 1,
    }
    assert (
        completed({"train_batch_size": 32, "gradient_accumulation_steps": 4}, "3", 2)["train_micro_batch_size_per_gpu"]
        == 4
    )


def test_batch_sizes_that_agree_are_taken() -> None:
    ready({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})
    ready({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4})
    ready({"train_batch_size": 15}, ranks=None)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {},
        "says train_batch_size 32, and train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 2 ranks is 16",
    ),
    ({"train_batch_size": 15}, {}, "train_batch_size 15, which gradient_accumulation_steps 1 x 2 ranks do not divide"),
    (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
        {},
        "train_batch_size 12, which train_micro_batch_size_per_gpu 4 x 2 ranks = 8 does not divide",
    ),
    ({"fp16": {"enabled": True}}, {}, "DeepSpeed trains in fp16 on GPUs only, and these ranks are on the CPU"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {},
        "offload_optimizer moves memory of GPUs to the CPU, and these ranks are on the CPU: leave it out",
    ),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, {}, "offload_param moves memory of GPUs"),
    ({"zero_optimization": {"stage": 3}}, {"zero": "2"}, "--zero 2 and --config, with stage 3, differ"),
    ([1], {}, "--config ds is of type list, and DeepSpeed's configuration is a dict"),
    ({"a": object()}, {}, "--config ds cannot be written as JSON: Object of type object is not JSON serializable"),
]


@pytest.mark.parametrize(("config", "given", "sentence"), REFUSED)
def test_what_cannot_begin_is_refused_in_a_sentence(config: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DistributedError) as refused:
        ready(config, **given)

    assert sentence in str(refused.value)


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{")

    with pytest.raises(OptionsError, match=r"there is no .?nowhere.json"):
        read_config("nowhere.json", {})
    with pytest.raises(OptionsError, match=r"ds.json does not hold JSON: Expecting"):
        read_config(str(tmp_path / "ds.json"), {})


def test_gpus_may_take_fp16_and_offload() -> None:
    config = {"fp16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    assert ready(config, on_cpu=False) == config
