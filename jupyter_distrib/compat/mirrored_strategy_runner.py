"""The stand-in for `spark_tensorflow_distributor`: `MirroredStrategyRunner` over our pools, without Spark.

The function runs by `--strategy tensorflow`; TensorFlow has to be installed for the ranks. Kernel side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jupyter_distrib.compat import launching

__all__ = ["MirroredStrategyRunner"]


class MirroredStrategyRunner:
    """Runs a function on several TensorFlow workers.

    Args:
        num_slots: The number of workers; in local mode the number of GPUs of this process.
        local_mode: Whether to call the function in the notebook's process.
        use_gpu: Whether each worker has a GPU.
        gpu_resource_name: Spark's name of the resource; ignored.
        use_custom_strategy: Whether the function makes its own strategy, instead of running in the scope of
            `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: `num_slots` is below 1, or above 1 in local mode without GPUs.
        RuntimeError: There is no GPU, but `use_gpu` is True.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
    ) -> None:
        launching.check_whole("num_slots", num_slots)
        if local_mode and not use_gpu and num_slots > 1:
            raise ValueError(f"local_mode=True without GPUs is one slot; got num_slots={num_slots}: give num_slots=1")
        if use_gpu:
            launching.check_gpus("use_gpu", local=local_mode, otherwise=", or choose another pool")
        self.num_slots, self.local_mode, self.use_gpu = num_slots, local_mode, use_gpu
        self.gpu_resource_name, self.use_custom_strategy = gpu_resource_name, use_custom_strategy

    def get_num_tasks(self) -> int:
        """Return the number of workers."""
        return self.num_slots

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Run the function and return the value of the first worker; in local mode its own value.

        Raises:
            RuntimeError: It failed on a worker; the worker's own exception is the cause.
        """
        if self.local_mode:
            return train_fn(**kwargs)
        options = launching.pool_of(local=False)
        options["gpus" if self.use_gpu else "ranks"] = self.num_slots
        if self.use_custom_strategy:
            options["own_scope"] = True
        return launching.launch(type(self).__name__, train_fn, (), kwargs, strategy="tensorflow", **options)[0]
