"""What each of the other platforms' interfaces says of a wrong argument, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.compat import databricks_air, horovod_runner
from jupyter_distrib.compat.deepspeed_distributor import DeepspeedTorchDistributor
from jupyter_distrib.compat.horovod_runner import HorovodRunner
from jupyter_distrib.compat.torch_distributor import TorchDistributor
from jupyter_distrib.errors import DistributedError

CONFIG = "is not a configuration of DeepSpeed:"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (databricks_air.ray_init, "ray_init needs Ray, which is not installed here"),
        (lambda: horovod_runner.log_to_driver(5), "log_to_driver takes a string; got int"),  # type: ignore[arg-type]
        (lambda: HorovodRunner(np=1.5), "np must be a whole number; got 1.5"),  # type: ignore[arg-type]
        (lambda: HorovodRunner(np=True), "np must be a whole number; got True"),
        (
            lambda: TorchDistributor(use_gpu=False).run("train.py", lr=0.1),
            "TorchDistributor.run() takes keyword arguments for a function only; give the script strings: '--lr=0.1'",
        ),
        (lambda: DeepspeedTorchDistributor(deepspeedConfig=5), f"5 {CONFIG} a dict or the path"),  # type: ignore[arg-type]
        (
            lambda: DeepspeedTorchDistributor(deepspeedConfig="/nowhere.json"),
            "cannot be read (No such file or directory)",
        ),
    ],
)
def test_a_wrong_argument_is_reported_in_one_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError, DistributedError)) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "why"), [("{", "Expecting property name"), (json.dumps([1]), "it holds a list")])
def test_a_file_that_holds_no_configuration_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        DeepspeedTorchDistributor(deepspeedConfig=str(tmp_path / "ds.json"))
