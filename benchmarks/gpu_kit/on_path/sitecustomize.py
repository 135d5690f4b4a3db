"""Imported by Python when it starts a kernel, agent or rank of the kit, which is first on PYTHONPATH; changes what NVML
and torch say there, never the package.

    GPU_KIT_TWICE=gloo   two ranks on the first GPU: NVML tells it twice, as itself and as its UUID and "#2", and both
                         ranks are ordered to `cuda:0`. What they would do with nccl they do with gloo.
    GPU_KIT_TWICE=nccl   the same, and each rank tells NCCL that it is a host of its own (NCCL_HOSTID). NCCL then passes
                         its check for one GPU given twice, and goes over sockets.
    GPU_KIT_TWICE=one    the same without NCCL_HOSTID: NCCL refuses the GPU that is given twice
    GPU_KIT_GPU=UUID     the GPU that is told twice, if not the first
    GPU_KIT_NVML=memory  NVML does not tell the memory, as on GB10
    GPU_KIT_NVML=lost    NVML tells one more GPU, which is lost
    GPU_KIT_BROKEN=FILE  `set_device` fails in a rank as long as this file is there
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

SECOND = "#2"
HERE = Path(__file__).resolve().parent


def run_next() -> None:
    """Run the `sitecustomize` that this one hides."""
    for folder in map(Path, sys.path):
        path = folder / "sitecustomize.py"
        if folder.resolve() != HERE and path.is_file():
            spec = importlib.util.spec_from_file_location("_next_sitecustomize", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return


def is_program(module: str) -> bool:
    return module in sys.orig_argv


def tell_twice(nvml: Any) -> None:
    """Have NVML tell one GPU twice, and no other."""
    by_index, by_uuid, uuid_of = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetUUID

    def handle(index: int) -> Any:
        chosen = os.environ.get("GPU_KIT_GPU")
        found = by_uuid(chosen) if chosen else by_index(0)
        found.gpu_kit_second = index == 1
        return found

    def handle_of(uuid: Any) -> Any:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        found = by_uuid(text.removesuffix(SECOND))
        found.gpu_kit_second = text.endswith(SECOND)
        return found

    def uuid(handle: Any) -> str:
        text = uuid_of(handle)
        text = text.decode() if isinstance(text, bytes) else text
        return f"{text}{SECOND}" if getattr(handle, "gpu_kit_second", False) else text

    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetUUID = handle, handle_of, uuid


def order_to_one_gpu(nvml: Any) -> None:
    """Order all ranks to the one GPU that there is."""
    from jupyter_distrib.agent.ranks import starter

    order = starter.worker_order

    def on_one(*args: Any, **keywords: Any) -> Any:
        made = order(*args, **keywords)
        if made.visible_devices is None:
            return made
        return replace(made, device="cuda:0", visible_devices=first_uuid(nvml))

    starter.worker_order = on_one


def first_uuid(nvml: Any) -> str:
    nvml.nvmlInit()
    try:
        uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0))
        return uuid.decode() if isinstance(uuid, bytes) else uuid
    finally:
        nvml.nvmlShutdown()


def hide_memory(nvml: Any) -> None:
    def not_supported(*_: Any, **__: Any) -> Any:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    nvml.nvmlDeviceGetMemoryInfo = not_supported


def tell_lost(nvml: Any) -> None:
    """Have NVML tell one more GPU, which has fallen off the bus."""
    count, by_index = nvml.nvmlDeviceGetCount, nvml.nvmlDeviceGetHandleByIndex

    def handle(index: int) -> Any:
        if index >= count():
            raise nvml.NVMLError(nvml.NVML_ERROR_GPU_IS_LOST)
        return by_index(index)

    nvml.nvmlDeviceGetCount, nvml.nvmlDeviceGetHandleByIndex = lambda: count() + 1, handle


def share_the_gpu(backend: str) -> None:
    """Have process groups of ranks that share a GPU work: with gloo, or with an nccl that takes them for two hosts."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    init = distributed_c10d.init_process_group

    def shared(given: str | None = None, *args: Any, **keywords: Any) -> Any:
        if backend == "gloo" and given is not None:
            given = given.replace("nccl", "gloo")
        return init(given, *args, **keywords)

    dist.init_process_group = distributed_c10d.init_process_group = shared


def be_hosts_of_their_own() -> None:
    """Have each rank tell NCCL that it is a host, in every cell: communicators are made by the first collective."""
    from jupyter_distrib.interfaces import identity

    environment = identity.environment
    identity.environment = lambda: {**environment(), "NCCL_HOSTID": f"kit{identity.rank()}"}


def break_at(path: Path, set_device: Callable[[Any], None]) -> Callable[[Any], None]:
    def broken(device: Any) -> None:
        if path.exists():
            raise RuntimeError("CUDA error: the kit has taken the GPU off the bus")
        set_device(device)

    return broken


def main() -> None:
    run_next()
    twice, told, broken = (os.environ.get(f"GPU_KIT_{name}") for name in ("TWICE", "NVML", "BROKEN"))
    if is_program("jupyter_distrib.agent") and (twice or told):
        import pynvml

        if twice:
            tell_twice(pynvml)
            order_to_one_gpu(pynvml)
        if told is not None:
            {"memory": hide_memory, "lost": tell_lost}[told](pynvml)
    if any(is_program(f"jupyter_distrib.worker.process.{name}") for name in ("forkserver", "standalone")):
        if twice:
            share_the_gpu(twice)
            if twice != "one":
                be_hosts_of_their_own()
        if broken:
            import torch

            torch.cuda.set_device = break_at(Path(broken), torch.cuda.set_device)


main()
