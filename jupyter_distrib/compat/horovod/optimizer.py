"""Horovod's `DistributedOptimizer`: gradients are averaged over the ranks before a step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from jupyter_distrib.compat.horovod.collectives import (
    Average,
    Compression,
    allreduce_async,
    chosen_op,
    sparse_allreduce_async,
    synchronize,
)
from jupyter_distrib.compat.horovod.context import ProcessSet, global_process_set
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import TrainingStrategy

ROUND_BYTES = 8 << 20
"""Size of pending gradients from which a round starts during the backward pass."""


class GradientAverager:
    """Averages the gradients of one optimizer over the ranks."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        op: str,
        process_set: ProcessSet,
        *,
        compression: Any,
        passes: int,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self._names, self._compression, self._op = names, compression, op
        self._scales = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._set, self._sparse_as_dense = process_set, sparse_as_dense
        self.passes = passes
        self._left = dict.fromkeys(names, passes)
        self.handles: dict[torch.Tensor, tuple[Any, Any]] = {}
        self.is_synchronized = False
        self.synchronizes = True
        for each in names:
            each.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Issue the reduction of a gradient once it is complete; called in the backward pass."""
        if parameter in self.handles or self._left[parameter] <= 0:
            raise AssertionError(
                "loss.backward() has run more often than backward_passes_per_step since the last step(): call "
                "step() in between, or raise backward_passes_per_step."
            )
        self._left[parameter] -= 1
        if not self._left[parameter]:
            self._issue(parameter)
            negotiation = self._set.negotiating()
            if negotiation.new_bytes() >= ROUND_BYTES:
                negotiation.progress(wait=False)

    def _issue(self, parameter: torch.Tensor) -> None:
        name = self._names[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse and self._sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
        if parameter.grad.is_sparse:
            self.handles[parameter] = sparse_allreduce_async(parameter.grad, name, self._op, self._set), None
            return
        sent, context = self._compression.compress(parameter.grad)
        handle = allreduce_async(sent, None, f"gradient.{name}", self._op, *self._scales, self._set)
        self.handles[parameter] = handle, context

    def synchronize(self) -> None:
        """Wait for all gradients; missing gradients of this rank count as zeros."""
        for each in self._names:
            if each not in self.handles:
                self._issue(each)
        for parameter, (handle, context) in self.handles.items():
            result = synchronize(handle)
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                parameter.grad = result
            else:
                parameter.grad.copy_(self._compression.decompress(result, context))
        self.reset()
        self.is_synchronized = True

    def reset(self) -> None:
        self.handles.clear()
        self._left = dict.fromkeys(self._names, self.passes)


class AveragingOptimizer(Optimizer):
    """Mixin that `DistributedOptimizer` puts before the class of an optimizer."""

    averager: GradientAverager

    def synchronize(self) -> None:
        """Wait until the gradients are averaged over all ranks, for instance before clipping them."""
        self.averager.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, because `synchronize` has been called."""
        self.averager.synchronizes = False
        try:
            yield
        finally:
            self.averager.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes a step has from now on."""
        self.averager.passes = passes
        self.averager.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.averager.synchronizes:
            if self.averager.is_synchronized:
                warnings.warn(
                    "optimizer.step() was called after optimizer.synchronize() and reduces the gradients again: put "
                    "it into `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.averager.synchronize()
        self.averager.is_synchronized = False
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.averager.handles:
            raise AssertionError(
                "optimizer.zero_grad() would clear gradients that are still being reduced: call optimizer.step() or "
                "optimizer.synchronize() before it."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        self.averager.reset()
        super().load_state_dict(state_dict)


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's own name and signature
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class and with the same state that steps by the ranks' gradients.

    Gradients are fused by size alone, so `num_groups` and `groups` have no effect.

    Raises:
        ValueError: Names are missing or duplicate, factors do not fit the operation, or the cell has a training
            strategy.
        NotImplementedError: The operation is Adasum.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average only")
    if isinstance(backward_passes_per_step, bool) or backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step has to be 1 or more; got {backward_passes_per_step!r}")
    if isinstance(identity.cell.strategy, TrainingStrategy):
        raise ValueError(
            "hvd.DistributedOptimizer reduces gradients itself, and the cell's strategy does so, too: run the cell "
            "with --strategy none"
        )
    process_set.negotiating()
    averager = GradientAverager(
        _names(optimizer, named_parameters),
        chosen_op(None, op),
        process_set,
        compression=compression,
        passes=backward_passes_per_step,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )
    kind: Any = type(type(optimizer).__name__, (AveragingOptimizer, type(optimizer)), {})
    made = kind.__new__(kind)
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.averager = averager
    return made


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the optimizer's parameters that are trained, with their names."""
    own = [each for group in optimizer.param_groups for each in group["params"]]
    if named_parameters is None:
        pairs: list[Any] = [(f"{number}", each) for number, each in enumerate(own)]
    else:
        pairs = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise ValueError("named_parameters has to be a sequence of tuples (name, parameter): model.named_parameters()")
    if twice := [name for name, many in Counter(name for name, _ in pairs).items() if many > 1]:
        raise ValueError(f"names in named_parameters have to be unique; there twice: {', '.join(sorted(twice))}")
    by_parameter = {each: name for name, each in pairs}
    if missing := sum(each not in by_parameter for each in own):
        raise ValueError(
            f"named_parameters has no name for {missing} of the optimizer's {len(own)} parameters: give the names of "
            f"all, model.named_parameters()"
        )
    return {each: by_parameter[each] for each in own if each.requires_grad}
