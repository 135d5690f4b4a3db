"""The functions of the stand-ins that ranks call. Loads nothing of the kernel's side."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def run_file(path: str, arguments: Sequence[str]) -> None:
    """Run a script as its interpreter does; called on a rank. `sys.argv` is reset before the next cell."""
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def with_variables(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function with Horovod's variables set; called on a rank."""
    for ours, theirs in {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
        "GROUP_RANK": "CROSS_RANK",
        "GROUP_WORLD_SIZE": "CROSS_SIZE",
    }.items():
        os.environ[f"HOROVOD_{theirs}"] = os.environ[ours]
    return function(*args, **keywords)


def with_arguments(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], text: str | None
) -> Any:
    """Call a function with DeepSpeed's arguments in `sys.argv`; called on a rank."""
    path = _write(text) if text is not None else None
    flags = ["--deepspeed", *(() if path is None else ("--deepspeed_config", path))]
    if function is run_file:
        args = (args[0], [*args[1], *flags])
    sys.argv[1:] = flags
    try:
        return function(*args, **keywords)
    finally:
        if path is not None:
            os.unlink(path)


def config() -> dict[str, Any] | None:
    """Return the configuration that `sys.argv` names; None if it names none. Called on a rank."""
    if "--deepspeed_config" not in sys.argv:
        return None
    with open(sys.argv[sys.argv.index("--deepspeed_config") + 1], encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def _write(text: str) -> str:
    descriptor, path = tempfile.mkstemp(prefix="deepspeed-", suffix=".json")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def with_workers(train_fn: Callable[..., Any], keywords: Mapping[str, Any], custom: bool) -> Any:
    """Call the function with `TF_CONFIG` set; called on a rank."""
    rank = int(os.environ["RANK"])
    with socket.create_server((_own_address(), 0)) as reserved:
        host, port = reserved.getsockname()[:2]
        workers = _gathered(f"{host}:{port}")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    if custom:
        return train_fn(**keywords)
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "MirroredStrategyRunner needs TensorFlow for its ranks, which is not installed: install tensorflow there, "
            "or give use_custom_strategy=True to a function that needs none"
        ) from error
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return train_fn(**keywords)


def _own_address() -> str:
    """Return the address of this machine by which the other ranks reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address: str = probe.getsockname()[0]
    return address


def _gathered(text: str) -> list[str]:
    """Return the texts of all ranks, by rank."""
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        texts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(texts, text)
    finally:
        distributed.destroy_process_group()
    return texts
