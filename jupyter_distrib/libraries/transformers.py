"""The facts about transformers. `TrainingArguments` know the device and the number of processes from the time when they
were made. Those of the notebook are sent without, and look for the rank's own when they are first asked."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from jupyter_distrib.libraries.library import Library

_SET_UP = "_setup_devices"
_OF_PROCESS = (_SET_UP, "distributed_state", "_n_gpu")
"""The attributes that setting up devices writes."""


class _FoundWhenRead:
    """The attribute that arguments without a state have until they are asked for it."""

    def __get__(self, arguments: Any, owner: type | None = None) -> Any:
        if arguments is None:
            raise AttributeError("distributed_state")
        getattr(arguments, _SET_UP)
        return arguments.__dict__["distributed_state"]


def arrived(cls: Any) -> Any:
    """Return new arguments, still without attributes."""
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


def _sent(arguments: Any) -> tuple[Any, ...]:
    return arrived, (type(arguments),), {k: v for k, v in vars(arguments).items() if k not in _OF_PROCESS}


def _declared_blocks(model: Any) -> Collection[str]:
    return getattr(model, "_no_split_modules", None) or ()


TRANSFORMERS = Library(
    modules=("transformers",),
    extra="transformers",
    repeated_blocks=_declared_blocks,
    mend={"transformers.trainer": _set_up_first},
    sent={"transformers.training_args:TrainingArguments": _sent},
)
