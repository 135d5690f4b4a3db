"""Spark's own classes with our live view: `TorchDistributor` and `DeepspeedTorchDistributor` as pyspark has them, and
`load`, which reads models of `pyspark.ml.connect`. Needs pyspark."""

from __future__ import annotations

__all__ = ["DeepspeedTorchDistributor", "TorchDistributor", "load"]

_HOMES = {"DeepspeedTorchDistributor": "distributors", "TorchDistributor": "distributors", "load": "connect_models"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
