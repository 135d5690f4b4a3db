"""Replaces `cuda:0` by the rank's own device in a cell written for one device. For one run; rank's main thread.

    "cuda:0" in the code of the cell and of the notebook's functions   replaced before the code is executed
    `.cuda(0)`, `.to(0)`, `torch.cuda.set_device(0)`                   replaced in the calls while the cell runs
    `torch.device("cuda", 0)`, `torch.device(f"cuda:{gpu}")`           made by a class that replaces torch's
    a `torch.device`, or a string, that the notebook has sent            replaced in variables and attributes

Calls from torch's own code are left unchanged.

Otherwise all ranks would compute on the first GPU of the node, which NCCL refuses ("Duplicate GPU detected").
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from operator import is_
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from jupyter_distrib.worker.autoparallel.patches import Patches

DEVICE = torch.device
_TORCH = os.path.dirname(torch.__file__) + os.sep


class DeviceRemapping:
    """Puts this rank's device in place of the first one.

    Args:
        device: This rank's own device.
        note: Called once, when something is replaced.
        applies: Whether anything is replaced.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None], *, applies: bool = True) -> None:
        self._device, self._note, self._has_noted = device, note, False
        self._first = f"{device.type}:0"
        self._applies = applies and device.type != "cpu" and bool(device.index)

    def begin(self, names: MutableMapping[str, object], patches: Patches) -> None:
        """Replace the device in values sent by the notebook, and in calls until the patches are undone."""
        if not self._applies:
            return
        stand_in = _device_class(self._made)
        patches.put(torch, "device", stand_in)
        for name, value in list(names.items()):
            names[name] = stand_in if value is DEVICE else self._replaced(value)
            self._replace_inside(names[name])
        module = torch.get_device_module(self._device.type)
        for owner, name in ((module, "set_device"), (torch, "set_default_device")):
            patches.replace(owner, name, partial(self._calling, place=0))
        method = partial(self._calling, place=1)  # behind `self`
        patches.replace(module.device, "__init__", method)
        for owner in (torch.Tensor, nn.Module):
            patches.replace(owner, "to", method)
            if hasattr(owner, self._device.type):
                patches.replace(owner, self._device.type, method)

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
        if type(constant) is tuple:  # such as the defaults of a function's arguments
            new = tuple(map(self._in_code, constant))
            return constant if all(map(is_, new, constant)) else new
        return self._replaced(constant) if isinstance(constant, str) else constant

    def _replaced(self, value: object) -> object:
        """Return the rank's device, of the same type, in place of the first one; any other value unchanged."""
        if type(value) is str and value == self._first:
            return self._noted(str(self._device))
        if type(value) is DEVICE and str(value) == self._first:
            return self._noted(self._device)
        return value

    def _replace_inside(self, value: object) -> None:
        """Replace the first device inside the notebook's settings objects and functions."""
        for function in _functions(value):
            function.__code__ = self.adapted(function.__code__)
            function.__defaults__ = self._in_code(function.__defaults__)
        inside = value if type(value) is dict else _attributes(value)
        for name, each in list(inside.items()):
            if (new := self._replaced(each)) is not each:
                inside[name] = new

    def _asked(self, device: Any) -> Any:
        """Return the device for a call, which may also refer to the first one by its number."""
        return self._noted(self._device) if type(device) is int and device == 0 else self._replaced(device)

    def _calling(self, original: Any, *, place: int) -> Any:
        """Return a function that uses the rank's own device for the first one; `place` is the position of its device
        argument."""

        def call(*args: Any, **keywords: Any) -> Any:
            device = keywords.get("device") if len(args) <= place else args[place]
            if self._names_first(device) and not _is_torchs(sys._getframe(1)):  # noqa: SLF001 - documented
                new = self._asked(device)
                if len(args) > place:
                    args = (*args[:place], new, *args[place + 1 :])
                else:
                    keywords["device"] = new
            return original(*args, **keywords)

        return call

    def _names_first(self, device: Any) -> bool:
        if type(device) is int:
            return device == 0
        return (type(device) is str or type(device) is DEVICE) and str(device) == self._first

    def _made(self, device: torch.device, caller: FrameType) -> torch.device:
        """Return the device to use for a newly created one."""
        return self._noted(self._device) if self._names_first(device) and not _is_torchs(caller) else device

    def _noted(self, value: Any) -> Any:
        if not self._has_noted:
            self._has_noted = True
            self._note(f"{self._first} in this cell means each rank's own device")
        return value


def _is_torchs(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)


def _device_class(made: Callable[[torch.device, FrameType], torch.device]) -> type:
    """Return a substitute for the class `torch.device`, which creates torch's own objects and compares equal to torch's
    class.

    Args:
        made: Returns the device to use, given a new one and the frame that creates it.
    """

    class Meta(type):
        def __call__(cls, *args: Any, **keywords: Any) -> torch.device:
            try:
                device = DEVICE(*args, **keywords)
            except RuntimeError:  # a number, where this process has no accelerator
                if args != (0,) or keywords:
                    raise
                device = DEVICE("cuda", 0)
            return made(device, sys._getframe(1)) if torch.device is cls else device  # noqa: SLF001 - documented

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, DEVICE)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, DEVICE)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is DEVICE

        def __hash__(cls) -> int:
            return hash(DEVICE)

    return Meta("device", (), {"__module__": "torch", "__doc__": DEVICE.__doc__})


def misplaced(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return a tensor on another device than this rank's; the CPU and tensors without contents do not count."""
    return next((each for each in tensors if each.device != device and each.device.type not in ("cpu", "meta")), None)


def _functions(value: object) -> list[FunctionType]:
    """Return the value if it is a function of the notebook, or the methods if it is a class of the notebook."""
    if not issubclass(type(value), (FunctionType, type)) or getattr(value, "__module__", "") != "__main__":
        return []
    members = vars(value).values() if isinstance(value, type) else (value,)
    plain = (getattr(each, "__func__", each) for each in members)
    return [each for each in plain if isinstance(each, FunctionType)]


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of a settings object, or of an instance of a notebook class."""
    cls = type(value)  # reading the `__class__` of a proxy may load its target
    is_ours = cls.__module__ == "__main__" or issubclass(cls, (argparse.Namespace, SimpleNamespace))
    return getattr(value, "__dict__", {}) if is_ours else {}
