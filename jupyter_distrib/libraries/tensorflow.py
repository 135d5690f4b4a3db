"""The facts about TensorFlow.

On a rank its tensors and variables are pickled as numpy arrays, so that a notebook which has no TensorFlow can read
them. A process has one `MultiWorkerMirroredStrategy`, because a second one starts the process's server anew, and the
collectives of workers that are not ready for it fail or hang (2.21).
"""

from __future__ import annotations

import copyreg
import functools
import os
from types import ModuleType
from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries.library import Library


def _array(value: Any) -> Any:
    return value


def _reduced(value: Any) -> tuple[Any, ...]:
    read = getattr(value, "read_value", None)
    return _array, ((value if read is None else read()).numpy(),)


def _as_arrays(*names: str) -> Any:
    def mend(module: ModuleType) -> None:
        for name in names:
            if (cls := getattr(module, name, None)) is not None:
                copyreg.pickle(cls, _reduced)

    return mend


def _make_once(module: Any) -> None:
    """Let a process that makes the strategy again have the one that it has made."""
    cls = module.CollectiveAllReduceStrategy
    original = cls.__init__
    made: list[tuple[Any, Any]] = []

    def new(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        return made[0][0] if made else object.__new__(cls)

    @functools.wraps(original)
    def init(strategy: Any, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        resolver = cluster_resolver or module.tfconfig_cluster_resolver.TFConfigClusterResolver()
        settings = (
            resolver.cluster_spec().as_dict(),
            vars(module.collective_util.Options() if communication_options is None else communication_options),
        )
        if not made:
            _run_first(original, strategy, cluster_resolver, communication_options)
            if "TF_CONFIG" in os.environ:
                made.append((strategy, settings))
        elif settings != made[0][1]:
            raise DistributedError(
                "TensorFlow keeps one MultiWorkerMirroredStrategy for as long as a process lives, and this process has "
                "made one with another cluster or other communication options: add --fresh to the cell's line."
            )

    cls.__new__ = new
    cls.__init__ = init


def _run_first(make: Any, *arguments: Any) -> None:
    try:
        make(*arguments)
    except RuntimeError as error:
        if "at program startup" not in str(error):
            raise
        raise DistributedError(
            "TensorFlow must make its MultiWorkerMirroredStrategy before it runs any operation, and these processes "
            "have run some, in this cell or before: add --fresh to the cell's line, and make the strategy first."
        ) from None


TENSORFLOW = Library(
    modules=("tensorflow",),
    extra="tensorflow",
    mend={
        "tensorflow.python.framework.ops": _as_arrays("EagerTensor"),
        "tensorflow.python.ops.resource_variable_ops": _as_arrays("ResourceVariable"),
        "tensorflow.python.distribute.collective_all_reduce_strategy": _make_once,
        "tensorflow.python.distribute.values": _as_arrays("MirroredVariable", "SyncOnReadVariable"),
    },
)
