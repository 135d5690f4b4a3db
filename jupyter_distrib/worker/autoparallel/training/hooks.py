"""The hooks into an unchanged cell at the moments when a strategy acts, for one run. Runs in the rank's main thread.

    an optimizer is built      its model is spread over the ranks      ModelDistributor.adopt
    backward()                                                         ModelDistributor.backward
    a data loader is read      divided among the ranks, or whole       Loaders
    an optimizer has stepped                                           ModelDistributor.stepped
    a loss decides what follows  averaged over the ranks               LossAveraging

A strategy defines how to distribute a model, as a `ModelDistributor`; this module finds the moment for it. Optimizers
that already exist when the cell begins, because they were captured or kept, are found through the garbage collector
before the first batch is read or the first gradient computed.

Code that manages its ranks itself is left unchanged: a cell that calls `init_process_group`, models that
`DistributedDataParallel` or FSDP hold, a data loader with a sampler of a framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity, manual_parallelism
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.serialization import payload
from jupyter_distrib.worker.autoparallel import heuristics, object_collectives, ownership, source_location
from jupyter_distrib.worker.autoparallel.checks.last_trained import LastTrained
from jupyter_distrib.worker.autoparallel.checks.manual_rates import ManualRates
from jupyter_distrib.worker.autoparallel.checks.notebook_models import NotebookModels
from jupyter_distrib.worker.autoparallel.checks.schedules import Schedules
from jupyter_distrib.worker.autoparallel.checks.training_checks import NoChecks, TrainingChecks
from jupyter_distrib.worker.autoparallel.data.loaders import Loaders
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.autoparallel.training import weight_sync
from jupyter_distrib.worker.autoparallel.training.device_remapping import DeviceRemapping, misplaced
from jupyter_distrib.worker.autoparallel.training.gradient_reducer import ReducedParameters
from jupyter_distrib.worker.pytorch import process_group, randomness


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraining:
    """The models and tensors trained by one optimizer."""

    optimizer: Optimizer
    roots: tuple[nn.Module, ...]
    """Outermost modules that own its parameters."""
    loose: tuple[torch.Tensor, ...]
    """Its parameters that no module owns."""
    left_alone: tuple[torch.Tensor, ...]
    """The parameters of the roots whose gradients another wrapper reduces already."""
    place: str
    """The place where the optimizer was built: `line 12`; empty if that was before the cell."""
    fresh: bool
    """Whether all ranks have just built it together, so that a collective can be used."""


class ModelDistributor(Protocol):
    """The interface by which a strategy distributes models over the ranks."""

    @property
    def active(self) -> bool:
        """Return whether any model has been distributed."""

    @property
    def in_training(self) -> bool:
        """Return whether any of its models is in training mode."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """Return the models that are distributed."""

    def adopt(self, training: OptimizerTraining) -> None:
        """Distribute the model of an optimizer, and give the optimizer the model's new parameters."""

    def expect(self, modules: Sequence[nn.Module]) -> None:
        """Prepare for models that are adopted at their first gradient, since they have parameters without a shape until
        they are called. Raises `DistributedError` if the strategy cannot wait."""

    def recognise(self, optimizer: Optimizer) -> None:
        """Record an optimizer whose parameters are already sharded."""

    def yield_to(self, module: nn.Module) -> None:
        """Leave this module to another wrapper that takes it over."""

    def backward(self, run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        """Call `run`, which computes gradients from these tensors. Return False if no distributed model was
        involved."""

    def check_second_derivative(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise `DistributedError` if the graph behind these tensors, of which gradients are about to be computed with
        `create_graph=True`, has parameters that are freed after a backward pass."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Complete the step of an optimizer that has changed its parameters."""


class TrainingHooks:
    """The hooks of one run; `begin` and `end` are called around the cell.

    Args:
        sees_a_share: Whether every rank is to train with data of its own.
        in_steps: Whether the strategy acts in every step; if not, a step costs no more than without hooks.
    """

    def __init__(
        self,
        run: StrategyRun,
        distributor: ModelDistributor,
        loaders: Loaders,
        *,
        sees_a_share: bool = True,
        in_steps: bool = True,
    ) -> None:
        self._run, self._distributor, self._loaders = run, distributor, loaders
        self._in_steps, self._sees_a_share = in_steps, sees_a_share
        self._patches = Patches()
        self._heuristics = heuristics.enabled(run.options)
        self.device_remapping = DeviceRemapping(identity.device(), run.note, applies="first-device" in self._heuristics)
        self._loss_averaging = LossAveraging(
            lambda: distributor.active and not self.manages_ranks, loaders.on_collective
        )
        self._last_trained = LastTrained()
        checks = TrainingChecks if object_collectives.others.have_values else NoChecks
        self._checks = checks(
            run,
            distributor,
            loaders,
            manages_ranks=lambda: self.manages_ranks,
            sees_a_share=sees_a_share,
            keep=self._last_trained.keep,
        )
        self._schedules = Schedules(self._last_trained.keep)
        self._manual_rates = ManualRates(run.filename)
        self._models = NotebookModels(run)
        self._known: WeakSet[Optimizer] = WeakSet()
        self._undo: list[Callable[[], None]] = []
        self._expected: list[Optimizer] = []
        """Optimizers of models that have not been called and have parameters without a shape."""
        self._looked = False
        self._busy = False
        """Whether a hook is being handled, so that nested calls of hooks are ignored."""

    def begin(self) -> None:
        self.device_remapping.begin(self._run.names, self._patches)
        randomness.watch(self._patches.replace)
        replace = self._patches.replace
        replace(Optimizer, "__init__", self._building)
        replace(Optimizer, "add_param_group", self._adding)
        replace(Optimizer, "__setstate__", self._restoring)
        self._loaders.install(self._patches, self.find_optimizers)
        self._models.begin(self._patches, payload.kept_values.values())
        if not self._in_steps:
            return
        replace(torch.autograd, "backward", self._going_backward)
        replace(torch.autograd, "grad", self._computing_gradients)
        replace(DistributedDataParallel, "__init__", self._wrapping)
        self._loss_averaging.install(self._patches)
        self._undo = [register_optimizer_step_post_hook(self._stepped).remove, self._last_trained.begin()]
        self._schedules.install(self._patches)
        self._checks.begin(self._patches)

    def end(self, *, ok: bool) -> None:
        self._patches.undo()
        for undo in self._undo:
            undo()
        self._loss_averaging.close()
        self._loaders.close()
        if not ok:
            self._last_trained.let_go()
        if self._run.stopped():
            self._models.note()

    def returning(self, value: object) -> None:
        """Record the value that the cell returns."""
        self._models.returning(value)

    @property
    def manages_ranks(self) -> bool:
        """Return whether this cell manages its ranks itself, or runs on only some of them."""
        return process_group.current.asked or not self._run.everyone

    def find_optimizers(self) -> None:
        """Find the optimizers that existed before the cell; called before anything depends on them."""
        if self._looked or self.manages_ranks or "old-optimizers" not in self._heuristics:
            return
        self._looked = True
        new = [each for each in ownership.alive(Optimizer) if each not in self._known and hasattr(each, "param_groups")]
        for optimizer in ownership.within_reach(new, vars(sys.modules["__main__"])):
            self.adopt(optimizer, fresh=False)

    def adopt(self, optimizer: Optimizer, *, fresh: bool) -> None:
        """Distribute an optimizer's model over the ranks, unless the user or a library has wrapped it."""
        self._known.add(optimizer)
        if ownership.without_shape(ownership.parameters_of(optimizer)):
            self._expected.append(optimizer)
            return self._distributor.expect(ownership.owners_of(ownership.parameters_of(optimizer)).roots)
        self._draw_apart()
        parameters = [each for each in ownership.parameters_of(optimizer) if each.requires_grad]
        modules = ownership.alive(nn.Module)
        others = _in_other_hands(modules)
        parameters = [each for each in parameters if id(each) not in others and not ownership.is_sharded(each)]
        if not parameters:
            return self._distributor.recognise(optimizer)
        owners = ownership.owners_of(parameters, modules)
        del modules  # sharding looks for everything that refers to a module
        self._check_device(parameters, ownership.named(owners.roots) or type(optimizer).__name__)
        self._distributor.adopt(
            OptimizerTraining(
                optimizer=optimizer,
                roots=owners.roots,
                loose=owners.loose,
                left_alone=tuple(each for root in owners.roots for each in root.parameters() if id(each) in others),
                place=source_location.current_line(self._run.filename) if fresh else "",
                fresh=fresh,
            )
        )
        self._models.adopted(owners.roots)

    def _adopt_expected(self) -> None:
        """Distribute the models that have been called meanwhile; called before a gradient is computed."""
        expected, self._expected = self._expected, []
        for optimizer in expected:
            if ownership.without_shape(ownership.parameters_of(optimizer)):
                raise DistributedError(
                    f"a model of {type(optimizer).__name__} has layers that have not been called, so their parameters "
                    "have no shape: call the model once, with all of its layers, before the optimizer is built."
                )
            self.adopt(optimizer, fresh=False)

    def _draw_apart(self) -> None:
        if self._sees_a_share and self._run.everyone:
            randomness.draw_apart()

    def _check_device(self, trained: Sequence[torch.Tensor], name: str) -> None:
        own = identity.device()
        if (stray := misplaced(trained, own)) is not None:
            raise DistributedError(
                f"{name} is on {stray.device}, and this rank trains on {own}: move it to `device`, which is each "
                "rank's own device."
            )

    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values summed over ranks if each reads a share of an evaluation's data, else unchanged."""
        if self._loaders.shard_eval and self._run.everyone:
            return weight_sync.summed(values)
        if self._loaders.read_last == "divided":
            self._run.note(
                "total() has returned every rank's own numbers: the loader read last was divided for training, and "
                "without --shard-eval only evaluations are added up, each rank having read all of one"
            )
        return values

    def note_if_apart(self) -> None:
        """Add a note if the ranks have not trained together; called when the cell has ended well, which this keeps."""
        if self._in_steps:
            self._checks.end()
            self._loaders.note_if_untrained()
            self._note_if_cut_short()
        self._models.note()
        self._last_trained.let_go()

    def _note_if_cut_short(self) -> None:
        ranks = self._loaders.ranks
        if not self._loaders.divides or ranks == 1:
            return
        for name, made, whole in self._schedules.cut_short(ranks, self._loaders.backwards):
            self._run.note(
                f"{name} has made {made} of its {whole} steps, since each rank has read 1/{ranks} of the batches: make "
                "it in the cell, with len() of the loader after the optimizer is built"
            )
        if not self._schedules.any and (found := self._manual_rates.cut_short(ranks)):
            name, whole, steps = found
            self._run.note(
                f"`{name}` is {whole}, and each rank has made {steps} steps, since it has read 1/{ranks} of the "
                "batches: a learning rate that is computed from it has not reached its end. Take len() of the loader "
                "after the optimizer is built"
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
        if self._busy:
            return
        self._last_trained.let_go()
        if self.manages_ranks:
            return self._draw_apart()
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

            if self._busy or self.manages_ranks:  # a backward pass inside another one belongs to that
                return run()
            self._busy = True
            try:
                self._adopt_expected()
                self.find_optimizers()
                self._loaders.goes_backward()
                some = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
                if _creates_graph(args, keywords):
                    self._distributor.check_second_derivative(some)
                self._checks.before_backward(some)
                self._checks.after_backward(self._distributor.backward(run, some))
            finally:
                self._busy = False

        return backward

    def _computing_gradients(self, original: Any) -> Any:
        def grad(outputs: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            if not self._busy and not self.manages_ranks:
                some = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
                if _creates_graph(args, keywords):
                    self._distributor.check_second_derivative(some)
                self._checks.before_grad(some, (inputs,) if isinstance(inputs, torch.Tensor) else inputs)
            return original(outputs, inputs, *args, **keywords)

        return grad

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        self._distributor.stepped(optimizer)
        if not self._last_trained.has(optimizer):
            self._last_trained.keep(optimizer, *self._distributor.models)
        self._checks.stepped(optimizer, is_known=optimizer in self._known)
        self._manual_rates.stepped(optimizer, self._loaders.backwards)

    def _wrapping(self, original: Any) -> Any:
        def __init__(wrapper: DistributedDataParallel, module: nn.Module, *args: Any, **keywords: Any) -> None:  # noqa: N807
            if not isinstance(module, ReducedParameters):
                self._distributor.yield_to(module)
            original(wrapper, module, *args, **keywords)

        return __init__


def _creates_graph(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a call of `torch.autograd.grad` or `backward` is to create a graph of its own; `arguments` come
    after the tensors."""
    return bool(keywords.get("create_graph", arguments[2] if len(arguments) > 2 else False))


def _in_other_hands(modules: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """Return the parameters of models that the user or a framework has wrapped."""
    wrappers = [module for module in modules if _is_wrapper(module)]
    return {id(each): each for wrapper in wrappers for each in wrapper.parameters()}


def _is_wrapper(module: nn.Module) -> bool:
    return manual_parallelism.wraps_model(module) and not isinstance(getattr(module, "module", None), ReducedParameters)


class LossAveraging:
    """Averages losses that decide how the training continues: each rank has seen only its share, and all must decide
    alike. These are the losses that a closure returns to an optimizer (`LBFGS` chooses its step by them) and those
    given to `ReduceLROnPlateau`. Collective: all ranks call them, as all compute gradients.

    Args:
        applies: Returns whether the ranks train any model together.
        on_collective: Called before a collective starts.
    """

    def __init__(self, applies: Callable[[], bool], on_collective: Callable[[], None]) -> None:
        self._applies, self._on_collective = applies, on_collective
        self._undo: Callable[[], None] = lambda: None

    def install(self, patches: Patches) -> None:
        patches.replace(ReduceLROnPlateau, "step", self._on_plateau)
        self._undo = register_optimizer_step_pre_hook(self._before_step).remove

    def close(self) -> None:
        self._undo()

    def _on_plateau(self, original: Any) -> Any:
        def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **keywords: Any) -> None:
            original(scheduler, self._averaged(metrics) if self._applies() else metrics, *args, **keywords)

        return step

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        optimizer, *given = args
        closure = given[0] if given else keywords.get("closure")
        if closure is None or not self._applies():
            return None

        def together() -> Any:
            loss = closure()
            return loss if loss is None else self._averaged(loss)

        if given:
            return (optimizer, together, *given[1:]), keywords
        return args, {**keywords, "closure": together}

    def _averaged(self, value: Any) -> Any:
        self._on_collective()
        (total,) = weight_sync.summed((value if isinstance(value, torch.Tensor) else float(value),))
        return total / identity.world_size()
