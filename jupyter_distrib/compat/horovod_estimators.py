"""The stand-in for Horovod's estimators, which are not available: each says what to use instead. Kernel side."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["KerasEstimator", "TorchEstimator"]


class _Estimator:
    """An estimator that cannot be created."""

    instead: ClassVar[str]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} of horovod.spark is not available: it needs Horovod itself and Petastorm, which "
            f"do not run with this torch. Write the DataFrame as Parquet, and train with {self.instead}."
        )


class TorchEstimator(_Estimator):
    """Horovod's estimator for PyTorch."""

    instead = "a function that reads it, by horovod.spark.run or TorchDistributor"


class KerasEstimator(_Estimator):
    """Horovod's estimator for Keras."""

    instead = "a function that reads it, by MirroredStrategyRunner"
