"""The replacement of `cuda:0` by the rank's own device in a cell for one device. For one run; rank's main thread.

    "cuda:0" in the code of the cell and of the notebook's functions   replaced before the code is executed
    `.cuda(0)`, `torch.cuda.set_device(0)`                             replaced in the calls while the cell runs
    a `torch.device`, or a text, that the notebook has sent            replaced in variables and attributes

Without it all ranks would compute on the first GPU of the node, which NCCL refuses ("Duplicate GPU detected").
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, MutableMapping
from operator import is_
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from jupyter_distrib.worker.autoparallel.patches import Patches


class OwnDevice:
    """The device of this rank in place of the first one.

    Args:
        device: This rank's own device.
        note: Called once, when something was replaced.
        applies: Whether anything is replaced.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None], *, applies: bool = True) -> None:
        self._device, self._note, self._has_told = device, note, False
        self._first = f"{device.type}:0"
        self._applies = applies and device.type != "cpu" and bool(device.index)

    def begin(self, names: MutableMapping[str, object], patches: Patches) -> None:
        """Replace the device in values that the notebook has sent, and in calls until the patches are undone."""
        if not self._applies:
            return
        for name, value in list(names.items()):
            names[name] = self._replaced(value)
            self._look_into(names[name])
        module = torch.get_device_module(self._device.type)
        patches.replace(module, "set_device", self._setting_device)
        for owner in (torch.Tensor, nn.Module):
            if hasattr(owner, self._device.type):
                patches.replace(owner, self._device.type, self._moving)

    def adapted(self, code: CodeType) -> CodeType:
        """Return the code with this rank's device in place of the first one."""
        if not self._applies:
            return code
        constants = tuple(self._in_code(each) for each in code.co_consts)
        changed = any(new is not old for new, old in zip(constants, code.co_consts, strict=True))
        return code.replace(co_consts=constants) if changed else code

    def _in_code(self, constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return self.adapted(constant)
        if type(constant) is tuple:  # defaults of a function's arguments, say
            new = tuple(map(self._in_code, constant))
            return constant if all(map(is_, new, constant)) else new
        return self._replaced(constant) if isinstance(constant, str) else constant

    def _replaced(self, value: object) -> object:
        """Return the rank's device, of the same type, in place of the first one; any other value unchanged."""
        if type(value) is str and value == self._first:
            return self._told(str(self._device))
        if type(value) is torch.device and str(value) == self._first:
            return self._told(self._device)
        return value

    def _look_into(self, value: object) -> None:
        """Replace the first device in the notebook's containers of settings, and in its functions."""
        for function in _functions(value):
            function.__code__ = self.adapted(function.__code__)
            function.__defaults__ = self._in_code(function.__defaults__)
        inside = value if type(value) is dict else _attributes(value)
        for name, each in list(inside.items()):
            if (new := self._replaced(each)) is not each:
                inside[name] = new

    def _asked(self, device: Any) -> Any:
        """Return the device for a call, which may name the first one also by its number."""
        return self._told(self._device) if type(device) is int and device == 0 else self._replaced(device)

    def _setting_device(self, original: Any) -> Any:
        def set_device(device: Any) -> None:
            original(self._asked(device))

        return set_device

    def _moving(self, original: Any) -> Any:
        def move(thing: Any, device: Any = None, *args: Any, **keywords: Any) -> Any:
            return original(thing, self._asked(device), *args, **keywords)

        return move

    def _told(self, value: Any) -> Any:
        if not self._has_told:
            self._has_told = True
            self._note(f"{self._first} in this cell means the own device of each rank")
        return value


def misplaced(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return a tensor that is on another device than this rank's; the CPU and tensors without contents do not count."""
    return next((each for each in tensors if each.device != device and each.device.type not in ("cpu", "meta")), None)


def _functions(value: object) -> list[FunctionType]:
    """Return a function of the notebook, or the methods of a class of the notebook."""
    if not issubclass(type(value), (FunctionType, type)) or getattr(value, "__module__", "") != "__main__":
        return []
    found = vars(value).values() if isinstance(value, type) else (value,)
    plain = (getattr(each, "__func__", each) for each in found)
    return [each for each in plain if isinstance(each, FunctionType)]


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of objects for settings, and of objects of the notebook's classes."""
    cls = type(value)  # reading the `__class__` of a proxy may load its target
    is_ours = cls.__module__ == "__main__" or issubclass(cls, (argparse.Namespace, SimpleNamespace))
    return getattr(value, "__dict__", {}) if is_ours else {}
