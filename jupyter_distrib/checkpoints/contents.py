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
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from jupyter_distrib.checkpoints import layout, optimizers, pickled, position
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system.private_torch import is_extra_state

# ------------------------------------------------------------------------------------------------ to be written


def state_of(name: str, value: Any, objects: Mapping[str, Any]) -> Any:
    """Return the object's part of the state for `torch.distributed.checkpoint.save`."""
    if isinstance(value, Module):
        state = _of_model(value)
        pickled.refuse_meta(name, state)
        _check_kept(name, state)
        return ModelState(state) or pickled.wrapped(name, state)
    if isinstance(value, Optimizer):
        return optimizers.state_of(value, optimizers.names_of(name, value, objects))
    if callable(getattr(value, "state_dict", None)):
        value = value.state_dict()
    elif isinstance(value, DataLoader):
        value = position.state_of(name, value)
    pickled.refuse_meta(name, value)
    if isinstance(value, torch.Tensor):
        return value if _can_be_kept(value) else (value.detach().cpu(),)
    return dict(value) if _are_tensors_by_name(value) else pickled.wrapped(name, value)


class ModelState(dict[str, Any]):
    """The state of a model, which is loaded only on request; otherwise it is like a dict of tensors."""


class SavedState(dict[str, Any]):
    """The states of these objects, by their names, as they are written."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        super().__init__({name: state_of(name, value, objects) for name, value in objects.items()})
        self.classes = {name: kind for name, value in objects.items() if (kind := _class_of(value))}
        """Names of the classes of optimizers and schedules, whose states do not tell them apart."""


def notes(state: Mapping[str, Any]) -> list[str]:
    """Return what `.metadata` says of a state: the names of models, and `name: class` of optimizers and schedules."""
    models = [name for name, value in state.items() if isinstance(value, ModelState)]
    classes = state.classes if isinstance(state, SavedState) else {}
    return [*models, *(f"{name}{_IS}{kind}" for name, kind in classes.items())]


_IS = ": "


def _class_of(value: Any) -> str:
    """Return the name of the class of an optimizer, or of the one that it wraps, or of a schedule; empty for others."""
    while isinstance(value, Optimizer) and isinstance(inner := getattr(value, "optimizer", None), Optimizer):
        value = inner
    return type(value).__name__ if isinstance(value, (Optimizer, LRScheduler)) else ""


def _of_model(model: Module) -> dict[str, Any]:
    """Return the state of a model; empty for one without any, such as a loss, for which torch (2.13) has an error. What
    `get_extra_state()` returns may be any value, so a dict or list of it is wrapped."""
    has_any = any(True for _ in model.parameters()) or model.state_dict()
    state = get_model_state_dict(model) if has_any else {}
    return {
        key: value if isinstance(value, torch.Tensor) else pickled.wrapped(key, value) for key, value in state.items()
    }


def _is_extra(key: str, value: Any) -> bool:
    return is_extra_state(key) or not isinstance(value, torch.Tensor)


def _check_kept(name: str, state: Mapping[str, Any]) -> None:
    """Refuse tensors that `torch.distributed.checkpoint` (2.13) writes and cannot read, or cannot write."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not _can_be_kept(value):
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else "sparse"
            raise DistributedError(
                f"`{name}.{key}` is a {kind} tensor, which torch.distributed.checkpoint cannot write: give "
                f"{name}={name}.state_dict(), which is pickled, and load it with load_state_dict()."
            )


def _can_be_kept(tensor: torch.Tensor) -> bool:
    return not tensor.is_quantized and not tensor.is_nested and tensor.layout == torch.strided


def _are_tensors_by_name(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items())
        and all(map(_can_be_kept, value.values()))
    )


# ------------------------------------------------------------------------------------------------ to be read


