"""Training through DeepSpeed engines in one run, one engine for each model with its optimizer.

an optimizer is built      its model becomes an engine's, with the weights of rank 0
the model is called        through the engine
backward()                 by the engine, or by the hooks that the engine has put on the model's output
optimizer step             the engine's; `zero_grad` is the engine's too
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.libraries.deepspeed import takes_backward
from jupyter_distrib.worker.autoparallel import ownership, source_location
from jupyter_distrib.worker.autoparallel.data.change_summary import ChangeSummary
from jupyter_distrib.worker.autoparallel.data.loaders import Loaders
from jupyter_distrib.worker.autoparallel.data.shard_samplers import ShardChoice
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.autoparallel.training.data_parallel import check_together
from jupyter_distrib.worker.autoparallel.training.hooks import OptimizerTraining, TrainingHooks
from jupyter_distrib.worker.pytorch import process_group

_ENGINE = "_jupyter_distrib_engine"
"""Attribute of an optimizer that holds its engine, which thus lives as long as the optimizer."""


class EngineSummary(ChangeSummary):
    """Summary of a run whose configuration may set the number of samples in a rank's batch."""

    def __init__(self, size: int, samples: int | None) -> None:
        super().__init__(size)
        self._samples = samples

    def divided(self, loader: DataLoader[Any], share: DataLoader[Any], place: str) -> None:
        if self._samples is not None and share.batch_size not in (None, self._samples):
            raise DistributedError(
                f"the loader of {place} gives each rank batches of {share.batch_size}, and DeepSpeed's configuration "
                f"says {self._samples} (train_micro_batch_size_per_gpu): change one of them."
            )
        super().divided(loader, share, place)


