"""The stand-in for `pyspark.ml.torch.distributor`: `TorchDistributor` over our pools, without Spark. Kernel side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jupyter_distrib.compat import launching

__all__ = ["TorchDistributor"]


class TorchDistributor:
    """Runs a training function or script on several processes.

    Args:
        num_processes: The number of ranks.
        local_mode: True for this machine; False for the pool named `remote` in the settings, else the one in use.
        use_gpu: Whether each rank has a GPU.

    Raises:
        ValueError: `num_processes` is below 1.
        RuntimeError: There is no GPU, or there are fewer GPUs than ranks; with `shrinks = True` on the class, fewer
            ranks are started, as by Spark.
    """

    shrinks = False
    backend_fallback = False
    """Whether a function on CPU ranks that asks for NCCL gets gloo."""

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        launching.check_whole("num_processes", num_processes)
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        if use_gpu:
            self.num_processes = self._fitting()

    def _fitting(self) -> int:
        otherwise = ", or local_mode=False for another pool" if self.local_mode else ", or choose another pool"
        there = launching.check_gpus("use_gpu", local=self.local_mode, otherwise=otherwise)
        if there is None or not self.local_mode:
            return self.num_processes
        if self.num_processes > there and not self.shrinks:
            raise RuntimeError(
                f"num_processes={self.num_processes} is more than the {there} GPUs of this machine: give "
                f"num_processes={there}. Spark would start {there} without an error; TorchDistributor.shrinks = True "
                "does the same here."
            )
        return min(self.num_processes, there)

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function with these arguments and return rank 0's value; or a script, and return None.

        Raises:
            ValueError: A script was given keyword arguments.
            RuntimeError: It failed on a rank; the rank's own exception is the cause.
        """
        options = launching.pool_of(local=self.local_mode)
        options["gpus" if self.use_gpu else "ranks"] = self.num_processes
        options["backend_fallback"] = self.backend_fallback
        name = type(self).__name__
        names = launching.names_for(name, "num_processes")
        if callable(train_object):
            return launching.launch(name, train_object, args, kwargs, names=names, **options)[0]
        launching.launch_script(name, launching.check_script(name, train_object, kwargs), args, **options)
        return None
