"""The facts about transformers. `TrainingArguments` know the device and the number of processes from the time when they
were made. Those of the notebook are sent without, and look for the rank's own when they are first asked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries.library import Library

_SET_UP = "_setup_devices"
_OF_PROCESS = (_SET_UP, "distributed_state", "_n_gpu")
"""The attributes that are written when devices are set up."""


class _FoundWhenRead:
    """The attribute that arguments without a state have until they are asked for it."""

    def __get__(self, arguments: Any, owner: type | None = None) -> Any:
        if arguments is None:
            raise AttributeError("distributed_state")
        getattr(arguments, _SET_UP)
        return arguments.__dict__["distributed_state"]


def arrived(cls: Any) -> Any:
    """Return new arguments that have no attributes yet."""
    for each in cls.__mro__:
        if _SET_UP in vars(each) and "distributed_state" not in vars(each):
            each.distributed_state = _FoundWhenRead()
    return cls.__new__(cls)


def _set_up_first(module: Any) -> None:
    """Have a trainer set its arguments up before it makes an accelerator, as arguments do that a cell makes: setting up
    ends the accelerators that there are."""
    original = module.Trainer.__init__

    @functools.wraps(original)
    def initialize(self: Any, model: Any = None, args: Any = None, *rest: Any, **keywords: Any) -> None:
        getattr(args, _SET_UP, None)
        original(self, model, args, *rest, **keywords)

    module.Trainer.__init__ = initialize


_SHARDS = (
    "save_pretrained() would write this rank's shards only, since this model is sharded over the ranks: end the cell "
    "with `model`, which comes back whole, and call it in the notebook, or call "
    "jupyter_distrib.save(path, model=model) on every rank."
)


def refuse_shards(name: str, module: Any) -> None:
    """Have `save_pretrained` of this class of models refuse one that a strategy has sharded."""
    cls = getattr(module, name)
    original = cls.save_pretrained

    @functools.wraps(original)
    def save_pretrained(model: Any, *args: Any, **keywords: Any) -> Any:
        state = keywords.get("state_dict")
        tensors = model.parameters() if state is None else state.values()
        meshes = sys.modules.get("jupyter_distrib.worker.autoparallel.training.meshes")
        if meshes is not None and meshes.ours_among(lambda: [each for each in tensors if hasattr(each, "device_mesh")]):
            raise DistributedError(_SHARDS)
        return original(model, *args, **keywords)

    cls.save_pretrained = save_pretrained


def _sent(arguments: Any) -> tuple[Any, ...]:
    return arrived, (type(arguments),), {k: v for k, v in vars(arguments).items() if k not in _OF_PROCESS}


def _declared_blocks(model: Any) -> Collection[str]:
    return getattr(model, "_no_split_modules", None) or ()


TRANSFORMERS = Library(
    modules=("transformers",),
    extra="transformers",
    repeated_blocks=_declared_blocks,
    mend={
        "transformers.trainer": _set_up_first,
        "transformers.modeling_utils": functools.partial(refuse_shards, "PreTrainedModel"),
    },
    sent={"transformers.training_args:TrainingArguments": _sent},
)
