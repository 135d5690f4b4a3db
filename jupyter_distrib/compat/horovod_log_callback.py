"""The stand-in for `sparkdl.horovod.tensorflow.keras`: the callback that shows Keras' metrics in the notebook.

On ranks. It has the methods that Keras calls, so that importing it loads no Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jupyter_distrib.compat.driver_lines import log_to_driver
from jupyter_distrib.runtime import get_global_rank

__all__ = ["LogCallback"]


class LogCallback:
    """Shows the metrics of each epoch by `log_to_driver`, from the first rank.

    Args:
        per_batch_log: Whether to show the metrics of each batch as well.
    """

    async_safe = False
    _supports_tf_logs = False

    def __init__(self, per_batch_log: bool = False) -> None:
        self.per_batch_log = per_batch_log
        self.params: Any = None
        self.model: Any = None
        self._epoch = 0

    def set_params(self, params: Any) -> None:
        """Take Keras' parameters of the training."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Take the model that is trained."""
        self.model = model

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember the number of the epoch."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Show the metrics of the epoch."""
        self._show(f"epoch {epoch}", logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Show the metrics of the batch, if wanted."""
        if self.per_batch_log:
            self._show(f"epoch {self._epoch}, batch {batch}", logs)

    on_batch_end = on_train_batch_end

    def _show(self, when: str, logs: Mapping[str, Any] | None) -> None:
        if get_global_rank() == 0:
            metrics = (f"{name} {float(value):.4g}" for name, value in (logs or {}).items())
            log_to_driver(", ".join([when, *metrics]))

    def _implements_train_batch_hooks(self) -> bool:
        return self.per_batch_log

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing, for all other callback methods of Keras."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)
