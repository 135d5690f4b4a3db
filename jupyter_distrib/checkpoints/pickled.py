"""Values that a checkpoint holds as one pickle, in a form that `torch.distributed.checkpoint` keeps intact."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker.pytorch.private import tree_leaves, tree_map_only


def wrapped(name: str, value: Any) -> Any:
    """Wrap a dict or list in a tuple to keep it intact: torch would flatten it, turn its keys into strings and lose
    empty ones.

    Raises:
        DistributedError: It has sharded tensors in it.
    """
    if any(isinstance(item, DTensor) for item in tree_leaves(value)):
        raise DistributedError(
            f"`{name}` has sharded tensors among other things: give jupyter_distrib.save() the model or optimizer "
            "itself, or a dict with tensors only."
        )
    value = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
    return (value,) if isinstance(value, (Mapping, list, tuple)) else value


def refuse_meta(name: str, value: Any) -> None:
    """Refuse a value that is or has a tensor on the meta device."""
    entries = value.items() if isinstance(value, Mapping) else [("", value)]
    for key, entry in entries:
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(entry)):
            raise DistributedError(
                f"`{f'{name}.{key}' if key else name}` is on the meta device and has no values to save: leave it out, "
                "or give it memory and values first."
            )


def in_bytes(name: str, value: Any) -> BytesIO:
    """Pickle an entry.

    Raises:
        DistributedError: It cannot be pickled; the message names it.
    """
    content = BytesIO()
    try:
        torch.save(value, content)
    except Exception as error:  # foreign code
        raise DistributedError(
            f"`{name}` cannot be pickled for the checkpoint: {type(error).__name__}: {error}. Leave it out, or give "
            "what is needed of it."
        ) from error
    return content


def unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
