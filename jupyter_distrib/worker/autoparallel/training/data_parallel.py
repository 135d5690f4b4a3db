"""Data-parallel training in one run: which models are averaged together, and the weights they start with.

    an optimizer is built    its models go to the rank's device and get the weights of rank 0
    first backward pass      all ranks compare their weights
    backward pass            gradients are averaged
    optimizer step           buffers (of batch normalization, say) become those of rank 0

A user's model is referenced as long as its optimizer lives. A single rank averages and divides nothing: it only moves
models and batches to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.worker.autoparallel import ownership
from jupyter_distrib.worker.autoparallel.data.change_summary import ChangeSummary
from jupyter_distrib.worker.autoparallel.data.loaders import Loaders
from jupyter_distrib.worker.autoparallel.data.shard_samplers import ShardChoice
from jupyter_distrib.worker.autoparallel.training import rejoining, weight_sync
from jupyter_distrib.worker.autoparallel.training.gradient_reducer import GradientReducer, ReplicaRegistry
from jupyter_distrib.worker.autoparallel.training.hooks import OptimizerTraining, TrainingHooks
from jupyter_distrib.worker.host_copy import is_capturing
from jupyter_distrib.worker.pytorch import phase_clock, private, randomness


class DataParallel:
    """The `ModelDistributor` that replicates models; `ModelDistributor` describes the calls of its methods."""

    def __init__(self, run: StrategyRun) -> None:
        self._run, self._alone = run, identity.world_size() == 1
        part = ShardChoice(
            rank=identity.rank(),
            size=identity.world_size(),
            batch="global" if run.options.get("batch") == "global" else "per-rank",
        )
        self._summary = ChangeSummary(part.size)
        self._loaders = Loaders(self, part, run, self._summary)
        self._hooks = TrainingHooks(run, self, self._loaders, in_steps=not self._alone)
        self._reducers = ReplicaRegistry()
        self._unverified: list[GradientReducer] = []
        self._expected: list[nn.Module] = []
        """Models that are averaged from their first gradient on."""
        self._undo: Callable[[], None] = lambda: None
        self._in_backward = False

    def begin(self, *, met_again: bool) -> None:
        """Begin the run. `met_again`: whether the ranks have a new group, for instance after a failure or an
        interrupt."""
        if met_again and self._run.everyone and not self._alone:
            self._rejoin()
        self._hooks.begin()
        if not self._alone:
            self._undo = register_optimizer_step_pre_hook(self._about_to_step).remove

    def returning(self, value: object) -> None:
        """Record the value that the cell returns."""
        self._hooks.returning(value)

    def end(self, *, ok: bool) -> None:
        self._undo()
        self._hooks.end(ok=ok)
        try:
            if ok:
                self._report_changes()
                self._hooks.note_if_apart()
        finally:
            self._reducers.clear()

    # ------------------------------------------------------------------------------------------------ prepare()

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Return the objects, ready for training.

        Raises:
            DistributedError: One of them cannot be prepared; it has not been changed.
        """
        if not self._run.everyone:
            raise DistributedError(
                "jupyter_distrib.prepare() needs every rank, and --on runs this cell on some of them: leave --on out."
            )
        check_together(objects)
        return tuple(map(self._prepare, objects))

    def _prepare(self, item: Any) -> Any:
        if isinstance(item, nn.parallel.DistributedDataParallel):
            return item
        if isinstance(item, nn.Module):
            if self._alone:
                self._move([item], [], None)
            elif _is_trainable(item):
                self._reducers.keep(self._replicated([ownership.unwrapped(item)], [], [], fresh=True))
            else:
                item.to(identity.device())
            return item
        if isinstance(item, DataLoader):
            return item if self._alone else self._loaders.divided(item)
        if isinstance(item, Optimizer):
            self._hooks.adopt(item, fresh=True)
            return item
        return item  # schedulers and scalers come with their optimizer

    def adapted(self, code: CodeType) -> CodeType:
        """Return the cell's code with this rank's device in place of the first one."""
        return self._hooks.device_remapping.adapted(code)

    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values summed over ranks if each rank evaluates a share of the data, else unchanged."""
        return self._hooks.total(values)

    # ------------------------------------------------------------------------------------------------ ModelDistributor

    @property
    def active(self) -> bool:
        return bool(self._reducers.all() or self._expected)

    @property
    def in_training(self) -> bool:
        models = any(model.training for model in self._expected)
        return models or any(reducer.in_training for reducer in self._reducers.all())

    @property
    def models(self) -> Sequence[nn.Module]:
        return [model for reducer in self._reducers.all() for model in reducer.modules]

    def expect(self, modules: Sequence[nn.Module]) -> None:
        self._move(modules, [], None)
        if not self._alone:
            self._expected += modules

    def adopt(self, training: OptimizerTraining) -> None:
        self._expected = [each for each in self._expected if not any(each is root for root in training.roots)]
        self._move(training.roots, training.loose, training.optimizer)
        if self._alone:
            return self._summary.alone()
        self._summary.wrapped(ownership.named(training.roots) or type(training.optimizer).__name__, training.place)
        self._reducers.put(
            training.optimizer,
            self._replicated(training.roots, training.loose, training.left_alone, fresh=training.fresh),
        )

    def recognise(self, optimizer: Optimizer) -> None:
        """Do nothing, since sharded parameters are not replicated."""

    def yield_to(self, module: nn.Module) -> None:
        parameters = {id(each) for each in module.parameters()}
        for reducer in self._reducers.all():
            if _overlaps(reducer, parameters):
                self._summary.left(ownership.named(reducer.modules))
        self._reducers.replace(lambda each: _overlaps(each, parameters))
        self._unverified = [each for each in self._unverified if not _overlaps(each, parameters)]

    def check_second_derivative(self, outputs: Sequence[torch.Tensor]) -> None:
        """Do nothing, since each rank has all parameters."""

    def backward(self, run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        if self._unverified:
            self._verify()
        self._report_changes()
        announced = [reducer for reducer in self._reducers.all() if reducer.announce()]
        beginning = next((each for each in tensors if each.requires_grad), None)
        if not announced or beginning is None:
            run()
            return False

        def finish() -> None:
            phase_clock.clock.end_compute()
            for reducer in announced:
                reducer.finish(self._loaders.on_collective)

        def begun(_: torch.Tensor) -> None:
            private.at_end_of_backward(finish)

        handle = beginning.register_hook(begun)  # type: ignore[no-untyped-call]
        self._in_backward = True
        try:
            run()
        except BaseException:
            for reducer in announced:
                reducer.drop()  # the averaging of this reducer is incomplete, so it is made anew
            raise
        finally:
            self._in_backward = False
            handle.remove()
        reached = [reducer.complete() for reducer in announced]
        return any(reached)

    def stepped(self, optimizer: Optimizer) -> None:
        for reducer in self._reducers.of(optimizer):
            reducer.share_buffers()

    def _about_to_step(self, optimizer: Optimizer, *_: object) -> None:
        reducers = self._reducers.of(optimizer)
        if reducers and self._in_backward:
            raise DistributedError(
                f"{type(optimizer).__name__} steps inside backward(), before its gradients are averaged over the "
                "ranks: step after backward(), or use --strategy none."
            )
        for reducer in reducers:
            reducer.resolve()

    # ------------------------------------------------------------------------------------------------ the notes

    def _report_changes(self) -> None:
        if (news := self._summary.news()) and identity.rank() == 0:
            self._run.note(news)

    # ------------------------------------------------------------------------------------------------ inside

    def _replicated(
        self,
        roots: Sequence[nn.Module],
        loose: Sequence[torch.Tensor],
        left_alone: Sequence[torch.Tensor],
        *,
        fresh: bool,
    ) -> list[GradientReducer]:
        """Return the reducers of these modules and tensors, existing or new."""
        reducers: list[GradientReducer] = []
        for root in roots:
            reducers.append(self._holding(root) or self._new([root], [], left_alone, fresh=fresh))
        held = {id(each) for reducer in self._reducers.all() for each in reducer.parameters}
        if free := [each for each in loose if id(each) not in held]:
            reducers.append(self._new([], free, left_alone, fresh=fresh))
        return reducers

    def _holding(self, root: nn.Module) -> GradientReducer | None:
        """Return the reducer of this model; None also if the model has grown since the reducer was made."""
        return next(
            (
                each
                for each in self._reducers.all()
                if any(root is module for module in each.modules) and each.has(root)
            ),
            None,
        )

    def _new(
        self, roots: list[nn.Module], loose: list[torch.Tensor], left_alone: Sequence[torch.Tensor], *, fresh: bool
    ) -> GradientReducer:
        if is_capturing():
            raise DistributedError(
                "--strategy ddp meets this model for the first time while a CUDA graph is captured, where ranks cannot "
                "agree on it: train a few steps before the capture, which torch asks for as well (warm-up)."
            )
        tensors = {id(each) for each in ownership.tensors_of(roots, loose)}
        smaller = [each for each in self._reducers.all() if _overlaps(each, tensors)]
        inside = {id(module) for root in roots for module in root.modules()}
        others = [module for each in smaller for module in each.modules if id(module) not in inside]
        reducer = GradientReducer([*roots, *others], loose, left_alone)
        self._reducers.replace(smaller.__contains__, by=[reducer])
        self._move(roots, loose, None)
        if fresh:
            self._synchronize_weights(reducer)
        self._unverified = [each for each in self._unverified if each not in smaller] + [reducer]
        return reducer

    def _move(self, roots: Iterable[nn.Module], loose: Iterable[torch.Tensor], optimizer: Optimizer | None) -> None:
        """Move models to the rank's device, in place so that the optimizer keeps its parameters, and batches with
        them."""
        device = identity.device()
        if device.type == "cpu":
            return
        for root in roots:
            if any(each.device.type == "cpu" for each in root.parameters()):
                root.to(device)
                self._loaders.device = device
                self._summary.moved(ownership.named([root]), device)
        for tensor in loose:
            tensor.data = tensor.data.to(device)
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "step":  # torch keeps these on the CPU
                    state[name] = value.to(parameter.device)

    def _synchronize_weights(self, reducer: GradientReducer) -> None:
        tensors = ownership.tensors_of(reducer.modules, reducer.loose)
        self._loaders.on_collective()
        every = weight_sync.fingerprints_of_all(tensors)
        if not weight_sync.same_form(every):
            raise DistributedError(
                f"{_called(reducer)} has different parameters on different ranks: build it identically on all of them."
                + randomness.why_apart()
            )
        if any(each != every[0] for each in every):
            weight_sync.copy_from_rank_0(tensors)

    def _rejoin(self) -> None:
        """Give kept optimizers, their schedules and shuffled loaders the state of rank 0, if an interrupt has stopped
        the ranks at different steps. Every rank takes part, even one without optimizers."""
        kept = rejoining.kept_objects()
        self._rejoin_optimizers([each for each in kept if issubclass(type(each), Optimizer)])
        rejoining.continue_schedules_and_passes(kept, self._run.note)

    def _rejoin_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        optimizers = [each for each in optimizers if hasattr(each, "param_groups")]
        optimizers = [each for each in optimizers if not any(map(ownership.is_sharded, ownership.parameters_of(each)))]
        trained = [self._trained_by(each) for each in optimizers]
        every = weight_sync.fingerprints_of_sets(trained)
        if not all(map(weight_sync.same_form, zip(*every, strict=False))) or len({len(each) for each in every}) > 1:
            return  # not the same optimizers: weights are compared again before they are averaged
        for place, (optimizer, tensors) in enumerate(zip(optimizers, trained, strict=True)):
            if any(each[place] != every[0][place] for each in every):
                weight_sync.copy_from_rank_0(tensors)
                self._run.note(
                    f"what {type(optimizer).__name__} trains differed between ranks; all continue with rank 0's"
                )
                rejoining.load_from_rank_0(optimizer, self._run.note)

    def _trained_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        parameters = ownership.parameters_of(optimizer)
        return ownership.tensors_of(ownership.owners_of(parameters).roots, parameters)

    def _verify(self) -> None:
        """Raise `DistributedError` if the weights of models that are new in this run differ between ranks."""
        new, self._unverified = self._unverified, []
        self._loaders.on_collective()
        if compiled := ownership.compiled(module for each in new for module in each.modules):
            # torch splits a graph for overlap in a forward of DistributedDataParallel only (torch._dynamo, 2.13)
            self._run.note(
                f"{ownership.named(compiled)} is compiled, so its gradients are averaged after its backward pass, not "
                "during it: if that costs time, wrap it in DistributedDataParallel before torch.compile"
            )
        for reducer in new:
            if len(set(weight_sync.fingerprints_of_all(reducer.parameters))) > 1:
                raise DistributedError(
                    f"{_called(reducer)} does not have the same weights on every rank: "
                    "call jupyter_distrib.prepare(model) before the loop, which gives every rank those of rank 0."
                )


def check_together(objects: Sequence[Any]) -> None:
    """Raise `DistributedError` for objects that `prepare` cannot handle, before any of them is changed."""
    models = [each for each in objects if isinstance(each, nn.Module)]
    for item in objects:
        name = type(item).__name__
        if isinstance(item, nn.Module):
            if next(item.parameters(), None) is None:
                raise DistributedError(
                    f"jupyter_distrib.prepare(): {name} has no parameters, so there is nothing to train."
                )
            if ownership.without_shape(item.parameters()):
                raise DistributedError(
                    f"jupyter_distrib.prepare(): {name} has layers without a shape, such as LazyLinear: call it once "
                    "before."
                )
        elif isinstance(item, Optimizer):
            of_models = {id(each) for model in filter(_is_trainable, models) for each in model.parameters()}
            if of_models and not of_models & {id(each) for each in ownership.parameters_of(item)}:
                raise DistributedError(
                    f"jupyter_distrib.prepare(): the {name} has no parameter of {ownership.named(models)}: build it "
                    "from the parameters of the model that it is to train."
                )
        elif not isinstance(item, DataLoader) and not hasattr(item, "step") and not hasattr(item, "state_dict"):
            raise DistributedError(
                f"jupyter_distrib.prepare() takes models, optimizers, schedulers and data loaders, not {name}."
            )


def _is_trainable(model: nn.Module) -> bool:
    return any(each.requires_grad for each in model.parameters())


def _called(reducer: GradientReducer) -> str:
    return ownership.named(reducer.modules) or "what the optimizer trains"


def _overlaps(reducer: GradientReducer, tensors: set[int]) -> bool:
    return any(id(each) in tensors for each in reducer.parameters)
