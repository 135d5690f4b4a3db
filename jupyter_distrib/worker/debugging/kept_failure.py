"""Keeps the last cell's failure for a debugger: the exception, the frames of its traceback, and the values in them.
Large values on a GPU are freed, since the notebook may idle for hours. Rank's main thread.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from jupyter_distrib.serialization.tensors import is_on_accelerator
from jupyter_distrib.system import open_files, private_torch
from jupyter_distrib.system.formatting import size
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.debugging.debugger_channel import DebuggerChannel
from jupyter_distrib.worker.environment.cleanup import Cleanup

_ROOM = 32
"""Number of files that the next cell may open, for its group among others; without room for them, the failed cell's
files are closed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    command: m.Execute
    module: types.ModuleType
    error: BaseException


class KeptFailure:
    """The last failure, from the end of its cell until the next cell."""

    def __init__(self, cleanup: Cleanup, channel: DebuggerChannel, send: Callable[[m.Event], None]) -> None:
        self._cleanup, self._channel, self._send = cleanup, channel, send
        self._failure: _Failure | None = None
        self._freed = 0
        """Number of its variables whose values were freed."""

    def keep(self, command: m.Execute, module: types.ModuleType, error: BaseException) -> None:
        """Keep a failure and postpone the cleanup after its cell; large GPU values are freed soon."""
        self._failure = _Failure(command=command, module=module, error=error)
        self._freed = 0
        self._cleanup.after_failure(self._free)

    def _free(self) -> None:
        if self._failure is not None:
            self._freed += free_device_values(self._failure.error, frozenset(self._failure.command.setting.keep))

    def drop(self) -> None:
        """Drop the failure, if there is one, and clean up after its cell."""
        failure, self._failure = self._failure, None
        if failure is not None:
            command, names = failure.command, failure.module.__dict__
            BaseException.with_traceback(failure.error, None)  # the class may forbid to set attributes
            del failure
            self._cleanup.after(command, names)
            if self._cleanup.is_urgent or not open_files.has_room(_ROOM):
                self._cleanup.collect()

    def examine(self, order: m.Debug) -> None:
        """Run the debugger on the failure until the user or the agent ends it."""
        failure = self._failure
        if failure is None or failure.command.run != order.run:
            text = f"rank {order.rank} keeps no failure of that run: only the last cell's is kept, until --done."
            return self._send(m.DebuggerLeft(run=order.run, rank=order.rank, text=text, at_s=time.monotonic()))
        from jupyter_distrib.worker.debugging.debugger import RankPdb

        self._channel.begin(order.run, failure.command.cell.filename, examining=True)
        try:
            return RankPdb(self._channel).examine(failure.error.__traceback__, freed=self._freed)
        finally:
            self._channel.finish()


LEFT_BYTES = 256 << 20
"""Device memory that a failure may keep for the debugger: enough for the batch and the loss."""
_MANY = 200_000
"""Maximum number of objects to inspect inside one value."""
_OPAQUE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)


class Freed:
    """Stands in for a freed value in the debugger."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@dataclass(slots=True)
class _Variable:
    """A variable of a frame, with the device memory that it holds."""

    frame: types.FrameType
    name: str
    value: Any
    storages: dict[int, int] = field(default_factory=dict)
    """Size of each storage in bytes, by address."""
    device: str = ""
    has_graph: bool = False
    """Whether a tensor has an autograd graph, whose memory cannot be measured."""

    @property
    def size_bytes(self) -> int:
        return sum(self.storages.values())


def free_device_values(error: BaseException, kept: frozenset[str]) -> int:
    """Free the largest device values in the frames of an exception, so that the rest holds at most `LEFT_BYTES`.

    Only the frames' references are replaced: a value that something else refers to, such as a kept model, stays.

    Args:
        error: The exception, including its causes and contexts.
        kept: The names of the cell that are kept.

    Returns:
        The number of variables that were replaced.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    found = [held for frame in _frames(error) for held in _held(frame, kept, torch) if held.storages]
    left: dict[int, int] = {}
    replaced = 0
    for held in sorted(found, key=lambda each: each.size_bytes):
        with_it = {**left, **held.storages}
        bare = isinstance(held.value, torch.Tensor)
        if sum(with_it.values()) <= LEFT_BYTES and (bare or not held.has_graph):
            left = with_it
            if held.has_graph:
                _replace(held, held.value.detach())
        else:
            _replace(held, Freed(_described(held, torch)))
            replaced += 1
    return replaced


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    """Yield the frames of all exceptions that led to this one, each once."""
    errors, seen = [error], set[int]()
    while errors:
        each = errors.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        errors += [one for one in (each.__cause__, each.__context__) if one is not None]
        errors += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        step = each.__traceback__
        while step is not None:
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield step.tb_frame
            step = step.tb_next


def _held(frame: types.FrameType, kept: frozenset[str], torch: Any) -> Iterator[_Variable]:
    """Yield the device values of a frame's variables, except variables shared with closures."""
    shared = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    if not frame.f_code.co_flags & _OPTIMIZED:
        shared |= kept  # the cell itself
    for name, value in list(frame.f_locals.items()):
        if name not in shared and not name.startswith("__"):
            yield _looked_into(_Variable(frame, name, value), torch)


_OPTIMIZED = 1
"""CO_OPTIMIZED of a code object: that of a function."""


def _looked_into(held: _Variable, torch: Any) -> _Variable:
    """Find the storages that a variable holds, directly or nested."""
    todo, seen = [held.value], {id(held)}
    while todo and len(seen) < _MANY:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            _count(held, value)
            if (grad := value.grad if value.is_leaf else None) is not None:
                todo.append(grad)
        else:
            todo += gc.get_referents(value)
    return held


def _count(held: _Variable, tensor: Any) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        storage = local.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or without memory of its own
        return
    if is_on_accelerator(storage) and storage.device.type != "meta":
        held.storages[private_torch.identity(storage)] = storage.nbytes()
        held.device = str(storage.device)
        held.has_graph = held.has_graph or tensor.grad_fn is not None


def _described(held: _Variable, torch: Any) -> str:
    value = held.value
    what = type(value).__name__
    if isinstance(value, torch.Tensor):
        what = f"{what} of shape {tuple(value.shape)} and {value.dtype}"
    return f"<{what} on {held.device}, freed after the failure: {size(held.size_bytes)}>"


def _replace(held: _Variable, value: object) -> None:
    names = cast(Mapping[str, object], held.frame.f_locals)
    cast(dict[str, object], names)[held.name] = value
    # Until Python 3.12 the variables of a function are a copy, which this writes back.
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(held.frame), ctypes.c_int(0))
