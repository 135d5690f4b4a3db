"""Measures the memory of a real training on a CPU rank by the events of torch's allocator, and separates tensors from
what else is allocated. `train` runs until each optimizer has taken two steps, as in a dry run.

A GPU keeps the tensors as well. It has other kernels, and so other workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch.optim import optimizer as optimizers

STEPS = 2
MOST_SHOWN = 10


_TRAINING = "the training"


class _Finished(BaseException):
    pass


@dataclass(slots=True)
class Allocation:
    """Memory that one event of the allocator has taken."""

    kind: str
    operators: str
    """The innermost operators that ran."""
    size_bytes: int
    ends_ns: int
    """The end of the operator that the dispatcher has called for this memory; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most that was taken at any time."""

    tensors_bytes: int
    """By what outlives the operator that has allocated it. Such memory counts from its allocation."""
    with_workspaces_bytes: int
    """By these and by what an operator has freed before it returned."""
    all_bytes: int
    """By these, by the copies of gloo and of other threads, and by states of random numbers, which stay on the host."""
    held: list[tuple[int, int, str]]
    """The most in tensors at their peak: bytes, number, and the operators that have allocated them."""


def measured(train: Callable[[], object]) -> dict[str, Any]:
    """Run a training and return its `Peaks`."""
    seen: dict[int, Any] = {}
    steps: dict[int, int] = {}
    begin = optimizers.Optimizer.__init__

    def begun(self: Any, *args: Any, **keywords: Any) -> None:
        begin(self, *args, **keywords)
        seen[id(self)] = self

    def stepped(optimizer: Any, *_: Any) -> None:
        if id(optimizer) in seen:
            steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
            if all(steps.get(each, 0) >= STEPS for each in seen):
                raise _Finished

    hook = optimizers.register_optimizer_step_post_hook(stepped)
    optimizers.Optimizer.__init__ = begun  # type: ignore[method-assign]
    try:
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
            torch.profiler.record_function(_TRAINING),
            suppress(_Finished),
        ):
            train()
    finally:
        hook.remove()
        optimizers.Optimizer.__init__ = begin  # type: ignore[method-assign]
    return asdict(peaks(profile.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]


def peaks(tree: list[Any]) -> Peaks:
    """Return what the events of a profile say."""
    main = next(each for each in tree if each.name == _TRAINING).start_tid
    state_bytes = torch.get_rng_state().nbytes
    events = sorted(_events(tree, (), None), key=lambda each: each[0].start_time_ns)
    taken: dict[int, list[Allocation]] = {}
    found: list[tuple[Allocation, int]] = []
    for event, names, operator in events:
        fields = event.extra_fields
        if fields.alloc_size > 0:
            transport = event.start_tid != main or any(name.startswith(("c10d::", "gloo:")) for name in names)
            of_generator = names == (_TRAINING,) and fields.alloc_size == state_bytes
            made = Allocation(
                "other" if transport or of_generator else "tensor",
                " > ".join(names[-3:]),
                fields.alloc_size,
                operator.end_time_ns if operator is not None else 0,
            )
            taken.setdefault(fields.ptr, []).append(made)
            found.append((made, made.size_bytes))
        elif taken.get(fields.ptr):
            made = taken[fields.ptr].pop()
            if made.kind == "tensor" and event.start_time_ns <= made.ends_ns:
                made.kind = "workspace"
            found.append((made, -made.size_bytes))
    return Peaks(
        tensors_bytes=_most(found, {"tensor"})[0],
        with_workspaces_bytes=_most(found, {"tensor", "workspace"})[0],
        all_bytes=_most(found, {"tensor", "workspace", "other"})[0],
        held=_held(found[: _most(found, {"tensor"})[1]]),
    )


def _events(tree: list[Any], names: tuple[str, ...], operator: Any) -> Iterator[tuple[Any, tuple[str, ...], Any]]:
    """Yield the events of the allocator, the names of the operators around each, and the outermost of these that the
    dispatcher has called as one: what does not consist of others before autograd sees it."""
    for event in tree:
        if event.name == "[memory]":
            yield event, names, operator
        else:
            called = operator if operator is not None or not _is_one(event.name) else event
            yield from _events(event.children, (*names, event.name), called)


@cache
def _is_one(name: str) -> bool:
    """Return whether an operator has kernels of its own, instead of calls of others."""
    found = [each for each in _all_operators() if each.partition(".")[0] == name]
    return bool(found) and not all(
        torch._C._dispatch_has_kernel_for_dispatch_key(each, "CompositeImplicitAutograd") for each in found
    )


@cache
def _all_operators() -> tuple[str, ...]:
    return tuple(torch._C._dispatch_get_all_op_names())


def _most(found: list[tuple[Allocation, int]], kinds: set[str]) -> tuple[int, int]:
    """Return the most that these kinds have taken, and the number of events until then."""
    total = most = end = 0
    for index, (made, size_bytes) in enumerate(found, 1):
        if made.kind in kinds:
            total += size_bytes
        if total > most:
            most, end = total, index
    return most, end


def _held(found: list[tuple[Allocation, int]]) -> list[tuple[int, int, str]]:
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for made, size_bytes in found:
        if made.kind == "tensor":
            sizes[made.operators] = sizes.get(made.operators, 0) + size_bytes
            counts[made.operators] = counts.get(made.operators, 0) + (1 if size_bytes > 0 else -1)
    first = sorted(sizes, key=lambda name: -sizes[name])[:MOST_SHOWN]
    return [(sizes[each], counts[each], each) for each in first]
