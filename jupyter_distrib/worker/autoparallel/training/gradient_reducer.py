"""Averages a model's gradients over ranks, with the reducer of torch's own `DistributedDataParallel`.

The user's model is not touched: it is not wrapped, its class and its `state_dict` stay, and no module call costs
anything. A `DistributedDataParallel` object holds the model beside itself and prepares for every backward pass instead
of every forward pass, so the model may be used through any of its methods. It reduces bucket by bucket while
the backward pass goes on, as always.

    backward() begins -> announce: the reducer expects gradients
        gradients come -> the reducer averages full buckets meanwhile
        its last moment -> finish: parameters without a gradient count as zeros, so that every bucket gets full
    backward() is over -> complete: the list of parameters that no rank has used is sent to the host
        the optimizer steps -> resolve: they get no gradient

The list of used parameters travels as the gradient of one more small parameter (`flags`), which shares the last
bucket: it costs no collective of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jupyter_distrib.worker.autoparallel import ownership
from jupyter_distrib.worker.autoparallel.training import weight_sync
from jupyter_distrib.worker.host_copy import HostCopy, is_capturing, sent_to_device
from jupyter_distrib.worker.pytorch import private


class ReducedParameters(nn.Module):
    """Wraps the user's modules and tensors so that `DistributedDataParallel` finds their parameters."""

    def __init__(self, modules: Sequence[nn.Module], loose: Sequence[torch.Tensor], flags: nn.Parameter) -> None:
        super().__init__()
        self._parameters["flags"] = flags
        # Plain tensors, too.
        self._parameters.update({f"loose{i}": tensor for i, tensor in enumerate(loose)})  # type: ignore[misc]
        self.held = nn.ModuleList(modules)

    def forward(self) -> None:
        """Do nothing: the module is never called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnusedParameters:
    """Parameters that this rank has not used in a backward pass, until it is known whether other ranks have."""

    gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]]
    """The parameters by position, each with its previous gradient."""
    anyone: HostCopy
    """The averaged `flags`."""


class GradientReducer:
    """Averages the gradients of some modules' parameters, and of tensors that no module owns.

    Args:
        modules: The modules, which must not share parameters with another reducer.
        loose: Tensors that require a gradient.
        left_alone: Parameters of the modules whose gradients another wrapper reduces.
    """

    def __init__(
        self, modules: Sequence[nn.Module], loose: Sequence[torch.Tensor], left_alone: Iterable[torch.Tensor] = ()
    ) -> None:
        self.modules, self.loose = tuple(modules), tuple(loose)
        self._left_alone = {id(tensor) for tensor in left_alone}
        found = {id(each): each for each in (*self.loose, *(p for module in modules for p in module.parameters()))}
        self.parameters: list[torch.Tensor] = [
            each for key, each in found.items() if key not in self._left_alone and each.is_floating_point()
        ]
        self._ddp: DistributedDataParallel | None = None
        self._trained: Sequence[torch.Tensor] = []
        """Parameters of torch's reducer, in its order; the first is `flags`."""
        self._known: set[int] = set()
        self._before: list[tuple[torch.Tensor, int] | None] = []
        self._used: list[bool] = []
        self._unsure: _UnusedParameters | None = None
        self._has_buffers = any(True for module in modules for _ in module.buffers())
        self._averaged = False
        """Whether gradients have been averaged since the buffers were shared."""

    @property
    def in_training(self) -> bool:
        return bool(self.loose) or any(module.training for module in self.modules)

    def has(self, module: nn.Module) -> bool:
        """Return whether it averages the gradients of all parameters of a module."""
        known = {id(each) for each in self.parameters} | self._left_alone
        return all(id(each) in known for each in module.parameters() if each.is_floating_point())

    def announce(self) -> bool:
        """Prepare for a backward pass. Return False if there is nothing to average."""
        self.resolve()
        some_unknown = len(self._known) < len(self.parameters)  # frozen when the reducer was made
        if some_unknown and any(each.requires_grad and id(each) not in self._known for each in self.parameters):
            self._make()
        if self._ddp is None:
            return False
        self._used = []
        grads = [each.grad for each in self._trained]
        self._before = [None if grad is None else (grad, private.version_of(grad)) for grad in grads]
        reducer = self._ddp.reducer  # the calls of a forward pass, without its other costs
        reducer.prepare_for_forward()
        private.rebuild_buckets(reducer)
        reducer.prepare_for_backward([])
        return True

    def finish(self, on_collective: Callable[[], None]) -> None:
        """Finish averaging, at the end of the backward pass and inside it; calls `on_collective` before waiting for
        other ranks."""
        assert self._ddp is not None
        self._used = [
            grad is not None and (before is None or grad is not before[0] or private.version_of(grad) != before[1])
            for grad, before in zip([each.grad for each in self._trained], self._before, strict=True)
        ]
        if not any(self._used):
            return  # another model's backward pass
        on_collective()
        everything = all(self._used)
        if self._flags.grad is not None and (everything or is_capturing()):
            self._flags.grad.fill_(1.0)
        else:
            flags = torch.tensor(self._used, dtype=self._flags.dtype, device="cpu")
            self._flags.grad = sent_to_device(flags, self._flags.device)
        hook = private.gradient_hook(self._ddp.reducer)
        if not everything:
            for index, used in enumerate(self._used):
                if not used:
                    hook(index + 1)
        hook(0)
        self._averaged = True

    def complete(self) -> bool:
        """Complete the averaging after the backward pass. Return False if the pass belonged to another model."""
        some = any(self._used)
        if some and not all(self._used):
            self._ask_other_ranks()
        self._before = []
        return some

    def _ask_other_ranks(self) -> None:
        """Start finding out whether other ranks have used the parameters that this one has not, whose gradients are
        zeros until then."""
        every = enumerate(zip(self._trained, self._before, self._used, strict=True))
        doubtful = {
            place: (tensor, tensor.grad) for place, (tensor, before, used) in every if not used and before is None
        }
        if not doubtful or is_capturing():
            return
        assert self._flags.grad is not None
        self._unsure = _UnusedParameters(gradients=doubtful, anyone=HostCopy(self._flags.grad))
        if self._unsure.anyone.is_there():
            self.resolve()

    def resolve(self) -> None:
        """Remove the gradients of parameters that no rank has used; called before gradients are read."""
        unsure, self._unsure = self._unsure, None
        if unsure is None:
            return
        anyone = unsure.anyone.read().tolist()
        for place, (tensor, gradient) in unsure.gradients.items():
            if not anyone[place] and tensor.grad is gradient:
                tensor.grad = None

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0. Called after an optimizer step, when no graph needs the old ones."""
        if self._has_buffers and self._averaged:
            weight_sync.copy_from_rank_0([each for module in self.modules for each in module.buffers()])
        self._averaged = False

    def drop(self) -> None:
        """Free torch's reducer, after which a backward pass averages nothing."""
        if self._unsure is not None and self._unsure.anyone.is_there():  # unless the cell was stopped
            self.resolve()
        if self._ddp is not None:
            del self._ddp.reducer, self._ddp.logger  # at once, not when the garbage collector finds the cycle
        self._ddp, self._trained, self._known, self._before, self._unsure = None, [], set(), [], None

    def _make(self) -> None:
        """Create torch's reducer for the parameters that require a gradient now or did before."""
        again = self._known
        self.drop()
        frozen = [each for each in self.parameters if not each.requires_grad and id(each) in again]
        first = next(each for each in self.parameters if each.requires_grad)
        self._flags = nn.Parameter(torch.zeros(0, dtype=first.dtype, device=first.device))
        held = ReducedParameters(self.modules, self.loose, self._flags)
        for each in frozen:
            each.requires_grad_(True)
        try:
            self._trained = [
                each for each in held.parameters() if each.requires_grad and id(each) not in self._left_alone
            ][1:]
            self._flags.data = torch.zeros(len(self._trained), dtype=first.dtype, device=first.device)
            self._ddp = self._wrapped(held)
        finally:
            for each in frozen:
                each.requires_grad_(False)
        self._known = {id(each) for each in self._trained}

    def _wrapped(self, held: ReducedParameters) -> DistributedDataParallel:
        ignored = [name for name, each in held.named_parameters() if id(each) in self._left_alone]
        if ignored:
            private.leave_alone(held, ignored)
        ddp = DistributedDataParallel(held, init_sync=False)
        ownership.holders.update((held, held.held, ddp))
        private.initialise(ddp)
        return ddp


