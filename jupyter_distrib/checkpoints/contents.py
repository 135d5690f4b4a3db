"""The contents of a checkpoint by kind of object: how each is written and loaded.

    model                 name.<parameter>               each tensor by itself, sharded as it is
    optimizer             name.state.<parameter>.<key>, name.param_groups.<n>.<option>
    tensors by name       name.<key>
    data loader           name                           its position, as `position.py` has it
    anything else         name                           one pickle, as rank 0 has it

The first two are named as `torch.distributed.checkpoint.state_dict` names them, so that torch's own functions can read
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from jupyter_distrib.checkpoints import layout, optimizers, position
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker.pytorch.private import tree_leaves, tree_map_only

# ------------------------------------------------------------------------------------------------ to be written


def state_of(name: str, value: Any, objects: Mapping[str, Any]) -> Any:
    """Return the object's part of the state for `torch.distributed.checkpoint.save`."""
    if isinstance(value, Module):
        return get_model_state_dict(value)
    if isinstance(value, Optimizer):
        return optimizers.state_of(value, optimizers.names_of(name, value, objects))
    if callable(getattr(value, "state_dict", None)):
        value = value.state_dict()
    elif isinstance(value, DataLoader):
        value = position.state_of(name, value)
    if isinstance(value, torch.Tensor):
        return value
    return dict(value) if _are_tensors_by_name(value) else _pickled(name, value)


def _are_tensors_by_name(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items())
    )


def _pickled(name: str, value: Any) -> Any:
    """Wrap a dict or list in a tuple to keep it intact: torch would flatten it, turn its keys into strings and lose
    empty ones."""
    if any(isinstance(item, DTensor) for item in tree_leaves(value)):
        raise DistributedError(
            f"`{name}` has sharded tensors among other things: give jupyter_distrib.save() the model or optimizer "
            "itself, or a dict with tensors only."
        )
    value = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
    return (value,) if isinstance(value, (Mapping, list, tuple)) else value


def unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


# ------------------------------------------------------------------------------------------------ to be read


def check(metadata: Metadata, objects: Mapping[str, Any]) -> None:
    """Refuse objects that are not in the checkpoint, or that cannot be loaded in place."""
    there = layout.names(metadata)
    for name, value in objects.items():
        if name not in there:
            layout.refuse(f"the checkpoint has no `{name}`, it holds {', '.join(there)}")
        if not isinstance(value, (Module, Optimizer, DataLoader)) and not callable(
            getattr(value, "load_state_dict", None)
        ):
            layout.refuse(
                f"`{name}` is {type(value).__name__}, which cannot be loaded in place (leave it out, and "
                "jupyter_distrib.load() returns it)"
            )


def place(metadata: Metadata, name: str, value: Any) -> Any:
    """Return the tensors into which to read the state of an object; those of a model are its own.

    Raises:
        DistributedError: The checkpoint does not fit the model.
    """
    found = layout.entries(metadata, name)
    if not isinstance(value, Module):
        return layout.nested(found)
    state: dict[str, Any] = get_model_state_dict(value)
    saved = {str(path[0]): entry for path, entry in found.items() if path}
    layout.refuse_if_any(
        f"`{name}.{key}` is {layout.size(entry)} in the checkpoint and {tuple(state[key].shape)} in the model"
        for key, entry in saved.items()
        if layout.is_tensor(entry) and key in state and layout.size(entry) != tuple(state[key].shape)
    )
    layout.refuse_if_any(
        f"the checkpoint has nothing for `{name}.{key}` of the model" for key in state if key not in saved
    )
    layout.refuse_if_any(
        f"the model has no place for `{name}.{key}` of the checkpoint" for key in saved if key not in state
    )
    return state


def plain_places(metadata: Metadata, objects: Mapping[str, Any]) -> dict[str, None]:
    """Return placeholders for the pickled values that were not requested by name."""
    found = {name: layout.entries(metadata, name).get(()) for name in layout.names(metadata) if name not in objects}
    return {name: None for name, entry in found.items() if entry is not None and not layout.is_tensor(entry)}


def give(value: Any, state: Any) -> None:
    """Load the values read from the checkpoint into an object."""
    if isinstance(value, Module):
        set_model_state_dict(value, state)
    elif isinstance(value, DataLoader) and not callable(getattr(value, "load_state_dict", None)):
        position.restore(value, unwrapped(state))
    else:
        value.load_state_dict(unwrapped(state))
