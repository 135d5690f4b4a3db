"""`torch.cuda` as a cell finds it on a rank with one GPU, which is not there. Process of a dry run.

Work on it is done at once, and queries of its memory are answered from the ledger.
"""

# ruff: noqa: SLF001 - private names, listed in `system/private_names.py`
from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from jupyter_distrib.dry_run.ledger import Ledger

_CAPABILITIES = {"T4": (7, 5), "V100": (7, 0), "A10": (8, 6), "A100": (8, 0), "L4": (8, 9), "L40S": (8, 9)}
_NEWER = (9, 0)
COUNT = 1
"""A rank sees its own GPU only."""


class Stream:
    """A stream of a GPU whose work is always done."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        self.stream_id = self.cuda_stream = self.device_index = 0
        self.device_type = 1

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event that has always happened."""

    def __init__(self, device: Any = None, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class TensorType:
    """A type of tensors such as `torch.cuda.FloatTensor`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, *args: Any) -> torch.Tensor:
        if all(isinstance(each, int) for each in args):
            return torch.empty(args, dtype=self.dtype, device="cuda")
        return torch.as_tensor(args[0]).to(device="cuda", dtype=self.dtype)


_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def _replace_types() -> None:
    tensor_class: Any = torch.Tensor
    original = tensor_class.type

    def type_of(tensor: Any, dtype: Any = None, *args: Any, **keywords: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = TensorType(_TYPES[dtype.rpartition(".")[2]])
        if isinstance(dtype, TensorType):
            return tensor.to(device="cuda", dtype=dtype.dtype)
        return original(tensor, dtype, *args, **keywords)

    tensor_class.type = type_of
    for name, dtype in _TYPES.items():
        setattr(torch.cuda, name, TensorType(dtype))


def install(ledger: Ledger, *, name: str, size_bytes: int) -> None:
    """Replace the functions of `torch.cuda` and `torch.accelerator` that would ask a driver."""
    cuda: Any = torch.cuda
    for owner, functions in (
        (
            cuda,
            {
                **dict.fromkeys(_WITHOUT_EFFECT, _nothing),
                **_facts(name, size_bytes),
                **_memory(ledger, size_bytes),
            },
        ),
        (torch.accelerator, _of_accelerator()),
    ):
        for each, function in functions.items():
            setattr(owner, each, function)
    stream = Stream()
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = cuda.device = cuda._DeviceGuard = lambda *_: contextlib.nullcontext()
    cuda.Stream, cuda.Event = Stream, Event
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc,assignment]
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    _replace_types()


def _nothing(*_: Any, **__: Any) -> None: ...


_WITHOUT_EFFECT = (
    "set_device", "synchronize", "empty_cache", "init", "_lazy_init", "ipc_collect", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_accumulated_memory_stats", "manual_seed", "manual_seed_all", "set_stream",
    "set_rng_state", "set_rng_state_all", "seed", "seed_all", "_sleep", "set_per_process_memory_fraction",
)  # fmt: skip


def _facts(name: str, size_bytes: int) -> dict[str, Any]:
    capability = next((each for key, each in _CAPABILITIES.items() if key == name), _NEWER)
    properties = SimpleNamespace(
        name=f"NVIDIA {name}",
        major=capability[0],
        minor=capability[1],
        total_memory=size_bytes,
        multi_processor_count=132,
        gcnArchName="",
        warp_size=32,
        L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        uuid="GPU-0",
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: COUNT,
        "_device_count_nvml": lambda: COUNT,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": list,
        "is_current_stream_capturing": lambda: False,
        "initial_seed": lambda: 0,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "_is_compiled": lambda: True,
    }


def _memory(ledger: Ledger, size_bytes: int) -> dict[str, Any]:
    def stats(*_: Any) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": ledger.current_bytes,
            "allocated_bytes.all.peak": ledger.peak_bytes,
            "reserved_bytes.all.current": ledger.current_bytes,
            "reserved_bytes.all.peak": ledger.peak_bytes,
        }

    return {
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: ledger.current_bytes),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_: ledger.peak_bytes),
        "mem_get_info": lambda *_: (size_bytes - ledger.current_bytes, size_bytes),
        "memory_stats": stats,
        "memory_summary": lambda *_, **__: "",
    }


def _of_accelerator() -> dict[str, Any]:
    stream = Stream()
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "device_count": lambda: COUNT,
        "current_stream": lambda *_: stream,
        **dict.fromkeys(("synchronize", "set_device_index", "set_stream", "empty_cache"), _nothing),
    }