class ReplicaRegistry:
    """The reducers of one run, by their optimizers. A reducer that `prepare` has not requested ends with its
    optimizer."""

    def __init__(self) -> None:
        self._of: dict[ref[Optimizer], list[GradientReducer]] = {}
        self._by_name: list[GradientReducer] = []
        self._all: list[GradientReducer] | None = None
        """Cached result of `all`, which is called in every step."""

    def all(self) -> Sequence[GradientReducer]:
        """Return every reducer once."""
        if self._all is None:
            self._all = list(
                dict.fromkeys([*self._by_name, *(each for reducers in self._of.values() for each in reducers)])
            )
        return self._all

    def of(self, optimizer: Optimizer) -> Sequence[GradientReducer]:
        return self._of.get(ref(optimizer), ())

    def put(self, optimizer: Optimizer, reducers: Sequence[GradientReducer]) -> None:
        self._of[ref(optimizer, self._gone)] = list(reducers)
        self._all = None

    def keep(self, reducers: Sequence[GradientReducer]) -> None:
        """Keep these reducers until the run ends."""
        self._by_name += reducers
        self._all = None

    def replace(self, concerned: Callable[[GradientReducer], bool], by: Sequence[GradientReducer] = ()) -> None:
        """Replace these reducers everywhere, or remove them."""

        def changed(reducers: Sequence[GradientReducer]) -> list[GradientReducer]:
            return list(dict.fromkeys(new for each in reducers for new in (by if concerned(each) else (each,))))

        self._of = {optimizer: changed(reducers) for optimizer, reducers in self._of.items()}
        self._by_name = changed(self._by_name)
        self._all = None

    def clear(self) -> None:
        """Drop all reducers, because the run has ended."""
        for reducer in self.all():
            reducer.drop()
        self._of, self._by_name, self._all = {}, [], None

    def _gone(self, optimizer: ref[Optimizer]) -> None:
        self._of.pop(optimizer, None)
        self._all = None
