"""Sharded training: each rank holds its part of every parameter, gradient and optimizer state. One for each run.

an optimizer is built    its models get the weights of rank 0, and are sharded by torch's `fully_shard`; whoever
                         holds their old parameters gets the new ones
a batch, a backward      FSDP gathers and frees, and averages gradients
optimizer step           buffers (of batch normalization, say) become those of rank 0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker import identity
from jupyter_distrib.worker.autoparallel import (
    gather_shards,
    guesses,
    object_collectives,
    ownership,
    replace_references,
    source_location,
    weight_sync,
)
from jupyter_distrib.worker.autoparallel.change_summary import ChangeSummary
from jupyter_distrib.worker.autoparallel.data_parallel import check_together
from jupyter_distrib.worker.autoparallel.hooks import OptimizerTraining, TrainingHooks
from jupyter_distrib.worker.autoparallel.loaders import Loaders
from jupyter_distrib.worker.autoparallel.shard_samplers import ShardChoice
from jupyter_distrib.worker.autoparallel.state_dict_loading import listen, reshard
from jupyter_distrib.worker.autoparallel.units import has_forward, units_of
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.strategy import StrategyRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """What was asked for."""

    data: DeviceMesh | None
    """One dimension: the ranks that see different data, among which parameters are divided. None: all see the same."""
    model: bool = False
    """The user spreads parameters over other dimensions of the mesh."""
    unit: str = ""
    compute: torch.dtype | None = None
    """Computes in this type; None: in that of the weights."""
    offload: bool = False


_MIXED = "got mixed torch.Tensor and DTensor"
"""What torch (2.13) says if a module is called whose parameters are not gathered."""
New = dict[int, tuple[Any, Any]]
"""Old parameter and new one, by the `id` of the old one."""


@dataclass(slots=True)
class Steps:
    """How far the optimizers of a model have come on this rank."""

    count: int = 0
    stepping: bool = False
    sharded_here: bool = False
    """Whole, so that what is not sharded in it now has come later."""


steps: WeakKeyDictionary[nn.Module, Steps] = WeakKeyDictionary()
"""The models that were sharded here and are alive: the notebook may keep them on the ranks from run to run."""


class ShardedTraining:
    """A `Spread` that shards; see there for what the methods are called for."""

    def __init__(self, run: StrategyRun, how: ShardingPlan) -> None:
        self._run, self._how, self._guesses = run, how, guesses.made(run.options)
        part = ShardChoice(
            rank=how.data.get_local_rank() if how.data is not None else 0,
            size=how.data.size() if how.data is not None else 1,
            batch="global" if run.options.get("batch") == "global" else "per-rank",
            together=True,
        )
        self._summary = ChangeSummary(part.size)
        self._loaders = Loaders(self, part, run, self._summary)
        self._conversion = TrainingHooks(run, self, self._loaders, sees_a_share=part.size == identity.world_size())
        self._undo: Callable[[], None] = lambda: None
        self._roots: list[nn.Module] = []
        """Those that this run trains."""
        self._reached = False
        """A backward pass has computed gradients of them."""

    def begin(self, *, groups_reset: bool) -> None:
        """Watch the cell. `regrouped`: an interrupt, for instance, has cost the ranks the groups they had."""
        if groups_reset:
            self._compare_steps()
        self._conversion.begin()
        stepping = register_optimizer_step_pre_hook(lambda optimizer, *_: self._about_to_step(optimizer))
        self._undo = stepping.remove
        self._conversion.look_around()  # a captured optimizer's model has to be sharded before its first batch

    def returning(self, value: object) -> None:
        """Make the sharded parts of the cell's value whole on rank 0."""
        for root in list(steps):
            reshard(root)
        gather_shards.gather_if_all_do(value)

    def end(self, *, ok: bool) -> None:
        if isinstance(sys.exception(), SystemExit):
            gather_shards.absent()  # after any other exception the ranks are stopped together
        self._conversion.end()
        self._undo()
        if ok:
            self._tell()
            self._conversion.tell_if_apart()
        elif _MIXED in str(sys.exception()):
            self._run.note(
                "a part or a method of a sharded model was called, and FSDP gathers the parameters when the model "
                "itself is called: call that, or register_fsdp_forward_method(model, name) of torch.distributed.fsdp"
            )

    def adapted(self, code: CodeType) -> CodeType:
        """Return the cell's code with this rank's device in place of the first one."""
        return self._conversion.own_device.adapted(code)

    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values summed over ranks if each reads a share of what it evaluates, else as they are."""
        return self._conversion.total(values)

    def _tell(self) -> None:
        if (news := self._summary.news()) and identity.rank() == 0:
            self._run.note(news)

    # ------------------------------------------------------------------------------------------------ prepare()

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """The objects, ready for training.

        Raises:
            DistributedError: One of them cannot be made ready; nothing of it has been changed.
        """
        check_together(objects)
        for item in objects:
            if isinstance(item, nn.Module):
                self._train([ownership.unwrapped(item)])
        for item in objects:
            if isinstance(item, Optimizer):
                self._conversion.adopt(item, fresh=True)
        return tuple(self._loaders.divided(item) if isinstance(item, DataLoader) else item for item in objects)

    # ------------------------------------------------------------------------------------------------ Spread

    @property
    def active(self) -> bool:
        return bool(self._roots)

    @property
    def in_training(self) -> bool:
        return any(root.training for root in self._roots)

    def adopt(self, training: OptimizerTraining) -> None:
        name = type(training.optimizer).__name__
        at = f" ({training.place})" if training.place else ""
        if training.loose:
            raise DistributedError(
                f"{name}{at} trains a tensor of shape {tuple(training.loose[0].shape)} that belongs to no module, and "
                "only modules can be sharded: make it a parameter of a module, or take --strategy ddp."
            )
        if training.left_alone:
            raise DistributedError(
                f"{name}{at} trains {ownership.named(training.roots)}, of which a part is wrapped already: "
                "wrap all of it by hand or nothing."
            )
        self._check_additions(training.roots, f"{name}{at}")
        listen(training.optimizer)
        self._train(training.roots, training.optimizer)

    def _check_additions(self, roots: Sequence[nn.Module], optimizer: str) -> None:
        """Refuse parameters that a model got when it was sharded already: each rank would train its own."""
        for root in (root for root in steps if steps[root].sharded_here):
            new = [name for name, each in root.named_parameters() if not isinstance(each, DTensor)]
            if new and any(root is part for each in roots for part in each.modules()):
                raise DistributedError(
                    f"{optimizer} trains {new[0]}, which was added to {ownership.named_plainly([root])} when that was "
                    "sharded already, so it cannot be sharded with it: add it before the model has its first "
                    "optimizer, or take --strategy ddp."
                )

    def recognise(self, optimizer: Optimizer) -> None:
        listen(optimizer)
        theirs = ownership.parameters_of(optimizer)
        if self._how.model:
            return self._train(ownership.owners_of(theirs).roots, optimizer)
        for root in list(steps):
            if _has_any(root, theirs):
                self._note_root(root)

    def yield_to(self, module: nn.Module) -> None:
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            raise DistributedError(
                f"{type(module).__name__} is sharded already, by --strategy fsdp when its optimizer was built: leave "
                "DistributedDataParallel out, or take --strategy ddp."
            )

    def backward(self, run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        self._tell()
        run()
        self._reached = self._reached or any(p.grad is not None for root in self._roots for p in root.parameters())
        return self._reached

    def stepped(self, optimizer: Optimizer) -> None:
        for root in self._of(optimizer):
            steps[root].count += 1
            steps[root].stepping = False
            self._say_if_nothing_is_spread(root)
            if buffers := [each for each in root.buffers() if not isinstance(each, DTensor)]:
                weight_sync.take_from_rank_0(buffers)

    # ------------------------------------------------------------------------------------------------ inside

    def _of(self, optimizer: Optimizer) -> list[nn.Module]:
        return [root for root in self._roots if _has_any(root, ownership.parameters_of(optimizer))]

    def _compare_steps(self) -> None:
        """Say so if an interrupt has come between the ranks, so that their shards are not of the same step."""
        mine = [(ownership.named_plainly([root]), each.count, each.stepping) for root, each in steps.items()]
        every = object_collectives.gather(mine)
        for name, *_ in mine:
            seen = [(count, stepping) for theirs in every for other, count, stepping in theirs if other == name]
            if len(set(seen)) > 1 or any(stepping for _, stepping in seen):
                self._run.note(
                    f"{name} was stopped in the middle of an optimizer step: its shards may be one step apart; to be "
                    "exact, load a checkpoint."
                )

    def _about_to_step(self, optimizer: Optimizer) -> None:
        for root in self._roots:
            reshard(root)  # after an evaluation the whole parameters may be there still, and would be used again
        for root in self._of(optimizer):
            steps[root].stepping = True

    def _train(self, roots: Sequence[nn.Module], optimizer: Optimizer | None = None) -> None:
        parts = [part for each in roots for part in callable_parts(each)]
        new = [part for part in parts if part not in steps and not isinstance(part, FSDPModule)]
        for root in new:
            check(root)
        guessed = "units" in self._guesses or bool(self._how.unit)
        units = [
            units_of(root, self._how.unit) if guessed else [] for root in new
        ]  # nothing is sharded before all of it can be
        for root, inside in zip(new, units, strict=True):
            begin_alike(root, self._how.data)
            if self._how.data is not None:
                self._shard(root, inside, optimizer)
        for root in parts:
            self._note_root(root)

    def _shard(self, root: nn.Module, units: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
        assert self._how.data is not None
        new_of = shard(root, units, self._how)
        replace_references.replace(new_of, local_variables="local-variables" in self._guesses)
        if optimizer is not None:
            shard_state(optimizer, new_of)
        count = sum(each.numel() for each in root.parameters())
        name, kinds = ownership.named_plainly([root]), ownership.named_plainly(units)
        steps.setdefault(root, Steps()).sharded_here = True
        self._summary.sharded(name, count, len(units), kinds, source_location.here(self._run.filename))

    def _note_root(self, root: nn.Module) -> None:
        steps.setdefault(root, Steps())
        if not any(root is each for each in self._roots):
            self._roots.append(root)
        device = identity.device()
        if device.type != "cpu":
            place(root, device, offload=_offloads(self._how))
            self._loaders.device = device

    def _say_if_nothing_is_spread(self, root: nn.Module) -> None:
        if (
            self._how.model
            and steps[root].count == 1
            and not any(_is_spread(each, self._how.data) for each in root.parameters())
        ):
            self._run.note(
                f"no parameter of {ownership.named_plainly([root])} is spread over the mesh, so all ranks do the same: "
                'use torch.distributed.tensor.parallel.parallelize_module(model, mesh["model"], plan)'
            )


def _has_any(root: nn.Module, parameters: Sequence[torch.Tensor]) -> bool:
    theirs = {id(each) for each in parameters}
    return any(id(each) in theirs for each in root.parameters())


def _is_spread(parameter: torch.Tensor, data: DeviceMesh | None) -> bool:
    return isinstance(parameter, DTensor) and (data is None or parameter.device_mesh.ndim > 1)


def callable_parts(module: nn.Module) -> list[nn.Module]:
    """The module, or what a container without a `forward` holds: FSDP acts when a module is called."""
    if has_forward(module):
        return [module]
    if own := next(module.parameters(recurse=False), None):
        raise DistributedError(
            f"{type(module).__name__} has no forward(), but a parameter of its own, of shape {tuple(own.shape)}: "
            "nobody calls it, so that cannot be gathered. Put the parameter into a module that is called."
        )
    return [
        part for child in module.children() if any(True for _ in child.parameters()) for part in callable_parts(child)
    ]


def check(root: nn.Module) -> None:
    """Refuse what `fully_shard` would refuse when half of the model is sharded."""
    name = type(root).__name__
    for key, parameter in root.named_parameters():
        if parameter.dim() == 0:
            raise DistributedError(
                f"{name}.{key} is a single number without a dimension, which cannot be sharded: give it the shape (1,)."
            )
        if not parameter.is_contiguous() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()


def begin_alike(root: nn.Module, data: DeviceMesh | None) -> None:
    """The weights of rank 0; of what is spread over other dimensions of the mesh, those of the first rank of ours."""
    tensors = [each for each in ownership.tensors_of([root], []) if not isinstance(each, DTensor) and not each.is_meta]
    every = weight_sync.fingerprints_of_all(tensors)
    if not weight_sync.same_form(every):
        raise DistributedError(
            f"{type(root).__name__} has other parameters on one rank than on another: build it alike on all of them."
        )
    if any(each != every[0] for each in every):
        weight_sync.take_from_rank_0(tensors)
    for each in root.parameters():
        if data is not None and isinstance(each, DTensor):
            dist.broadcast(each.to_local().detach(), group=data.get_group(), group_src=0)


def shard(root: nn.Module, units: Sequence[nn.Module], how: ShardingPlan) -> New:
    """Shard in place, and tell which parameters have become which."""
    before = [
        (module, name, parameter)
        for module in root.modules()
        for name, parameter in private.own_parameters(module).items()
        if parameter is not None
    ]
    grads = {id(parameter): parameter.grad for _, _, parameter in before}
    normalizing = _in_full_precision(root) if how.compute else []
    for module in normalizing:
        for name, buffer in module.named_buffers(recurse=False):
            private.set_buffer(module, name, buffer.float() if buffer.is_floating_point() else buffer)
    for module in (*normalizing, *units, root):
        if not isinstance(module, FSDPModule):
            policy = MixedPrecisionPolicy() if how.compute is None else _precision(module, root, how.compute)
            fully_shard(module, mesh=how.data, mp_policy=policy, offload_policy=_offload(how))
    root.register_forward_hook(_reshard_after_evaluation)
    for module in (*units, root):
        listen(module)
    new_of: New = {id(old): (old, private.own_parameters(module)[name]) for module, name, old in before}
    for old, new in new_of.values():
        if (grad := grads[id(old)]) is not None:
            new.grad = _sharded_like(grad, new)
    return new_of


def _in_full_precision(root: nn.Module) -> list[nn.Module]:
    """Batch normalization, which sums over a batch, as torch's autocast treats it."""
    return [module for module in root.modules() if isinstance(module, private.BatchNorm) and module is not root]


