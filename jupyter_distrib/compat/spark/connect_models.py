"""Loads models of `pyspark.ml.connect` under current versions of torch. Kernel, and ranks with a session."""

from __future__ import annotations

from typing import Any


def load(cls: Any, path: str) -> Any:
    """Load a model, pipeline or validator that was saved by `save`: `load(PipelineModel, path)`.

    pyspark reads the network of its logistic regression by `torch.load`, which since torch 2.6 refuses classes that are
    not allowed. The classes of this network are allowed only while it is loaded.
    """
    from torch import nn, serialization

    with serialization.safe_globals([nn.Sequential, nn.Linear, nn.Softmax]):
        return cls.load(path)
