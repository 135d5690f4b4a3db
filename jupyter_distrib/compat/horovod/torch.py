"""The stand-in for `horovod.torch`, with the names that programs use. Ranks; in a notebook there is one rank."""

from __future__ import annotations

from typing import Any

from torch.nn import SyncBatchNorm

from jupyter_distrib.compat.horovod import elastic
from jupyter_distrib.compat.horovod.collectives import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from jupyter_distrib.compat.horovod.context import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from jupyter_distrib.compat.horovod.differentiable import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from jupyter_distrib.compat.horovod.optimizer import DistributedOptimizer
from jupyter_distrib.compat.horovod.requests import HorovodInternalError
from jupyter_distrib.compat.horovod.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "get_process_set_ids_and_ranks", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Refuse: there is no timeline."""
    raise NotImplementedError("jupyter_distrib has no Horovod timeline: use torch.profiler in the cell")


def stop_timeline() -> None:
    """Refuse: there is no timeline."""
    start_timeline("")


def gloo_built(*args: Any) -> bool:
    """Return True: torch has gloo."""
    return True


gloo_enabled = gloo_built


def nccl_built(*args: Any) -> int:
    """Return the version of NCCL that torch has; 0 without."""
    import torch

    if not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch, *_ = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built(*args: Any) -> bool:
    """Return whether torch has been built for CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built(*args: Any) -> bool:
    """Return whether torch has been built for ROCm."""
    import torch

    return torch.version.hip is not None


def mpi_built(*args: Any) -> bool:
    """Return False: operations go through torch."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built
