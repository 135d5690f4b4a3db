"""Checks whether a cell has trained as intended, and adds a note if not, for instance that the ranks have not trained
together. One object for each run; rank's main thread. No check fails a cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.worker.autoparallel import ownership, source_location
from jupyter_distrib.worker.autoparallel.checks.divergence import DEVICE_ERROR, LossComparison, differs
from jupyter_distrib.worker.autoparallel.checks.manual_training import ManualTraining
from jupyter_distrib.worker.autoparallel.checks.own_updates import OwnUpdates
from jupyter_distrib.worker.autoparallel.checks.states_read import StatesRead
from jupyter_distrib.worker.autoparallel.checks.step_counts import StepCounts
from jupyter_distrib.worker.autoparallel.checks.sum_losses import is_sum_loss
from jupyter_distrib.worker.autoparallel.data.loaders import Loaders
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch import private, process_group, randomness

LOOKS = 20
"""Number of backward passes after which losses are no longer compared."""
_DECIDE_TOGETHER = (
    "each rank has decided that by its own share of the data. Take the mean over ranks of the number that decides, by "
    "torch.distributed.all_reduce()"
)
_DRAW_TOGETHER = (
    "each rank has drawn it at random, or chosen it by its own results. Draw it from a generator with a fixed seed, "
    "such as random.Random(0), or take that of rank 0 by torch.distributed.broadcast_object_list()"
)
END_WAIT_S = 1.0
"""Maximum seconds that the end of a cell waits for the first losses from the device."""


class DistributorState(Protocol):
    """The part of a `ModelDistributor` that the checks need."""

    @property
    def active(self) -> bool: ...
    @property
    def models(self) -> Sequence[nn.Module]: ...


class TrainingChecks:
    """The checks of one run.

    Args:
        run: The run.
        distributor: Which models are spread over the ranks.
        loaders: Its data loaders.
        manages_ranks: Returns whether the cell manages its ranks itself.
        sees_a_share: Whether every rank is to train with data of its own.
        keep: Called with tensors that are trained, which may have no owner at the end of the cell.
    """

    def __init__(
        self,
        run: StrategyRun,
        distributor: DistributorState,
        loaders: Loaders,
        *,
        manages_ranks: Callable[[], bool],
        sees_a_share: bool,
        keep: Callable[..., None],
    ) -> None:
        self._run, self._distributor, self._loaders = run, distributor, loaders
        self._manages_ranks, self._sees_a_share = manages_ranks, sees_a_share
        self._losses = LossComparison()
        self._manual_training = ManualTraining()
        self._own_updates = OwnUpdates(keep)
        self._steps, self._states = StepCounts(), StatesRead()
        self._patches = Patches()
        self._shards = False
        """Whether an optimizer with sharded parameters has stepped."""
        self._alone = False
        """Whether a backward pass has run that involved no model of the distributor."""
        self._together = False
        """Whether a backward pass has run that involved a model of the distributor."""
        self._fed: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped with a gradient, or have been noted for stepping without one."""
        self._trained: list[ref[torch.Tensor]] = []
        """The parameters of these optimizers, which may be gone by the end of the cell."""
        self._old_gradients: list[tuple[ref[torch.Tensor], ref[torch.Tensor], int]] = []
        """Tensors that had a gradient before the first backward pass without a distributed model (kept ones, and
        leftovers of earlier cells), with the gradient and its version."""
        self._versions: list[tuple[ref[torch.Tensor], int]] = []
        """Tensors with a gradient after the first backward pass without a distributed model, with their versions
        then."""
        self._divides = False
        """Whether a loader was divided before the first backward pass."""
        self._loop = ""
        """The loop around that pass, if no loader was divided before it."""
        self._met_before = -1
        """Number of collectives before the cell."""

    def begin(self, patches: Patches) -> None:
        """Start the checks, before the cell, during which they may replace functions."""
        self._patches = patches
        self._met_before = process_group.current.sequence()

    def before_backward(self, losses: Sequence[torch.Tensor]) -> None:
        """Check the losses from which a backward pass starts."""
        if self._loaders.backwards == 1:
            self._divides = self._loaders.divides
        if self._loaders.backwards == 1 and not self._divides:
            self._loop = source_location.current_loop(self._run.filename)
        if self._loaders.backwards == 1 and not self._distributor.active:
            self._old_gradients = [
                (ref(each), ref(each.grad), private.version_of(each.grad))
                for each in _watchable(_with_gradient(ownership.present(nn.Module)))
                if each.grad is not None
            ]
        if self._loaders.backwards <= LOOKS:
            self._compared(lambda: self._losses.before(losses))
        if not self._distributor.active:
            self._compared(lambda: self._manual_training.check_gradient(losses))
        else:
            self._compared(lambda: self._own_updates.record_leaves(losses, self._of_models()))
        self._note_if_summed(losses)

    def before_grad(self, losses: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Check the gradient that `torch.autograd.grad` is about to compute, also for `torch.func.grad`."""
        if not self._distributor.active:
            with suppress(RuntimeError):  # no value can be read inside some transformations, such as vmap
                self._manual_training.check_gradient(losses, inputs)

    def after_backward(self, reached: bool) -> None:
        """Record that a backward pass has ended.

        Args:
            reached: Whether it involved a model that is spread over the ranks.
        """
        self._together = self._together or reached
        if not reached and not self._alone:
            self._alone = True
            self._versions = [(ref(each), private.version_of(each)) for each in _watchable(self._with_new_gradient())]
        if self._loaders.backwards <= LOOKS:
            self._compared(self._note_if_same_losses)

    def stepped(self, optimizer: Optimizer, *, is_known: bool) -> None:
        """Record that an optimizer has stepped.

        Args:
            optimizer: The optimizer.
            is_known: Whether its model was searched for.
        """
        if is_known:
            self._steps.add(optimizer)
        if self._shards:
            self._states.step(self._patches)
        if optimizer in self._fed:
            return
        if not self._shards and any(map(ownership.is_sharded, ownership.parameters_of(optimizer))):
            self._shards = True
            self._states.step(self._patches)
        hungry = all(each.grad is None for each in ownership.parameters_of(optimizer))
        if hungry and self._alone and is_known:
            line = _at(source_location.current_line(self._run.filename))
            self._run.note(
                f"{type(optimizer).__name__} has stepped{line} without a gradient: "
                "backward() has computed gradients of parameters other than its own. Build it from the parameters of "
                "the model that is trained"
            )
        if self._alone or not hungry:
            self._fed.add(optimizer)
            self._trained += map(ref, _watchable(ownership.parameters_of(optimizer)))

    def end(self) -> None:
        """Add a note if the ranks have not trained together; called when the cell has ended well, which this keeps."""
        self._compared(self._note_if_same_losses, END_WAIT_S)
        self._compared(self._note_if_other_weights)

    def _compared(self, comparison: Callable[..., None], *args: float) -> None:
        """Run a comparison, whose failure does not fail the cell."""
        try:
            comparison(*args)
        except DEVICE_ERROR:
            raise
        except dist.DistError:  # of the store: the run is being stopped, or another rank has left
            pass
        except Exception as error:  # noqa: BLE001 - such as full memory
            reason = str(error).partition("\n")[0]
            self._run.note(f"could not check whether the ranks have trained together: {type(error).__name__}: {reason}")

    def _note_if_other_weights(self) -> None:
        trained = self._found_trained()
        if trained and not self._run.everyone:
            return self._run.note("trained on some of the ranks only, so nothing was averaged over ranks")
        self._manual_training.check_last_gradient()
        board = process_group.current.board()
        if not (trained or self._shards or self._manual_training.found) or board is None or identity.world_size() == 1:
            return
        place = board, identity.rank(), identity.world_size()
        uneven = self._steps.difference(*place) if self._together else None
        own_choice = f"{uneven.text}: {_DRAW_TOGETHER if uneven.from_first else _DECIDE_TOGETHER}" if uneven else ""
        apart = differs(*place, [*trained, *self._others_of_models(trained)]) if trained else None
        alone = not self._together and self._has_not_met()
        if alone and self._manual_training.found and (same := self._manual_training.are_the_same(*place)) is not None:
            apart = bool(apart) or not same
        if apart:
            self._run.note(f"the ranks have trained different weights: {own_choice or self._why_apart}")
        elif uneven and self._shards:
            self._run.note(f"the ranks have trained their parts of the model differently: {own_choice}")
        elif uneven and uneven.from_first:
            self._run.note(f"the ranks have trained an earlier model differently: {own_choice}")
        elif self._shards and (states := self._states.difference(*place)):
            self._run.note(f"{states}: {_DECIDE_TOGETHER}")
        elif self._together and (own := self._own_updates.apart(*place, trained)) is not None:
            self._run.note(
                f"the ranks have trained different values of {self._named(own)}: no optimizer of torch.optim trains "
                "it, so its gradients were not averaged. Use one, or average its .grad by "
                "torch.distributed.all_reduce()"
            )
        elif apart is False and alone and (self._manual_training.found or self._was_changed()):
            self._run.note(f"each rank has trained by itself, all of them identically: {self._why_apart}")

    def _note_if_same_losses(self, wait_s: float = 0.0) -> None:
        self._losses.publish(wait_s)
        shares = self._divides or self._loaders.read_early  # the latter has a note of its own
        if self._together and self._sees_a_share and not shares and (same := self._losses.are_the_same()):
            whole = f": each reads all of {self._loop}" if self._loop else ""
            drawn = ""
            cause, calls = randomness.same_draws()
            if cause and not whole:
                drawn = (
                    f". Batches that are drawn at random are the same because of {cause}: call {calls} once the model "
                    "is made"
                )
            self._run.note(
                f"{same} are the same on all ranks, so they train with the same batches and are no "
                f"faster than one{whole}. Read the data from a DataLoader, which is divided, or have each rank take a "
                f"share by itself (data[rank::world_size]){drawn}"
            )

    def _note_if_summed(self, losses: Sequence[torch.Tensor]) -> None:
        """Add a note if a loss is a sum over a batch that `--batch global` has split over the ranks."""
        if self._run.options.get("batch") == "global" and self._loaders.backwards == 1 and self._loaders.divides:
            size = identity.world_size()
            if any(is_sum_loss(each, samples=self._loaders.share_of_batch, ranks=size) for each in losses):
                self._run.note(
                    f"the loss is a sum over the batch, of which each rank has 1/{size} with --batch global, and "
                    f"gradients are averaged over ranks: they are 1/{size} of those of one device. Take "
                    "reduction='mean', or multiply the loss by world_size"
                )

    def _found_trained(self) -> list[torch.Tensor]:
        """Return the tensors that are known to have been trained in this run, distributed or not."""
        tensors = [each for weak in self._trained if (each := weak()) is not None]
        if self._alone:
            tensors += self._with_new_gradient()
        return list({id(each): each for each in tensors if not ownership.is_sharded(each)}.values())

    def _others_of_models(self, trained: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the other parameters of the distributed models, which a forward pass may have changed or replaced."""
        known = {id(each) for each in trained}
        others = {id(each): each for model in self._distributor.models for each in model.parameters()}
        return [each for key, each in others.items() if key not in known and not ownership.is_sharded(each)]

    def _named(self, tensor: torch.Tensor) -> str:
        """Return a tensor's name in the cell, as a variable or a parameter of a module; if it has none, its shape."""
        values = list(self._run.names.items())
        modules = [(key, each) for key, each in values if isinstance(each, nn.Module)]
        inside = (f"`{key}.{name}`" for key, each in modules for name, p in each.named_parameters() if p is tensor)
        alone = (f"`{key}`" for key, each in values if each is tensor)
        return next(itertools.chain(inside, alone), f"a tensor of shape {tuple(tensor.shape)}")

    def _of_models(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of the distributed models, also the whole ones that FSDP has gathered."""
        for model in self._distributor.models:
            yield from model.parameters()
            yield from private.gathered_parameters(model)

    def _with_new_gradient(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients were computed in this run."""
        unchanged = set()
        for weak, weak_gradient, version in self._old_gradients:
            tensor, gradient = weak(), weak_gradient()
            if tensor is not None and gradient is not None and tensor.grad is gradient:
                unchanged |= {id(tensor)} if private.version_of(gradient) == version else set()
        return [each for each in _with_gradient(ownership.alive(nn.Module)) if id(each) not in unchanged]

    def _was_changed(self) -> bool:
        """Return whether any tensor was modified after a backward pass, by an optimizer or by the cell's own code."""
        outside_changes = ((weak(), version) for weak, version in self._versions)
        return bool(self._trained) or any(
            each is not None and private.version_of(each) != old for each, old in outside_changes
        )

    def _has_not_met(self) -> bool:
        """Return whether this cell has called no collective, and so cannot have averaged anything itself."""
        return process_group.current.automatic and process_group.current.sequence() == self._met_before

    def _replaced(self) -> str:
        """Return the name of a parameter that a distributed model got later and that no optimizer trains."""
        known = {id(each) for weak in self._trained if (each := weak()) is not None}
        known |= {id(each) for each in self._of_models() if ownership.is_sharded(each)}
        return next(
            (
                name
                for model in self._distributor.models
                for name, each in model.named_parameters()
                if each.requires_grad and id(each) not in known
            ),
            "",
        )

    @property
    def _why_apart(self) -> str:
        """Possible reason why gradients were not averaged, for ranks that end with different weights."""
        if self._manages_ranks():
            return (
                "this cell calls init_process_group, so it was left as it is. Wrap its model in "
                "DistributedDataParallel, or leave out the call"
            )
        if self._distributor.active:
            others = "they were changed by something other than the gradients of backward() and a step of the optimizer"
            if replaced := self._replaced():
                return (
                    f"{others}. `{replaced}` is a parameter that the code has put into the model meanwhile: if it is "
                    "computed from a batch, add up what it is computed from with torch.distributed.all_reduce()"
                )
            return (
                f"{others}, such as load_state_dict() of the weights that each rank had found the best by its own loss"
            )
        return (
            "gradients were not averaged, since no torch.optim optimizer was found for them. Use one, or give the "
            "model to jupyter_distrib.prepare()"
        )


class NoChecks(TrainingChecks):
    """The checks of a dry run, whose tensors have no values to compare."""

    def begin(self, patches: Patches) -> None: ...
    def before_backward(self, losses: Sequence[torch.Tensor]) -> None: ...
    def before_grad(self, losses: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None: ...
    def after_backward(self, reached: bool) -> None: ...
    def stepped(self, optimizer: Optimizer, *, is_known: bool) -> None: ...
    def end(self) -> None: ...


def _with_gradient(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return [each for module in modules for each in ownership.own_parameters(module) if each.grad is not None]


def _watchable(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that may be weakly referenced: `Module.to` swaps others, and fails if there is a reference."""
    if not torch.__future__.get_swap_module_params_on_conversion():
        yield from (each for each in tensors if type(each) in (torch.Tensor, nn.Parameter))


def _at(place: str) -> str:
    return f" on {place}" if place else ""
