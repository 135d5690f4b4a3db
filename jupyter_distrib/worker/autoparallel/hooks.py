"""The moments of an unchanged cell at which something has to be done, for one run. Runs in the rank's main thread.

    an optimizer is built      its model is spread over the ranks      Spread.adopt
    backward()                                                         Spread.backward
    a data loader is read      divided among the ranks, or whole       Loaders
    an optimizer has stepped                                           Spread.stepped

A strategy says what it means to spread a model, as a `Spread`; when that has to happen is found out here. Optimizers
that are there already when the cell begins, since the cell has captured them or they were kept, are found by the
garbage collector before the first batch is read or the first gradient computed.

Left alone is all that knows of ranks by itself: a cell that calls `init_process_group`, models that
`DistributedDataParallel` or FSDP hold, a data loader with a sampler of a framework's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker import by_hand, identity
from jupyter_distrib.worker.autoparallel import guesses, loss_reduction, ownership, source_location, weight_sync
from jupyter_distrib.worker.autoparallel.divergence import DEVICE_ERROR, LOSSES, LossComparison, differs
from jupyter_distrib.worker.autoparallel.gradient_reducer import ReducedParameters
from jupyter_distrib.worker.autoparallel.loaders import Loaders
from jupyter_distrib.worker.autoparallel.loss_averaging import LossAveraging
from jupyter_distrib.worker.autoparallel.own_device import OwnDevice, misplaced
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch import private, process_group
from jupyter_distrib.worker.strategy import StrategyRun

LOOKS = 20
"""Backward passes after which nobody looks at the losses any more."""
END_WAIT_S = 1.0
"""How long the end of a cell waits for the first losses, if its device is that far behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraining:
    """What one optimizer trains."""

    optimizer: Optimizer
    roots: tuple[nn.Module, ...]
    """The outermost modules that own its parameters."""
    loose: tuple[torch.Tensor, ...]
    """Those of its parameters that no module owns."""
    left_alone: tuple[torch.Tensor, ...]
    """Parameters of the roots that somebody else looks after already."""
    place: str
    """Where the optimizer was built: `line 12`; empty if that was before the cell."""
    fresh: bool
    """Built by the cell just now, by all ranks together, so a collective can be used."""


