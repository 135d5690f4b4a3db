"""The strategy `tp`: the ranks form a mesh; along its dimension `model` the cell distributes a model by torch's plans
(`torch.distributed.tensor.parallel.parallelize_module`), and along its dimension `data` the model is sharded as by
`fsdp`.

Ranks that differ in `model` only see the same data. With a dimension `pp`, `cp` or `ep` the cell distributes its model
itself (`jupyter_distrib.parallel` helps): it gets the mesh, and nothing else is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.interfaces.strategy import StrategyRun, StrategyStart
from jupyter_distrib.options import Option, shown
from jupyter_distrib.strategies.ddp import BATCH, NO_GUESS, SHARD_EVAL
from jupyter_distrib.strategies.fsdp import CPU_OFFLOAD, PRECISION, UNIT, FullyShardedStrategy


def dimensions(name: str, text: str) -> tuple[tuple[str, int], ...]:
    """Parse `data=2,model=4` for an option of this name."""
    parts = [part.partition("=") for part in text.split(",")]
    wanted = f"{name} must be names and sizes of dimensions, such as data=2,model=2; got {shown(text)}"
    if not all(key.strip().isidentifier() and size.strip().isdecimal() and int(size) for key, _, size in parts):
        raise OptionsError(wanted)
    shape = tuple((key.strip(), int(size)) for key, _, size in parts)
    if len(dict(shape)) < len(shape):
        raise OptionsError(f"{name} names a dimension twice; got {shown(text)}")
    return shape


BY_HAND = frozenset({"pp", "cp", "ep"})
"""Dimensions along which a cell distributes a model itself: stages, parts of sequences, experts."""
MESH = Option(
    flag="--mesh",
    metavar="NAME=N,...",
    meaning="the dimensions of the mesh, which the cell finds as `mesh`; `data` divides the batches",
    default="model=N, all ranks",
    read=dimensions,
    synonyms=("device-mesh", "mesh-shape"),
)


class TensorParallelStrategy(FullyShardedStrategy):
    """Parts of a model on different ranks, by torch's plans."""

    options = (MESH, UNIT, PRECISION, CPU_OFFLOAD, BATCH, SHARD_EVAL, NO_GUESS)
    summary = "spread over the mesh by the plan that the cell gives"

    @classmethod
    def effects(cls, options: Mapping[str, str]) -> tuple[str, str]:
        names = {*dict(dimensions("--mesh", options.get("mesh", "model=1")))}
        if names & BY_HAND:
            return "spread over the mesh by the cell itself", "whole on every rank, the cell divides it"
        if "data" not in names:
            return cls.summary, "whole on every rank, since the mesh has no dimension `data`"
        sharded, data = super().effects(options)
        return sharded.replace(cls.summary, f"{cls.summary}, and sharded over its dimension `data`"), data

    @classmethod
    def ready(cls, options: Mapping[str, str], start: StrategyStart) -> Mapping[str, str]:
        """Return its options. Refuse a mesh for another number of ranks."""
        if start.ranks is not None and "mesh" in options:
            wanted = math.prod(size for _, size in dimensions("--mesh", options["mesh"]))
            if wanted != start.ranks:
                raise OptionsError(
                    f"--mesh {options['mesh']} needs {wanted} ranks, and there are {start.ranks}: run the cell with "
                    f"{wanted} ranks, or give a mesh for {start.ranks}."
                )
        return super().ready(options, start)

    def begin(self, run: StrategyRun) -> None:
        from jupyter_distrib.interfaces import identity

        given = run.options.get("mesh", f"model={identity.world_size()}")
        shape = dimensions("--mesh", given)
        if not BY_HAND & {name for name, _ in shape}:
            return self._train_over(run, shape)
        self._make_mesh(run, shape)
        run.note(
            f"the mesh has a dimension {', '.join(name for name, _ in shape if name in BY_HAND)}: the cell distributes "
            "its model and its data itself, and neither is changed"
        )