def check(metadata: Metadata, objects: Mapping[str, Any]) -> None:
    """Refuse objects that are not in the checkpoint, or that cannot be loaded in place."""
    there, classes = layout.names(metadata), dict(each.split(_IS, 1) for each in _notes_of(metadata) if _IS in each)
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
        saved, now = classes.get(name), _class_of(value)
        if saved and now and saved != now:
            layout.refuse(
                f"`{name}` is of the class {now}, and the checkpoint has the state of {saved} under this name, which "
                f"means something else: build one of {saved}, or leave `{name}` out, which then begins anew"
            )


def place(metadata: Metadata, name: str, value: Any) -> Any:
    """Return the tensors into which to read the state of an object; those of a model are its own.

    Raises:
        DistributedError: The checkpoint does not fit the model.
    """
    found = layout.entries(metadata, name)
    if not isinstance(value, Module):
        return layout.nested(found)
    state = _of_model(value)
    layout.refuse_if_any(
        f"`{name}.{key}` of the model is on the meta device and has no memory to load into: call "
        f"{name}.to_empty(device=...) before"
        for key, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and tensor.is_meta
    )
    if not state:  # as it was written: `()` is the path of an entry that is one pickle
        found.pop((), None)
    extra = {key for key, now in state.items() if _is_extra(key, now)}
    saved = {str(path[0]): entry for path, entry in found.items() if path}
    layout.refuse_if_any(
        f"`{name}.{key}` is {layout.size(entry)} in the checkpoint and {tuple(state[key].shape)} in the model"
        for key, entry in saved.items()
        if layout.is_tensor(entry)
        and key in state
        and key not in extra
        and layout.size(entry) != tuple(state[key].shape)
    )
    layout.refuse_if_any(
        f"`{name}.{key}` is {_type(entry)} in the checkpoint and {str(state[key].dtype).removeprefix('torch.')} in the "
        "model, which would lose a part of it"
        for key, entry in saved.items()
        if layout.is_tensor(entry) and key in state and key not in extra and _loses(entry, state[key])
    )
    layout.refuse_if_any(
        f"the checkpoint has nothing for `{name}.{key}` of the model" for key in state if key not in saved
    )
    layout.refuse_if_any(
        f"the model has no place for `{name}.{key}` of the checkpoint" for key in saved if key not in state
    )
    # Extra state is read as it was saved, which may be another value than the model has now.
    return state | {key: layout.nested(layout.entries(metadata, name, key)) for key in extra}


def _loses(entry: layout.Entry, now: torch.Tensor) -> bool:
    """Return whether a tensor of the model would cut off what was saved: fractions or imaginary parts."""
    return not torch.can_cast(entry.properties.dtype, now.dtype)


def _type(entry: layout.Entry) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


def plain_places(metadata: Metadata, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return places for entries that were not requested by name, except models and optimizers."""
    models = _notes_of(metadata)
    found = {name: layout.entries(metadata, name) for name in layout.names(metadata) if name not in objects}
    return {
        name: layout.nested(inner)
        for name, inner in found.items()
        if name not in models and not any(len(path) > 1 for path in inner)  # the paths of an optimizer are longer
    }


def plain(metadata: Metadata, read: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was read, for the user."""
    out = {name: pickled.unwrapped(value) for name, value in read.items()}
    for name in out.keys() & _notes_of(metadata):
        out[name] = {key: pickled.unwrapped(each) for key, each in out[name].items()}
    return out


def _notes_of(metadata: Metadata) -> set[str]:
    return set() if metadata.storage_meta is None else {*metadata.storage_meta.modules}


def give(value: Any, state: Any) -> None:
    """Load the values read from the checkpoint into an object."""
    if isinstance(value, Module):
        if state := pickled.unwrapped(state):
            set_model_state_dict(value, {key: pickled.unwrapped(each) for key, each in state.items()})
    elif isinstance(value, DataLoader) and not callable(getattr(value, "load_state_dict", None)):
        position.restore(value, pickled.unwrapped(state))
    else:
        value.load_state_dict(pickled.unwrapped(state))
