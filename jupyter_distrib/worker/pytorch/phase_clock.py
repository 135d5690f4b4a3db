"""Divides the time of a training loop into phases: data loading, forward, backward, collectives, optimizer, and the
rest. Rank's main thread, except `times`.

Installed once, before ranks are forked. It hooks events that happen a few times in each step:

    a data loader is asked for a batch        data           until it has one; then forward
    `torch.autograd.backward` is called       backward       until it returns; then the rest
        ... its graph is done                 collective     what is left is `DistributedDataParallel`'s waiting
    an optimizer steps                        optimizer      until it has; then the rest
    `Work.wait` of a collective               collective     until it returns; then the phase before

The time from the batch, or the previous step, to the backward pass counts as forward: module calls are not measured,
since models have many. Each event costs about a microsecond. Times are CPU wall times: work that a GPU does later
counts where the CPU waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import private

PHASES = ("data", "forward", "backward", "collective", "optimizer", "other")
_BEFORE = "before"
"""The phase before the first event of a training run; not counted."""


class PhaseClock:
    """Time spent in each phase by one cell."""

    def __init__(self) -> None:
        self.on_step: Callable[[], object] | None = None
        """Called after each optimizer step."""
        self.spans: list[tuple[str, float, float]] | None = None
        """List to which each phase is appended with its start and end; None if not recorded."""
        self.begin()

    def begin(self) -> None:
        """Reset the clock for a cell, which runs in this thread."""
        self._thread = threading.get_ident()
        self.phase, self._since_s = _BEFORE, perf_counter()
        self._seconds = dict.fromkeys((_BEFORE, *PHASES), 0.0)
        self.steps = 0
        self.reduces_after_backward = False
        """Whether a user's `DistributedDataParallel` has been prepared for the next backward pass."""

    @property
    def applies(self) -> bool:
        """Return whether the caller runs in the measured thread."""
        return threading.get_ident() == self._thread

    def enter(self, phase: str) -> str:
        """Switch to a phase, and return the previous one."""
        now_s, ended = perf_counter(), self.phase
        self._seconds[ended] += now_s - self._since_s
        if self.spans is not None and ended != _BEFORE:
            self.spans.append((ended, self._since_s, now_s))
        self._since_s, self.phase = now_s, phase
        return ended

    def enter_backward(self) -> str:
        """Switch to backward: the time since the last event counts as forward, unless an optimizer runs both passes."""
        if self.phase in (_BEFORE, "other"):
            self.phase = "forward"
        return self.enter("backward")

    def end_compute(self) -> None:
        """Record that the graph of the backward pass is done: the rest of the pass waits for other ranks."""
        if self.applies and self.phase == "backward":
            self.enter("collective")

    def end_step(self) -> None:
        self.steps += 1
        if self.on_step is not None:
            self.on_step()

    def times(self) -> m.PhaseTimes | None:
        """Return the times so far; None before the first optimizer step. From any thread."""
        if not self.steps:
            return None
        now_s, since_s, phase = perf_counter(), self._since_s, self.phase
        seconds = {name: self._seconds[name] for name in PHASES}
        if phase in seconds:
            seconds[phase] += max(0.0, now_s - since_s)
        return m.PhaseTimes(steps=self.steps, seconds=seconds)


clock = PhaseClock()
"""The clock of this process."""


def install() -> None:
    """Install the hooks in torch; called once."""
    for owner, name, make in (
        (private.LoaderIterator, "__next__", _reading),
        (DataLoader, "__iter__", _beginning),
        (torch.autograd, "backward", _going_backward),
        (DistributedDataParallel, "forward", _preparing),
        (private.Work, "wait", _waiting),
    ):
        original = getattr(owner, name)
        setattr(owner, name, wraps(original)(make(clock, original)))
    stepping = _Stepping(clock)
    register_optimizer_step_pre_hook(stepping.begin)
    register_optimizer_step_post_hook(stepping.end)


def _beginning(clock: PhaseClock, original: Any) -> Callable[..., Any]:
    return _reading(clock, original, then="other")


def _reading(clock: PhaseClock, original: Any, then: str = "forward") -> Callable[..., Any]:
    def read(loader: Any) -> Any:
        if clock.phase == "data" or not clock.applies:
            return original(loader)
        clock.enter("data")
        following = "other"
        try:
            batch = original(loader)
            following = then
            return batch
        finally:
            clock.enter(following)

    return read


def _going_backward(clock: PhaseClock, original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **keywords: Any) -> None:
        if clock.phase in ("backward", "collective") or not clock.applies:  # inside another pass
            original(tensors, *args, **keywords)
            return
        handle = None
        if clock.reduces_after_backward:
            clock.reduces_after_backward = False
            handle = _at_end_of_graph(tensors, clock.end_compute)
        before = clock.enter_backward()
        try:
            original(tensors, *args, **keywords)
        finally:
            clock.enter("optimizer" if before == "optimizer" else "other")
            if handle is not None:
                handle.remove()

    return backward


def _at_end_of_graph(tensors: Any, call: Callable[[], None]) -> Any:
    """Have a function called when the gradients are computed, before any callback that waits for their reduction."""
    some = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    first = next((each for each in some if isinstance(each, torch.Tensor) and each.requires_grad), None)
    if first is None:
        return None
    return first.register_hook(lambda _: private.at_end_of_backward(call))  # type: ignore[no-untyped-call]


def _preparing(clock: PhaseClock, original: Any) -> Callable[..., Any]:
    def forward(model: Any, *args: Any, **keywords: Any) -> Any:
        if clock.applies and clock.phase in (_BEFORE, "other"):
            clock.enter("forward")
        clock.reduces_after_backward = torch.is_grad_enabled() and model.require_backward_grad_sync
        return original(model, *args, **keywords)

    return forward


def _waiting(clock: PhaseClock, original: Any) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **keywords: Any) -> Any:
        if clock.phase == _BEFORE or not clock.applies:
            return original(work, *args, **keywords)
        before = clock.enter("collective")
        try:
            return original(work, *args, **keywords)
        finally:
            clock.enter(before)

    return wait


class _Stepping:
    """The hooks of all optimizers."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._before = "other"

    def begin(self, *_: object) -> None:
        if self._clock.applies:
            self._before = self._clock.enter("optimizer")

    def end(self, *_: object) -> None:
        if self._clock.applies:
            self._clock.end_step()
            self._clock.enter("backward" if self._before == "backward" else "other")
