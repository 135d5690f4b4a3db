"""Pipeline parallelism: a model in stages, each on another rank, trained by torch's schedules
(`torch.distributed.pipelining`).

The stages exchange the shapes and types of the tensors that they pass on as JSON: if torch does not get them, it
exchanges them as pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.parallel.gradients import average_gradients
from jupyter_distrib.worker.autoparallel import object_collectives

_SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """This rank's stage of a model. Along the mesh's dimension `data`, if it has one, gradients are averaged.

    Args:
        mesh: A mesh with a dimension `pp`, as the cell finds it.
        stages: The parts of the model in order, one for each rank of the dimension; this rank keeps its own.
        loss: Computes the loss of the last stage's output and the target, as a mean over the samples.
        microbatches: Number of parts into which a batch is split.
        schedule: `1f1b` or `gpipe`.

    Raises:
        DistributedError: The numbers do not fit, or there is no such schedule.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        stages: Sequence[nn.Module],
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        microbatches: int,
        schedule: str = "1f1b",
    ) -> None:
        names = mesh.mesh_dim_names or ()
        if "pp" not in names:
            raise DistributedError(
                f"Pipeline needs a mesh with a dimension pp, such as --mesh pp=2; this one has {', '.join(names)}."
            )
        self._along, self._data = mesh["pp"], mesh["data"] if "data" in names else None
        self.stage, self.stages = self._along.get_local_rank(), self._along.size()
        if len(stages) != self.stages:
            raise DistributedError(
                f"Pipeline was given {len(stages)} stages, and the mesh has {self.stages} ranks along pp: give one "
                "stage for each."
            )
        if schedule not in _SCHEDULES:
            raise DistributedError(f"Pipeline has the schedules {' and '.join(_SCHEDULES)}; got {schedule!r}.")
        if microbatches < self.stages:
            raise DistributedError(
                f"Pipeline needs at least as many microbatches as stages, {self.stages}; got {microbatches}."
            )
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index()) if _on_gpu(mesh) else "cpu"
        self.module = stages[self.stage].to(device)
        self._device = torch.device(device)
        self._loss, self._microbatches, self._kind = loss, microbatches, _SCHEDULES[schedule]
        self._schedule: Any = None
        self._synchronize_weights()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's stage, for its optimizer."""
        return self.module.parameters()

    def step(self, inputs: torch.Tensor, target: Any) -> float:
        """Run the forward and backward passes of a batch, and return the mean loss on every rank. The optimizer steps
        afterwards.

        Ranks that differ in `pp` only are given the same batch: the first stage reads the inputs, the last one the
        target.
        """
        losses: list[torch.Tensor] = []
        inputs = inputs.to(self._device)
        self._schedule = self._schedule or self._made_for(inputs)
        args = (inputs,) if self.stage == 0 else ()
        is_last = self.stage == self.stages - 1
        keywords = {"target": target.to(self._device), "losses": losses} if is_last else {}
        self._schedule.step(*args, **keywords)
        if self._data is not None:
            average_gradients(self.parameters(), self._data)
        mean = torch.stack(losses).mean().detach() if is_last else torch.zeros((), device=self._device)
        dist.broadcast(mean, group=self._along.get_group(), group_src=self.stages - 1)
        if self._data is not None:
            dist.all_reduce(mean, group=self._data.get_group())
            mean /= self._data.size()
        return float(mean)

    def _made_for(self, inputs: torch.Tensor) -> Any:
        """Return the schedule for batches of this shape."""
        group = self._along.get_group()
        taken, given = _examples(self.module, inputs.tensor_split(self._microbatches)[0], group)
        stage = PipelineStage(
            self.module, self.stage, self.stages, self._device, input_args=taken, output_args=given, group=group
        )
        return self._kind(stage, self._microbatches, loss_fn=self._loss)

    def _synchronize_weights(self) -> None:
        """Give all ranks of one stage the same weights."""
        if self._data is not None:
            for each in self.module.state_dict().values():
                dist.broadcast(each, group=self._data.get_group(), group_src=0)


def _on_gpu(mesh: DeviceMesh) -> bool:
    return mesh.device_type != "cpu"


_Tensors = tuple[torch.Tensor, ...]


def _examples(module: nn.Module, first: torch.Tensor, group: Any) -> tuple[_Tensors, _Tensors]:
    """Return meta tensors like the inputs and outputs of this rank's stage. Buffers keep their values.

    Args:
        module: This rank's stage.
        first: The first part of the batch, on the device of the module; only the first stage reads it.
        group: The ranks of the stages, in their order.

    Raises:
        DistributedError: The stage returns something other than tensors.
    """
    stage, stages = dist.get_rank(group), dist.get_world_size(group)
    forms = [_form(first)]
    for turn in range(stage):
        forms = object_collectives.gather(None, group)[turn]
    taken = tuple(map(_made, forms))
    content = [torch.zeros_like(each, device=first.device).requires_grad_(each.requires_grad) for each in taken]
    given = [_form(tensor) for tensor in _given(module, content if stage else [first], stage)]
    for turn in range(stage, stages - 1):
        object_collectives.gather(given if turn == stage else None, group)
    return taken, tuple(map(_made, given))


def _given(module: nn.Module, taken: list[torch.Tensor], stage: int) -> _Tensors:
    kept = [buffer.clone() for buffer in module.buffers()]
    with torch.enable_grad():
        given = module(*taken)
    with torch.no_grad():
        for buffer, content in zip(module.buffers(), kept, strict=True):
            buffer.copy_(content)
    tensors = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    other = [type(each).__name__ for each in tensors if type(each) is not torch.Tensor]
    if other:
        raise DistributedError(
            f"Pipeline needs stages that return a tensor or a tuple of tensors; stage {stage} returned {other[0]}."
        )
    return tensors


def _form(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), tensor.requires_grad]


def _made(form: list[Any]) -> torch.Tensor:
    name, shape, stride, requires_grad = form
    return torch.empty_strided(shape, stride, dtype=getattr(torch, name), device="meta", requires_grad=requires_grad)