def _precision(module: nn.Module, root: nn.Module, compute: torch.dtype) -> MixedPrecisionPolicy:
    if isinstance(module, private.BatchNorm):
        return MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=compute)
    output = torch.float32 if module is root else None
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, output_dtype=output)


def _reshard_after_evaluation(root: Any, *_: object) -> None:
    """FSDP (2.13) leaves the model's own parameters whole until a backward pass."""
    if not torch.is_grad_enabled():
        root.reshard()


def place(root: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Move a sharded model to the rank's device; with `offload` only its buffers, since FSDP keeps shards on the CPU
    and refuses others."""
    if not offload:
        root.to(device)
        return
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            private.set_buffer(module, name, buffer.to(device))


def _offload(how: ShardingPlan) -> OffloadPolicy:
    return CPUOffloadPolicy() if _offloads(how) else OffloadPolicy()


def _offloads(how: ShardingPlan) -> bool:
    return how.offload and how.data is not None and how.data.device_type != "cpu"


def shard_state(optimizer: Optimizer, new_of: New) -> None:
    """What an optimizer has gathered for a parameter is divided as the parameter is."""
    for _, new in new_of.values():
        for key, value in optimizer.state.get(new, {}).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == new.shape:
                optimizer.state[new][key] = _sharded_like(value, new)


def _sharded_like(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    local = like.to_local()
    return distribute_tensor(value.to(local.device), like.device_mesh, like.placements)
