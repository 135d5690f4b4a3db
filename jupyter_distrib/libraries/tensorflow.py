"""The facts about TensorFlow.

On a rank its tensors and variables are pickled as numpy arrays, so that a notebook which has no TensorFlow can read
them. A process has one `MultiWorkerMirroredStrategy`, because a second one starts the process's server anew, and the
collectives of workers that are not ready for it fail or hang (2.21).
"""

from __future__ import annotations

import copyreg
from types import ModuleType
from typing import Any

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


TENSORFLOW = Library(
    modules=("tensorflow",),
    extra="tensorflow",
    mend={
        "tensorflow.python.framework.ops": _as_arrays("EagerTensor"),
        "tensorflow.python.ops.resource_variable_ops": _as_arrays("ResourceVariable"),
        "tensorflow.python.distribute.values": _as_arrays("MirroredVariable", "SyncOnReadVariable"),
    },
)
