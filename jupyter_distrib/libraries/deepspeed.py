"""The facts about DeepSpeed, which wraps models, divides data, and takes its accelerator from the environment.

It keeps process groups for the life of a program, while a rank outlives its groups. It compiles C++ at the first use of
some operations: the view shows this, and operations that only its own launcher can use are not compiled.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries.library import Library

LOCK_CHECK_S = 0.2
"""Seconds between two checks of a lock that no process seems to hold."""
_first_groups: dict[str, Any] = {}
"""The variables of `deepspeed.utils.groups` right after its import, without groups."""


def _remember_first_groups(module: ModuleType) -> None:
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    kept = {name: value for name, value in names.items() if value is None or isinstance(value, dict | int)}
    _first_groups.update({name: copy.copy(value) for name, value in kept.items()})


def _forget_lost_groups(comm: Any) -> None:
    """Make `deepspeed.comm.comm` reinitialize when the default process group that it was created with is gone."""
    original, made_with = comm.init_distributed, None

    @functools.wraps(original)
    def init_distributed(*arguments: Any, **keywords: Any) -> None:
        nonlocal made_with
        from torch import distributed

        if comm.cdb is not None and distributed.group.WORLD is not made_with:
            comm.cdb = None
            groups = sys.modules["deepspeed.utils.groups"]
            vars(groups).update({name: copy.copy(value) for name, value in _first_groups.items()})
        original(*arguments, **keywords)
        if made_with is not distributed.group.WORLD:
            made_with = distributed.group.WORLD
            _agree_on_parameter_numbers()

    comm.init_distributed = init_distributed


def takes_backward(engine: Any) -> bool:
    """Return whether the engine has put hooks on a model's output, so that it handles `loss.backward()` as well."""
    return bool(getattr(engine, "_support_torch_style_backward", False))


def _agree_on_parameter_numbers() -> None:
    """Let all ranks of a new group number the parameters and modules of ZeRO's third stage from the same start: a
    rank that has replaced a lost one would begin at 0, and DeepSpeed (0.19) compares the numbers. Collective."""
    import torch
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found]
    from torch import distributed

    parameters: Any = sys.modules["deepspeed.runtime.zero.partition_parameters"].Init
    offload: Any = importlib.import_module("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    counted = inspect.signature(offload._register_deepspeed_module).parameters.get("count")  # noqa: SLF001
    modules: list[int] = [0] if counted is None else counted.default
    numbers = torch.tensor([parameters.param_id, modules[0]], device=get_accelerator().current_device_name())
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    parameters.param_id, modules[0] = numbers.tolist()


def _check_groups_of_engines(module: Any) -> None:
    """Make an engine created by an earlier cell say in one sentence that its process groups are gone."""
    original = module.DeepSpeedEngine.forward

    @functools.wraps(original)
    def forward(engine: Any, *inputs: Any, **keywords: Any) -> Any:
        if is_lost(engine):
            raise DistributedError(
                "the process group of this DeepSpeed engine is gone, since a cell has failed or was stopped after it "
                "was made: create the engine again in this cell, and load a checkpoint into it."
            )
        return original(engine, *inputs, **keywords)

    module.DeepSpeedEngine.forward = forward


def is_lost(engine: Any) -> bool:
    """Return whether the process group of an engine was destroyed."""
    from torch import distributed

    try:
        distributed.get_process_group_ranks(engine.data_parallel_group)
    except (KeyError, ValueError):
        return True
    return False


def _compile_no_unused_kernel(module: Any) -> None:
    """Leave out the shared-memory kernel of inference on the CPU, which takes a minute to compile: it can be used only
    where `LOCAL_SIZE` is set, and a launcher of MPI sets that."""
    original = module.build_shm_op
    module.build_shm_op = lambda: original() if "LOCAL_SIZE" in os.environ else None


def _show_compiling(module: Any) -> None:
    """Show the compilation of an operation as progress of the rank, and name a compiler that is missing."""
    original = module.OpBuilder.jit_load

    @functools.wraps(original)
    def jit_load(builder: Any, *arguments: Any, **keywords: Any) -> Any:
        from torch.utils.file_baton import FileBaton

        if not hasattr(FileBaton.try_acquire, "__wrapped__"):
            baton: Any = FileBaton
            baton.try_acquire = _past_dead_holders(FileBaton.try_acquire)
        try:
            with _seconds_shown(f"compiling {builder.name} (seconds, once)"):
                return original(builder, *arguments, **keywords)
        except Exception as error:
            if missing := [each for each in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(each) is None]:
                raise DistributedError(
                    f"DeepSpeed compiles its operation {builder.name} at its first use, and there is no "
                    f"{' and no '.join(missing)} on this rank: install a C++ compiler (g++) and ninja, or name an "
                    'optimizer of torch ("torch_adam": true).'
                ) from error
            raise

    module.OpBuilder.jit_load = jit_load


@contextmanager
def _seconds_shown(label: str) -> Iterator[None]:
    """Show the seconds that the block takes, if more than one."""
    import jupyter_distrib

    done = threading.Event()

    def show() -> None:
        if not done.wait(1.0):
            ticks = itertools.takewhile(lambda _: not done.wait(1.0), itertools.count())
            for _ in jupyter_distrib.progress(ticks, label=label):
                pass

    thread = threading.Thread(target=show, name="jupyter_distrib-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _past_dead_holders(try_acquire: Callable[[Any], bool | None]) -> Callable[[Any], bool | None]:
    """Return a `FileBaton.try_acquire` that first removes the lock of a killed compilation, for which torch (2.13)
    would wait for ever."""

    @functools.wraps(try_acquire)
    def acquire(baton: Any) -> bool | None:
        on_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        if on_one_node and os.environ.get("LOCAL_RANK") == "0" and sys.platform == "linux":
            _remove_abandoned(baton.lock_file_path)
        return try_acquire(baton)

    return acquire


def _remove_abandoned(path: str) -> None:
    """Remove a lock file that no process has had open for a while; its holder opens it when creating it."""
    with suppress(FileNotFoundError):
        before = os.stat(path)
        for _ in range(2):
            if _is_open_anywhere(path):
                return
            time.sleep(LOCK_CHECK_S)
        if os.path.samestat(before, os.stat(path)):
            os.remove(path)


def _is_open_anywhere(path: str) -> bool:
    wanted = os.path.realpath(path)
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor) == wanted:
                return True
    return False


DEEPSPEED = Library(
    modules=("deepspeed",),
    extra="deepspeed",
    cpu_environment={"DS_ACCELERATOR": "cpu"},
    divides_data=True,
    wraps_models=True,
    mend={
        "deepspeed.utils.groups": _remember_first_groups,
        "deepspeed.comm.comm": _forget_lost_groups,
        "deepspeed.comm.torch": _compile_no_unused_kernel,
        "deepspeed.ops.op_builder.builder": _show_compiling,
        "deepspeed.runtime.engine": _check_groups_of_engines,
    },
)
