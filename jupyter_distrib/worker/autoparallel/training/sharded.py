"""Sharded training in one run: each rank holds its part of every parameter, gradient and optimizer state.

an optimizer is built    its models get the weights of rank 0, and are sharded by torch's `fully_shard`; holders of
                         their old parameters get the new ones
a batch, a backward      FSDP gathers and frees, and averages gradients
optimizer step           buffers (of batch normalization, say) become those of rank 0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.worker.autoparallel import heuristics, object_collectives, ownership, source_location
from jupyter_distrib.worker.autoparallel.data.change_summary import ChangeSummary
from jupyter_distrib.worker.autoparallel.data.loaders import Loaders
from jupyter_distrib.worker.autoparallel.data.shard_samplers import ShardChoice
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.autoparallel.training import (
    forward_changes,
    gather_shards,
    rejoining,
    replace_references,
    sharded_errors,
    weight_sync,
    whole_numbers,
)
from jupyter_distrib.worker.autoparallel.training.data_parallel import check_together
from jupyter_distrib.worker.autoparallel.training.hooks import OptimizerTraining, TrainingHooks
from jupyter_distrib.worker.autoparallel.training.sharding import (
    ShardingPlan,
    accept_whole_state_dicts,
    callable_parts,
    check,
    offloads,
    place,
    refuse_gradient_hooks,
    reshard,
    shard,
    shard_state,
    synchronize_weights,
)
from jupyter_distrib.worker.autoparallel.training.units import units_of
from jupyter_distrib.worker.pytorch import private


@dataclass(slots=True)
class Steps:
    """Number of steps of a model's optimizers on this rank."""

    count: int = 0
    stepping: bool = False
    sharded_here: bool = False
    """Whether the whole model was sharded here, so that any unsharded parameter was added later."""
    moved_here: bool = False
    """Whether the cell had left the model on another device, so that its batches have to follow it, too."""


steps: WeakKeyDictionary[nn.Module, Steps] = WeakKeyDictionary()
"""Live models that were trained sharded; the notebook may keep them on the ranks from run to run."""