class EngineTraining:
    """The `ModelDistributor` that trains through engines; `ModelDistributor` describes the calls of its methods.

    Args:
        config: DeepSpeed's configuration, complete.
        samples: Number of samples in a rank's batch in the configuration; None: as the loaders say.
    """

    def __init__(self, run: StrategyRun, config: Mapping[str, Any], samples: int | None) -> None:
        self._run, self._config = run, config
        self._stage: int = config["zero_optimization"]["stage"]
        how = "global" if run.options.get("batch") == "global" else "per-rank"
        size = identity.world_size()
        self._summary = EngineSummary(size, samples)
        part = ShardChoice(rank=identity.rank(), size=size, batch=how, together=True)  # type: ignore[arg-type]
        self._loaders = Loaders(self, part, run, self._summary)
        self._hooks = TrainingHooks(run, self, self._loaders)
        self._patches = Patches()
        self._engines: dict[int, Any] = {}
        """Engines of this run, by the id of their model."""
        self._routed: list[Optimizer] = []
        self._inside = False
        """Whether an engine is active, so that calls of its model and optimizer come from it."""

    def begin(self) -> None:
        import deepspeed  # type: ignore[import-not-found,unused-ignore]
        from deepspeed.runtime.engine import DeepSpeedEngine  # type: ignore[import-not-found,unused-ignore]

        deepspeed.init_distributed()
        process_group.current.asked = False  # this strategy has called it, not the cell
        self._hooks.begin()
        self._patches.replace(nn.Module, "__call__", self._calling)
        self._patches.replace(nn.Module, "state_dict", self._reading_state)
        for name in ("forward", "backward", "step", "save_checkpoint", "load_checkpoint"):
            self._patches.replace(DeepSpeedEngine, name, self._working)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._patches.replace(nn.utils, name, self._clipping)
        self._hooks.find_optimizers()

    def end(self, *, ok: bool) -> None:
        self._patches.undo()
        self._hooks.end(ok=ok)
        for optimizer in self._routed:
            for name in ("step", "zero_grad"):
                if getattr(vars(optimizer).get(name), "__func__", None) in (_step, _zero_grad):
                    delattr(optimizer, name)
            vars(optimizer).pop("_jupyter_distrib_training", None)
        if ok:
            self._report_changes()
            if not self._engines:
                self._hooks.note_if_apart()

    def adapted(self, code: CodeType) -> CodeType:
        """Return the cell's code with this rank's device in place of the first one."""
        return self._hooks.device_remapping.adapted(code)

    def total(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values summed over ranks if each reads a share of an evaluation's data, else unchanged."""
        return self._hooks.total(values)

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Return the prepared objects, with the engine in place of a model."""
        check_together([each for each in objects if not hasattr(each, _ENGINE)])
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        for optimizer in optimizers:
            self._hooks.adopt(optimizer, fresh=True)
        for model in (each for each in objects if isinstance(each, nn.Module)):
            if not optimizers and id(model) not in self._engines:
                self._make(model, None)
        return tuple(map(self._prepared, objects))

    def returning(self, value: object) -> None:
        """Refuse a value that the engine has bound to its rank."""
        parts = [each for each in _parts(value) if isinstance(each, nn.Module)]
        if any(each in self._engines.values() or id(each) in self._engines for each in parts):
            raise DistributedError(
                "the cell ends with a model that DeepSpeed's engine has bound to its rank: end it with "
                "model.state_dict(), which is whole, or keep the model on the ranks with --keep model,optimizer."
            )

    def check_checkpoint(self, function: str, objects: Mapping[str, Any]) -> None:
        """Refuse objects that only DeepSpeed can write or read."""
        for name, item in objects.items():
            divided = isinstance(item, Optimizer) and hasattr(item, _ENGINE) and self._stage
            if divided or item in self._engines.values() or (self._stage == 3 and id(item) in self._engines):
                raise DistributedError(
                    f"jupyter_distrib.{function}({name}=...): ZeRO divides it among the ranks, and DeepSpeed keeps it "
                    f"in a form of its own: use engine.{function}_checkpoint(path), with the engine that "
                    "jupyter_distrib.prepare(model, optimizer) returns."
                )

    # ------------------------------------------------------------------------------------------------ ModelDistributor

    @property
    def active(self) -> bool:
        return bool(self._engines)

    @property
    def in_training(self) -> bool:
        return any(engine.module.training for engine in self._engines.values())

    @property
    def models(self) -> Sequence[nn.Module]:
        return ()  # their weights are the engine's: ZeRO may divide them

    def expect(self, modules: Sequence[nn.Module]) -> None:
        raise DistributedError(
            f"{ownership.named(modules)} has layers without a shape, such as LazyLinear: call it once before the "
            "optimizer is built, or use --strategy ddp."
        )

    def adopt(self, training: OptimizerTraining) -> None:
        optimizer, name = training.optimizer, type(training.optimizer).__name__
        if hasattr(optimizer, _ENGINE):
            return self.recognise(optimizer)
        at = f" ({training.place})" if training.place else ""
        if training.loose or len(training.roots) != 1:
            raise DistributedError(
                f"{name}{at} trains {len(training.roots)} models and {len(training.loose)} tensors that belong to no "
                "model, and an engine of DeepSpeed has one model: put all of it into one torch.nn.Module."
            )
        if not training.fresh and optimizer.state and self._stage:
            raise DistributedError(
                f"{name} has trained already, and ZeRO cannot divide the state that it has: build it in this cell, or "
                "use --zero 0."
            )
        if "optimizer" in self._config:
            raise DistributedError(
                f"{name}{at} is built by the cell, and DeepSpeed's configuration names an optimizer, too: leave one of "
                "them out. With the configuration's, call engine = jupyter_distrib.prepare(model)."
            )
        self._make(training.roots[0], optimizer)

    def recognise(self, optimizer: Optimizer) -> None:
        if (engine := getattr(optimizer, _ENGINE, None)) is not None:
            self._use(engine, optimizer)

    def yield_to(self, module: nn.Module) -> None:
        if any(id(part) in self._engines for part in module.modules()):
            raise DistributedError(
                f"{type(module).__name__} is trained by DeepSpeed already: leave out DistributedDataParallel, or use "
                "--strategy ddp."
            )

    def check_second_derivative(self, outputs: Sequence[torch.Tensor]) -> None:
        """Do nothing: what a backward pass may be is up to DeepSpeed's engine."""

    def backward(self, run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        self._report_changes()
        engines = list(self._engines.values())
        if self._inside or all(takes_backward(engine) for engine in engines):
            run()
        elif len(engines) == 1 and len(tensors) == 1:
            engines[0].backward(tensors[0])
        else:
            raise DistributedError("ZeRO stage 0 trains one model with one loss in a cell: use --zero 1, 2 or 3.")
        return bool(engines)

    def stepped(self, optimizer: Optimizer) -> None:
        """Do nothing, since the engine completes its step itself."""

    # ------------------------------------------------------------------------------------------------ inside

    def _report_changes(self) -> None:
        if (news := self._summary.news()) and identity.rank() == 0:
            self._run.note(news)

    def _make(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine

        config = dict(self._config)
        owns_boundary = hasattr(DeepSpeedEngine, "managed_gradient_accumulation")
        if self._stage and owns_boundary and config.get("gradient_accumulation_steps", 1) == 1:
            config.setdefault("managed_gradient_accumulation", False)  # the loop decides when it steps
        given = [each for each in model.parameters() if each.requires_grad] if optimizer is None else None
        self._inside = True
        try:
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, model_parameters=given, config=config, dist_init_required=False
            )
        finally:
            self._inside = False
        place = source_location.current_line(self._run.filename)
        self._summary.wrapped(f"{type(model).__name__} in DeepSpeed's engine, ZeRO stage {self._stage},", place)
        self._use(engine, optimizer)

    def _use(self, engine: Any, optimizer: Optimizer | None) -> None:
        self._engines[id(engine.module)] = engine
        self._loaders.device = None if engine.device.type == "cpu" else engine.device
        if optimizer is None or optimizer in self._routed:
            return
        setattr(optimizer, _ENGINE, engine)
        vars(optimizer)["_jupyter_distrib_training"] = self
        for name, function in (("step", _step), ("zero_grad", _zero_grad)):
            if name not in vars(optimizer):  # a scheduler wraps `step` of an optimizer that comes from the notebook
                setattr(optimizer, name, types.MethodType(function, optimizer))
        self._routed.append(optimizer)

    def _prepared(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return self._loaders.divided(item)
        return self._engines.get(id(item), item)

    def _as_engine(self, call: Callable[[], Any]) -> Any:
        before, self._inside = self._inside, True
        try:
            return call()
        finally:
            self._inside = before

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step an optimizer for the cell, or for its engine."""
        if self._inside:
            return type(optimizer).step(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = getattr(optimizer, _ENGINE)
        engine.step()
        return loss

    def _calling(self, original: Any) -> Any:
        def __call__(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:  # noqa: N807
            engine = None if self._inside or not self._engines else self._engines.get(id(module))
            if engine is None:
                return original(module, *inputs, **keywords)
            return engine(*inputs, **keywords)

        return __call__

    def _working(self, original: Any) -> Any:
        def method(engine: Any, *args: Any, **keywords: Any) -> Any:
            return self._as_engine(lambda: original(engine, *args, **keywords))

        return method

    def _reading_state(self, original: Any) -> Any:
        def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            if self._inside or self._stage != 3 or id(module) not in self._engines:
                return original(module, *args, **keywords)
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(module.parameters())):
                whole = self._as_engine(lambda: original(module, *args, **keywords))
                return {name: value.clone() for name, value in whole.items()}

        return state_dict

    def _clipping(self, original: Any) -> Any:
        def clip(*args: Any, **keywords: Any) -> Any:
            if self._engines and self._stage and not self._inside:
                raise DistributedError(
                    f"{original.__name__} finds no gradients: ZeRO has divided them among the ranks. Leave it out, and "
                    'put "gradient_clipping": 1.0 into the configuration (--config).'
                )
            return original(*args, **keywords)

        return clip


def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    training = vars(optimizer).get("_jupyter_distrib_training")
    return type(optimizer).step(optimizer, closure) if training is None else training.step(optimizer, closure)


def _zero_grad(optimizer: Any, *_: object, **__: object) -> None:
    """Do nothing: the engine clears gradients after each step, and accumulated ones must stay."""


def _parts(value: object) -> Iterable[object]:
    match value:
        case list() | tuple():
            return value
        case dict():
            return value.values()
        case _:
            return (value,)