class Spread(Protocol):
    """What a strategy does with a model."""

    @property
    def active(self) -> bool:
        """Whether it has anything to look after."""

    @property
    def in_training(self) -> bool:
        """Whether any of its models is in training mode."""

    def adopt(self, training: OptimizerTraining) -> None:
        """An optimizer is there: spread its model, and give the optimizer the parameters that it has then."""

    def recognise(self, optimizer: Optimizer) -> None:
        """An optimizer is there that has nothing to spread: its parameters are sharded already."""

    def yield_to(self, module: nn.Module) -> None:
        """Somebody else begins to look after this module."""

    def backward(self, run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        """Have `run` compute the gradients of these tensors; False if none of them was of a model that it spreads."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has changed its parameters."""


class TrainingHooks:
    """Watches one run; `begin` and `end` are called around the cell.

    Args:
        sees_a_share: Every rank is to train with other data than the others.
    """

    def __init__(self, run: StrategyRun, spread: Spread, loaders: Loaders, *, sees_a_share: bool = True) -> None:
        self._run, self._spread, self._loaders, self._sees_a_share = run, spread, loaders, sees_a_share
        self._patches = Patches()
        self._guesses = guesses.made(run.options)
        self.own_device = OwnDevice(identity.device(), run.note, applies="first-device" in self._guesses)
        self._decisions = LossAveraging(lambda: spread.active and not self.by_hand, loaders.meets)
        self._known: WeakSet[Optimizer] = WeakSet()
        self._undo: Callable[[], None] = lambda: None
        self._looked = False
        self._alone = False
        """A backward pass has run for which the spread had nothing to do."""
        self._fed: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped with a gradient, or of which it was said that they never do."""
        self._trained: list[ref[torch.Tensor]] = []
        """Their parameters; the optimizers themselves may be gone by the end."""
        self._together = False
        """A backward pass has run that the spread has reached."""
        self._versions: list[tuple[ref[torch.Tensor], int]] = []
        """What the first backward pass that it has not reached has given a gradient, as it was then."""
        self._losses = LossComparison()
        self._met_before = -1
        """How many collectives there had been before the cell."""
        self._busy = False
        """Inside a moment that was noticed: what happens in it is ours, or a part of it."""

    def begin(self) -> None:
        self.own_device.begin(self._run.names, self._patches)
        replace = self._patches.replace
        replace(Optimizer, "__init__", self._building)
        replace(Optimizer, "add_param_group", self._adding)
        replace(Optimizer, "__setstate__", self._restoring)
        replace(torch.autograd, "backward", self._going_backward)
        replace(DistributedDataParallel, "__init__", self._wrapping)
        self._loaders.install(self._patches, self.look_around)
        self._decisions.install(self._patches)
        stepped = register_optimizer_step_post_hook(self._stepped)
        self._undo = stepped.remove
        self._met_before = process_group.current.sequence()

    def end(self) -> None:
        self._patches.undo()
        self._undo()
        self._decisions.close()
        self._loaders.close()

    @property
    def by_hand(self) -> bool:
        """Whether this cell looks after its ranks itself, or runs on some of them only."""
        return process_group.current.asked or not self._run.everyone

    def look_around(self) -> None:
        """Find the optimizers that were there before the cell; called before anything depends on them."""
        if self._looked or self.by_hand or "old-optimizers" not in self._guesses:
            return
        self._looked = True
        new = [each for each in ownership.alive(Optimizer) if each not in self._known and hasattr(each, "param_groups")]
        for optimizer in ownership.within_reach(new, vars(sys.modules["__main__"])):
            self.adopt(optimizer, fresh=False)

    def adopt(self, optimizer: Optimizer, *, fresh: bool) -> None:
        """Have an optimizer's model spread over the ranks, unless somebody else looks after it."""
        self._known.add(optimizer)
        mine = [each for each in ownership.parameters_of(optimizer) if each.requires_grad]
        others = _in_other_hands()
        mine = [each for each in mine if id(each) not in others and not is_sharded(each)]
        if not mine:
            return self._spread.recognise(optimizer)
        owners = ownership.owners_of(mine)
        self._check_device(mine, ownership.named(owners.roots) or type(optimizer).__name__)
        self._spread.adopt(
            OptimizerTraining(
                optimizer=optimizer,
                roots=owners.roots,
                loose=owners.loose,
                left_alone=tuple(each for root in owners.roots for each in root.parameters() if id(each) in others),
                place=source_location.here(self._run.filename) if fresh else "",
                fresh=fresh,
            )
        )

    def _check_device(self, trained: Sequence[torch.Tensor], name: str) -> None:
        own = identity.device()
        if (stray := misplaced(trained, own)) is not None:
            raise DistributedError(
                f"{name} is on {stray.device}, and this rank trains on {own}: move it to `device`, which is the own "
                "device of each rank."
            )

    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values summed over ranks if each reads a share of what it evaluates, else as they are."""
        if self._loaders.shard_eval and self._run.everyone:
            return weight_sync.summed(values)
        if self._loaders.read_last == "divided":
            self._run.note(
                "total() has given every rank its own numbers back: the loader read last was divided for training, and "
                "without --shard-eval only evaluations are added up, each rank having read all of one"
            )
        return values

    def tell_if_apart(self) -> None:
        """Say so if the ranks have not trained together; called when the cell has ended well, which it stays."""
        self._compared(self._tell_if_same_losses, END_WAIT_S)
        self._compared(self._tell_if_other_weights)

    def _compared(self, comparison: Callable[..., None], *args: float) -> None:
        """Make a comparison, whose own failure is no failure of the cell."""
        try:
            comparison(*args)
        except DEVICE_ERROR:
            raise
        except Exception as error:  # noqa: BLE001 - memory that is full, a store that is gone
            reason = str(error).partition("\n")[0]
            self._run.note(
                f"whether the ranks have trained together could not be found out: {type(error).__name__}: {reason}"
            )

    def _tell_if_other_weights(self) -> None:
        trained = self._found_trained()
        if trained and not self._run.everyone:
            return self._run.note("trained on some of the ranks only, so nothing was averaged over ranks")
        board = process_group.current.board()
        if not trained or board is None or identity.world_size() == 1:
            return
        if differs(board, identity.rank(), identity.world_size(), trained):
            self._run.note(f"the ranks have trained different weights: {self._why_apart}")
        elif not self._together and self._was_changed() and self._has_not_met():
            self._run.note(f"each rank has trained for itself, all of them the same: {self._why_apart}")

    def _tell_if_same_losses(self, wait_s: float = 0.0) -> None:
        self._losses.publish(wait_s)
        if self._together and self._sees_a_share and not self._loaders.divides and self._losses.are_the_same():
            self._run.note(
                f"the first {LOSSES} losses are the same on all ranks, so they train with the same batches and are no "
                "faster than one: read the data from a DataLoader, which is divided, or have each rank take a share by "
                "itself (data[rank::world_size])"
            )

    def _tell_if_summed(self, losses: Sequence[torch.Tensor]) -> None:
        """Say so if a loss is a sum over a batch that `--batch global` has split over the ranks."""
        if self._run.options.get("batch") == "global" and self._loaders.backwards == 1 and self._loaders.divides:
            size = identity.world_size()
            if any(map(loss_reduction.is_sum, losses)):
                self._run.note(
                    f"the loss is a sum over the batch, of which each rank has 1/{size} with --batch global, and "
                    f"gradients are averaged over ranks: they are 1/{size} of those of one device. Take "
                    "reduction='mean', or multiply the loss by world_size"
                )

    def _found_trained(self) -> list[torch.Tensor]:
        """What was trained in this run as far as it can be known, ours or not."""
        found = [each for weak in self._trained if (each := weak()) is not None]
        if self._alone:
            found += _with_gradient()
        return list({id(each): each for each in found if not is_sharded(each)}.values())

    def _was_changed(self) -> bool:
        """By an optimizer, or by hand behind a backward pass."""
        by_hand = ((weak(), version) for weak, version in self._versions)
        return bool(self._trained) or any(each is not None and private.version_of(each) != old for each, old in by_hand)

    def _has_not_met(self) -> bool:
        """This cell has called no collective, so it cannot have averaged anything by itself."""
        return process_group.current.automatic and process_group.current.sequence() == self._met_before

    @property
    def _why_apart(self) -> str:
        """For ranks that end with different weights, what may have kept gradients from being averaged."""
        if self.by_hand:
            return (
                "this cell calls init_process_group, so it was left as it is. Wrap its model in "
                "DistributedDataParallel, or leave out the call"
            )
        if self._spread.active:
            return "they were changed in another way than by the gradients of backward() and a step of the optimizer"
        return (
            "gradients were not averaged, since no torch.optim optimizer was found for them. Use one, or give the "
            "model to jupyter_distrib.prepare()"
        )

    # ------------------------------------------------------------------------------------------------ moments

    def _building(self, original: Any) -> Any:
        def __init__(optimizer: Optimizer, *args: Any, **keywords: Any) -> None:  # noqa: N807
            original(optimizer, *args, **keywords)
            self._noticed(optimizer)

        return __init__

    def _adding(self, original: Any) -> Any:
        def add_param_group(optimizer: Optimizer, *args: Any, **keywords: Any) -> None:
            original(optimizer, *args, **keywords)
            if optimizer in self._known:  # else it is being built
                self._noticed(optimizer)

        return add_param_group

    def _noticed(self, optimizer: Optimizer) -> None:
        if self._busy or self.by_hand:
            return
        self._busy = True
        try:
            self.adopt(optimizer, fresh=True)
        finally:
            self._busy = False

    def _restoring(self, original: Any) -> Any:
        def __setstate__(optimizer: Optimizer, state: dict[str, Any]) -> None:  # noqa: N807
            original(optimizer, state)
            self._looked = False  # unpickled, or copied: its model is complete a moment later

        return __setstate__

    def _going_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **keywords: Any) -> None:
            def run() -> None:
                original(tensors, *args, **keywords)

            if self._busy or self.by_hand:  # a backward pass inside another one belongs to that
                return run()
            self._busy = True
            try:
                self.look_around()
                self._loaders.goes_backward()
                some = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
                if self._loaders.backwards <= LOOKS:
                    self._compared(lambda: self._losses.before(some))
                self._tell_if_summed(some)
                reached = self._spread.backward(run, some)
                self._together = self._together or reached
                if not reached and not self._alone:
                    self._alone = True
                    self._versions = [(ref(each), private.version_of(each)) for each in _with_gradient()]
                if self._loaders.backwards <= LOOKS:
                    self._compared(self._tell_if_same_losses)
            finally:
                self._busy = False

        return backward

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        self._spread.stepped(optimizer)
        if optimizer in self._fed:
            return
        hungry = all(each.grad is None for each in ownership.parameters_of(optimizer))
        if hungry and self._alone and optimizer in self._known:
            line = _at(source_location.here(self._run.filename))
            self._run.note(
                f"{type(optimizer).__name__} has stepped{line} without a gradient: "
                "backward() has computed those of other parameters than its own. Build it from the parameters of the "
                "model that is trained"
            )
        if self._alone or not hungry:
            self._fed.add(optimizer)
            self._trained += map(ref, ownership.parameters_of(optimizer))

    def _wrapping(self, original: Any) -> Any:
        def __init__(wrapper: DistributedDataParallel, module: nn.Module, *args: Any, **keywords: Any) -> None:  # noqa: N807
            if not isinstance(module, ReducedParameters):
                self._spread.yield_to(module)
            original(wrapper, module, *args, **keywords)

        return __init__


def _with_gradient() -> list[torch.Tensor]:
    return [each for module in ownership.alive(nn.Module) for each in module.parameters() if each.grad is not None]


def _at(place: str) -> str:
    return f" on {place}" if place else ""


def _in_other_hands() -> dict[int, torch.Tensor]:
    """Parameters of models that the user, or a framework, has wrapped."""
    wrappers = [module for module in ownership.alive(nn.Module) if _is_wrapper(module)]
    return {id(each): each for wrapper in wrappers for each in wrapper.parameters()}


def _is_wrapper(module: nn.Module) -> bool:
    return by_hand.wraps_model(module) and not isinstance(getattr(module, "module", None), ReducedParameters)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Of `fully_shard`, or spread by a plan for tensor parallelism."""
    loaded = sys.modules.get("torch.distributed.tensor")  # a second of imports, if nobody has used it
    return loaded is not None and isinstance(tensor, loaded.DTensor)