class ShardedTraining:
    """The `ModelDistributor` that shards models; `ModelDistributor` describes the calls of its methods."""

    def __init__(self, run: StrategyRun, plan: ShardingPlan) -> None:
        self._run, self._plan, self._heuristics = run, plan, heuristics.enabled(run.options)
        part = ShardChoice(
            rank=plan.data.get_local_rank() if plan.data is not None else 0,
            size=plan.data.size() if plan.data is not None else 1,
            batch="global" if run.options.get("batch") == "global" else "per-rank",
            together=True,
        )
        self._summary = ChangeSummary(part.size)
        self._loaders = Loaders(self, part, run, self._summary)
        self._hooks = TrainingHooks(run, self, self._loaders, sees_a_share=part.size == identity.world_size())
        self._undo: Callable[[], None] = lambda: None
        self._patches = Patches()
        self._roots: list[nn.Module] = []
        """The models that this run trains."""
        self._reached = False
        """Whether a backward pass has produced gradients for these models."""

    def begin(self, *, met_again: bool) -> None:
        """Begin the run. `met_again`: whether the ranks may be at different steps, for instance after an interrupt."""
        if met_again:
            self._compare_steps()
            rejoining.continue_schedules_and_passes(rejoining.kept_objects(), self._run.note)
        self._hooks.begin()
        whole_numbers.install(self._patches)
        self._patches.replace(nn.Module, "zero_grad", self._zeroing)
        stepping = register_optimizer_step_pre_hook(lambda optimizer, *_: self._about_to_step(optimizer))

        def sharded_here() -> list[nn.Module]:
            return [root for root in steps if steps[root].sharded_here]

        accept = forward_changes.refuse_replacing(sharded_here)
        forward_changes.refuse_setting_data(self._patches, sharded_here)

        def undo() -> None:
            stepping.remove()
            accept()

        self._undo = undo
        self._hooks.find_optimizers()  # a captured optimizer's model has to be sharded before its first batch

    def returning(self, value: object) -> None:
        """Gather the sharded parts of the cell's value on rank 0."""
        for root in list(steps):
            reshard(root)
        self._hooks.returning(value)
        gather_shards.gather_if_all_do(value)

    def end(self, *, ok: bool) -> None:
        if isinstance(sys.exception(), SystemExit):
            gather_shards.announce_absence()  # after any other exception the ranks are stopped together
        self._hooks.end(ok=ok)
        self._patches.undo()
        self._undo()
        if ok:
            self._report_changes()
            self._hooks.note_if_apart()
        elif self._roots and (note := sharded_errors.note_on(sys.exception(), self._roots)):
            self._run.note(note)

    def adapted(self, code: CodeType) -> CodeType:
        """Return the cell's code with this rank's device in place of the first one."""
        return self._hooks.device_remapping.adapted(code)

    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values summed over ranks if each reads a share of an evaluation's data, else unchanged."""
        return self._hooks.total(values)

    def _report_changes(self) -> None:
        if (news := self._summary.news()) and identity.rank() == 0:
            self._run.note(news)

    # ------------------------------------------------------------------------------------------------ prepare()

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Return the objects, ready for training.

        Raises:
            DistributedError: One of them cannot be made ready; it has not been changed.
        """
        check_together(objects)
        for item in objects:
            if isinstance(item, nn.Module):
                self._train([ownership.unwrapped(item)])
        for item in objects:
            if isinstance(item, Optimizer):
                self._hooks.adopt(item, fresh=True)
        return tuple(self._loaders.divided(item) if isinstance(item, DataLoader) else item for item in objects)

    # ------------------------------------------------------------------------------------------------ ModelDistributor

    @property
    def active(self) -> bool:
        return bool(self._roots)

    @property
    def in_training(self) -> bool:
        return any(root.training for root in self._roots)

    @property
    def models(self) -> Sequence[nn.Module]:
        return self._roots

    def expect(self, modules: Sequence[nn.Module]) -> None:
        raise DistributedError(
            f"{ownership.named(modules)} has layers without a shape, such as LazyLinear: call it once before the "
            "optimizer is built, or use --strategy ddp."
        )

    def adopt(self, training: OptimizerTraining) -> None:
        name = type(training.optimizer).__name__
        at = f" ({training.place})" if training.place else ""
        if training.loose:
            raise DistributedError(
                f"{name}{at} trains a tensor of shape {tuple(training.loose[0].shape)} that belongs to no module, and "
                "only modules can be sharded: make it a parameter of a module, or use --strategy ddp."
            )
        if training.left_alone:
            raise DistributedError(
                f"{name}{at} trains {ownership.named(training.roots)}, of which a part is wrapped already: "
                "wrap all of it yourself, or nothing."
            )
        self._check_additions(training.roots, f"{name}{at}")
        accept_whole_state_dicts(training.optimizer)
        self._train(training.roots, training.optimizer)

    def _check_additions(self, roots: Sequence[nn.Module], optimizer: str) -> None:
        """Raise `DistributedError` for parameters added to a model after it was sharded, which each rank would train
        separately."""
        for root in (root for root in steps if steps[root].sharded_here):
            gathered = {id(each) for each in private.gathered_parameters(root)}
            whole = {name: each for name, each in root.named_parameters() if not isinstance(each, DTensor)}
            new = [name for name, each in whole.items() if id(each) not in gathered]
            if whole and not new and any(root is part for each in roots for part in each.modules()):
                raise DistributedError(
                    f"{optimizer} is built between a forward pass of {ownership.named_plainly([root])} and its "
                    "backward pass, when FSDP has whole parameters in place of the sharded ones: build it before, and "
                    "evaluate under torch.no_grad()."
                )
            if new and any(root is part for each in roots for part in each.modules()):
                raise DistributedError(
                    f"{optimizer} trains {new[0]}, which was added to {ownership.named_plainly([root])} after that was "
                    "sharded, so it cannot be sharded with it: add it before the model has its first "
                    "optimizer, or use --strategy ddp."
                )

    def recognise(self, optimizer: Optimizer) -> None:
        accept_whole_state_dicts(optimizer)
        parameters = ownership.parameters_of(optimizer)
        if self._plan.model:
            return self._train(ownership.owners_of(parameters).roots, optimizer)
        for root in list(steps):
            if _has_any(root, parameters):
                self._note_root(root)

    def yield_to(self, module: nn.Module) -> None:
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            raise DistributedError(
                f"{type(module).__name__} is sharded already, by --strategy fsdp when its optimizer was built: leave "
                "DistributedDataParallel out, or use --strategy ddp. Accelerate, and a Trainer built on it, add it by "
                "themselves: use no strategy with them."
            )

    def backward(self, run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        self._report_changes()
        run()
        self._reached = self._reached or any(p.grad is not None for root in self._roots for p in root.parameters())
        return self._reached

    def check_second_derivative(self, outputs: Sequence[torch.Tensor]) -> None:
        if private.transforms_functions():
            return
        gathered = {id(each): root for root in self._roots for each in private.gathered_parameters(root)}
        if gathered and (found := _first_in_graph(outputs, gathered)) is not None:
            at = source_location.current_line(self._run.filename)
            raise DistributedError(
                f"a gradient with create_graph=True{f' ({at})' if at else ''} is to be differentiated again, and FSDP "
                f"frees the parameters of {ownership.named_plainly([gathered[id(found)]])} that this needs after the "
                "first backward pass: use --strategy ddp."
            )

    def stepped(self, optimizer: Optimizer) -> None:
        for root in self._of(optimizer):
            steps[root].count += 1
            steps[root].stepping = False
            self._say_if_nothing_is_spread(root)
            if buffers := [each for each in root.buffers() if not isinstance(each, DTensor)]:
                weight_sync.copy_from_rank_0(buffers)

    # ------------------------------------------------------------------------------------------------ inside

    def _zeroing(self, original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(module: nn.Module, *args: Any, **keywords: Any) -> None:
            parts = {id(part) for part in module.modules()}
            for root in self._roots:
                if not parts.isdisjoint(map(id, root.modules())):
                    reshard(root)  # between a forward and a backward pass it has whole parameters, without gradients
            original(module, *args, **keywords)

        return zero_grad

    def _of(self, optimizer: Optimizer) -> list[nn.Module]:
        return [root for root in self._roots if _has_any(root, ownership.parameters_of(optimizer))]

    def _compare_steps(self) -> None:
        """Add a note if an interrupt has stopped the ranks at different steps, so that their shards are
        inconsistent."""
        kept = rejoining.within_reach(list(steps))  # a cell that failed has left others
        own_steps = [(ownership.named_plainly([root]), steps[root].count, steps[root].stepping) for root in kept]
        every = object_collectives.gather(own_steps)
        for name in dict.fromkeys(name for name, *_ in own_steps):
            of_ranks = [sorted(each[1:] for each in rank_steps if each[0] == name) for rank_steps in every]
            if any(each != of_ranks[0] for each in of_ranks) or any(stepping for _, stepping in of_ranks[0]):
                self._run.note(
                    f"{name} was stopped in the middle of an optimizer step: its shards may be one step apart; for "
                    "exact results, load a checkpoint."
                )

    def _about_to_step(self, optimizer: Optimizer) -> None:
        for root in self._roots:
            reshard(root)  # after an evaluation the whole parameters may still exist, and would be used again
        for root in self._of(optimizer):
            if steps[root].sharded_here:
                refuse_gradient_hooks(root)
            steps[root].stepping = True

    def _train(self, roots: Sequence[nn.Module], optimizer: Optimizer | None = None) -> None:
        parts = [part for each in roots for part in callable_parts(each)]
        new = [part for part in parts if part not in steps and not isinstance(part, FSDPModule)]
        for root in new:
            check(root)
            if self._plan.data is not None:
                refuse_gradient_hooks(root)
        guessed = "units" in self._heuristics or bool(self._plan.unit)
        units = [
            units_of(root, self._plan.unit) if guessed else [] for root in new
        ]  # nothing is sharded before all of it can be
        for root in parts:
            self._note_place(root)
        for root, inside in zip(new, units, strict=True):
            synchronize_weights(root, self._plan.data)
            if self._plan.data is not None:
                self._shard(root, inside, optimizer)
        for root in parts:
            self._note_root(root)

    def _shard(self, root: nn.Module, units: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
        assert self._plan.data is not None
        new_of = shard(root, units, self._plan)
        replace_references.replace(new_of, local_variables="local-variables" in self._heuristics)
        if optimizer is not None:
            shard_state(optimizer, new_of)
        count = sum(each.numel() for each in root.parameters())
        name, kinds = ownership.named_plainly([root]), ownership.named_plainly(units)
        steps.setdefault(root, Steps()).sharded_here = True
        forward_changes.refuse_other_tensors([*units, root])
        forward_changes.watch_first_pass([*units, root])
        self._summary.sharded(name, count, len(units), kinds, source_location.current_line(self._run.filename))

    def _note_place(self, root: nn.Module) -> None:
        step, device = steps.setdefault(root, Steps()), identity.device()
        step.moved_here |= any(each.device.type != device.type for each in root.parameters())

    def _note_root(self, root: nn.Module) -> None:
        self._note_place(root)
        if not any(root is each for each in self._roots):
            self._roots.append(root)
        device = identity.device()
        if device.type != "cpu":
            place(root, device, offload=offloads(self._plan))
            if steps[root].moved_here:
                self._loaders.device = device

    def _say_if_nothing_is_spread(self, root: nn.Module) -> None:
        if (
            self._plan.model
            and steps[root].count == 1
            and not any(_is_spread(each, self._plan.data) for each in root.parameters())
        ):
            self._run.note(
                f"no parameter of {ownership.named_plainly([root])} is distributed over the mesh, so all ranks do the "
                "same: "
                'use torch.distributed.tensor.parallel.parallelize_module(model, mesh["model"], plan)'
            )


def _first_in_graph(outputs: Sequence[torch.Tensor], wanted: Container[int]) -> torch.Tensor | None:
    """Return a leaf with one of these ids from which the tensors were computed; None if there is none."""
    left = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen = set[Any](left)
    while left:
        node = left.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in wanted:
            found: torch.Tensor = leaf
            return found
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        left.extend(new)
    return None


def _has_any(root: nn.Module, parameters: Sequence[torch.Tensor]) -> bool:
    ids = {id(each) for each in parameters}
    return any(id(each) in ids for each in root.parameters())


def _is_spread(parameter: torch.Tensor, data: DeviceMesh | None) -> bool:
    return isinstance(parameter, DTensor) and (data is None or parameter.device_mesh.ndim > 1)
