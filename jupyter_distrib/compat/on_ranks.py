"""Functions of the stand-ins that ranks call. Loads nothing of the kernel's side."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from jupyter_distrib.system import scratch


def run_file(path: str, arguments: Sequence[str]) -> None:
    """Run a script as its interpreter does; called on a rank. `sys.argv` is reset before the next cell."""
    path = os.path.abspath(path)
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
    with ExitStack() as stack:
        flags = ["--deepspeed"]
        if text is not None:
            path = stack.enter_context(scratch.folder()) / "deepspeed.json"
            path.write_text(text, "utf-8")
            flags += ["--deepspeed_config", str(path)]
        if function is run_file:
            args = (args[0], [*args[1], *flags])
        sys.argv[1:] = flags
        return function(*args, **keywords)


def config() -> dict[str, Any] | None:
    """Return the configuration that `sys.argv` names; None if it names none. Called on a rank."""
    if "--deepspeed_config" not in sys.argv:
        return None
    with open(sys.argv[sys.argv.index("--deepspeed_config") + 1], encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found
