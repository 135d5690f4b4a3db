"""The settings of torch, as rows of the table in `libraries/settings.py`. Standard library only: torch comes as an
argument."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from jupyter_distrib.libraries.setting import LibrarySetting, attribute, function, unlike
from jupyter_distrib.system import private_torch

_PRINTING = {"precision": 4, "threshold": 1000.0, "edgeitems": 3, "linewidth": 80, "sci_mode": None}
_BACKENDS: dict[str, Any] = {
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.allow_tf32": True,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "mkldnn.enabled": True,
    "mkldnn.deterministic": False,
}
_PRECISIONS = ("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")


def _read_dtype(torch: Any) -> str | None:
    name = str(torch.get_default_dtype()).removeprefix("torch.")
    return None if name == "float32" else name


def _write_dtype(torch: Any, value: str | None) -> None:
    torch.set_default_dtype(getattr(torch, value or "float32"))


def _read_printing(torch: Any) -> dict[str, Any] | None:
    options = private_torch.print_options(torch)
    return unlike(_PRINTING, {name: getattr(options, name, None) for name in _PRINTING})


def _write_printing(torch: Any, value: dict[str, Any] | None) -> None:
    torch.set_printoptions(**{**_PRINTING, **(value or {})})


def _read_precision(torch: Any) -> str | dict[str, str] | None:
    """Return the precision of matrix products: a word, or the words by backend if the notebook has set it by
    backend."""
    try:
        word = str(torch.get_float32_matmul_precision())
    except RuntimeError:  # since torch 2.9, if it was set through `torch.backends`
        return {path: attrgetter(path)(torch.backends) for path in _PRECISIONS}
    return None if word == "highest" else word


def _write_precision(torch: Any, value: str | dict[str, str] | None) -> None:
    if not isinstance(value, dict):
        torch.set_float32_matmul_precision(value or "highest")
        return
    for path, word in value.items():
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(torch.backends) if owner else torch.backends, name, word)


def _read_backends(backends: Any) -> dict[str, Any] | None:
    return unlike(_BACKENDS, {path: attrgetter(path)(backends) for path in _BACKENDS})


def _write_backends(backends: Any, value: dict[str, Any] | None) -> None:
    now = {path: attrgetter(path)(backends) for path in _BACKENDS}
    for path, wanted in {**_BACKENDS, **(value or {})}.items():
        if now[path] != wanted:
            owner, _, name = path.rpartition(".")
            setattr(attrgetter(owner)(backends), name, wanted)


def _read_deterministic(torch: Any) -> str | None:
    if not torch.are_deterministic_algorithms_enabled():
        return None
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "error"


def _write_deterministic(torch: Any, value: str | None) -> None:
    torch.use_deterministic_algorithms(value is not None, warn_only=value == "warn")


def _read_anomaly(torch: Any) -> list[bool] | None:
    return [bool(torch.is_anomaly_check_nan_enabled())] if torch.is_anomaly_enabled() else None


def _write_anomaly(torch: Any, value: list[bool] | None) -> None:
    torch.autograd.set_detect_anomaly(value is not None, check_nan=value is None or value[0])


TORCH_SETTINGS = (
    LibrarySetting(name="torch's default dtype", library="torch", read=_read_dtype, write=_write_dtype),
    LibrarySetting(name="torch printing", library="torch", read=_read_printing, write=_write_printing),
    LibrarySetting(name="matmul precision", library="torch", read=_read_precision, write=_write_precision),
    LibrarySetting(name="torch.backends", library="torch.backends", read=_read_backends, write=_write_backends),
    function("flash attention", "torch.backends.cuda", "flash_sdp_enabled", "enable_flash_sdp", True),
    function("small attention", "torch.backends.cuda", "mem_efficient_sdp_enabled", "enable_mem_efficient_sdp", True),
    function("plain attention", "torch.backends.cuda", "math_sdp_enabled", "enable_math_sdp", True),
    function("attention of cuDNN", "torch.backends.cuda", "cudnn_sdp_enabled", "enable_cudnn_sdp", True),
    LibrarySetting(name="deterministic", library="torch", read=_read_deterministic, write=_write_deterministic),
    LibrarySetting(name="anomaly detection", library="torch", read=_read_anomaly, write=_write_anomaly),
    function("gradients", "torch", "is_grad_enabled", "set_grad_enabled", True),
    function("all of torch's warnings", "torch", "is_warn_always_enabled", "set_warn_always", False),
    function(
        "tensors between processes",
        "torch.multiprocessing",
        "get_sharing_strategy",
        "set_sharing_strategy",
        "file_descriptor",
    ),
    attribute("uninitialized memory", "torch.utils.deterministic", "fill_uninitialized_memory", True),
    function("image backend", "torchvision", "get_image_backend", "set_image_backend", "PIL"),
)
