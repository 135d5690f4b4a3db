"""The facts about torch's own objects that are neither tensors nor modules (those are the task of
`serialization/tensors.py`). Torch is loaded where there is one of them."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from typing import Any

from jupyter_distrib.libraries.library import Library
from jupyter_distrib.system import private_torch


def _loader(loader: Any) -> tuple[Any, ...]:
    """Leave out the iterator, with its processes, that a loader with `persistent_workers` keeps after its first use."""
    make, arguments, state, *rest = loader.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(state, dict) and private_torch.LAST_ITERATOR in state:
        state = {**state, private_torch.LAST_ITERATOR: None}
    return make, arguments, state, *rest


def _iterator(_: object) -> tuple[Any, ...]:
    raise pickle.PicklingError("a pass over a DataLoader belongs to its process: call iter(loader) in the cell")


def _limits(info: Any) -> tuple[Any, ...]:
    return limits, (type(info).__name__, info.dtype)


def limits(kind: str, dtype: str) -> Any:
    """Return a `torch.finfo` or `torch.iinfo`."""
    torch: Any = importlib.import_module("torch")
    return getattr(torch, kind)(getattr(torch, dtype))


def _exported(program: Any) -> tuple[Any, ...]:
    file = io.BytesIO()
    sys.modules["torch"].export.save(program, file)
    return load_exported, (file.getvalue(),)


def load_exported(data: bytes) -> Any:
    """Return a program from the bytes that `torch.export.save` has written."""
    export: Any = importlib.import_module("torch.export")
    return export.load(io.BytesIO(data))


def _operator(operator: Any) -> tuple[Any, ...]:
    raise pickle.PicklingError(
        f"{operator!r} is registered in the notebook's process: define it in a cell with %%distributed_setup"
    )


TORCH = Library(
    modules=("torch",),
    sent={
        f"torch.utils.data.dataloader:{private_torch.ITERATOR_CLASS}": _iterator,
        "torch.utils.data.dataloader:DataLoader": _loader,
        "torch:finfo": _limits,
        "torch:iinfo": _limits,
        "torch.export:ExportedProgram": _exported,
        "torch.library:CustomOpDef": _operator,
    },
)
