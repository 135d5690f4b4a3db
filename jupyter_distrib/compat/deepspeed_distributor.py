"""The stand-in for `pyspark.ml.deepspeed.deepspeed_distributor`: `DeepspeedTorchDistributor` over our pools.

It starts ranks and passes the configuration on, as Spark's does; the function itself imports DeepSpeed. Kernel side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from jupyter_distrib.compat import launching, on_ranks
from jupyter_distrib.compat.on_ranks import config

__all__ = ["DeepspeedTorchDistributor", "config"]


class DeepspeedTorchDistributor:
    """Runs a function or script that trains with DeepSpeed on `numGpus * nnodes` processes.

    Args:
        numGpus: The number of ranks on each node.
        nnodes: The number of nodes.
        localMode: True for this machine; False for the pool named `remote` in the settings, else the one in use.
        useGpu: Whether each rank has a GPU.
        deepspeedConfig: The DeepSpeed configuration, or the path of a file with it.

    Raises:
        ValueError: A number is below 1, or `localMode` is combined with several nodes.
        RuntimeError: There is no GPU, or there are fewer GPUs than ranks.
    """

    backend_fallback = False
    """Whether a function on CPU ranks that asks for NCCL gets gloo."""

    def __init__(
        self,
        numGpus: int = 1,  # noqa: N803 - Spark's names
        nnodes: int = 1,
        localMode: bool = True,  # noqa: N803
        useGpu: bool = True,  # noqa: N803
        deepspeedConfig: str | Mapping[str, Any] | None = None,  # noqa: N803
    ) -> None:
        launching.check_whole("numGpus", numGpus)
        launching.check_whole("nnodes", nnodes)
        if localMode and nnodes > 1:
            raise ValueError(f"localMode=True is one node; got nnodes={nnodes}: give localMode=False")
        self.num_processes, self.local_mode, self.use_gpu = numGpus * nnodes, localMode, useGpu
        self._text = None if deepspeedConfig is None else _as_text(deepspeedConfig)
        if useGpu:
            otherwise = ", or localMode=False for another pool" if localMode else ", or choose another pool"
            there = launching.check_gpus("useGpu", local=localMode, otherwise=otherwise)
            if localMode and there is not None and numGpus > there:
                raise RuntimeError(
                    f"numGpus={numGpus} is more than the {there} GPUs of this machine: give numGpus={there}."
                )

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function and return rank 0's value; or a script, and return None.

        Both find `--deepspeed`, and `--deepspeed_config PATH`, at the end of `sys.argv`; a function may also call
        `config()`.
        """
        options = launching.pool_of(local=self.local_mode)
        options["gpus" if self.use_gpu else "ranks"] = self.num_processes
        options["backend_fallback"] = self.backend_fallback
        name = type(self).__name__
        options["names"] = launching.names_for(name, "numGpus")
        if callable(train_object):
            given = train_object, args, kwargs, self._text
            return launching.launch(name, on_ranks.with_arguments, given, {}, subject=train_object, **options)[0]
        script = launching.check_script(name, train_object, kwargs), [str(each) for each in args]
        given = on_ranks.run_file, script, {}, self._text
        launching.launch(name, on_ranks.with_arguments, given, {}, subject=os.path.basename(script[0]), **options)
        return None


_NONE = "is not a configuration of DeepSpeed:"


def _as_text(given: str | Mapping[str, Any]) -> str:
    """Return the configuration as JSON. Raises `ValueError` if it is invalid, or the file cannot be read."""
    if isinstance(given, Mapping):
        return json.dumps(dict(given))
    if not isinstance(given, str):
        raise ValueError(f"{given} {_NONE} a dict or the path of a JSON file is one")
    try:
        with open(given, encoding="utf-8") as file:
            text = file.read()
        found = json.loads(text)
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
    except ValueError as error:
        problem = str(error)
    else:
        if isinstance(found, dict):
            return text
        problem = f"it holds a {type(found).__name__}, not an object"
    raise ValueError(f"{given} {_NONE} {problem}")
