"""The strategy `fsdp`: each rank holds its part of every parameter and sees its share of the data.

Makes the default process group and a mesh over all ranks before the cell, which finds it as `mesh`, and shards the
model of an unchanged training cell by torch's `fully_shard` when its optimizer is built. Objects given to `prepare`
are treated like the ones that are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces.strategy import StrategyRun, TrainingStrategy
from jupyter_distrib.options import Option, switch
from jupyter_distrib.strategies.ddp import BATCH, NO_GUESS, SHARD_EVAL

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from jupyter_distrib.worker.autoparallel.training.sharded import ShardedTraining

UNIT = Option(
    flag="--fsdp-unit",
    metavar="CLASS",
    meaning="gather and free modules of this class (or of these, joined by commas) one at a time",
    default="the blocks that the model repeats, if they are large",
    synonyms=("wrap", "auto-wrap-policy", "transformer-layer"),
)
PRECISION = Option(
    flag="--precision",
    metavar="TYPE",
    meaning="compute in this type; the sharded weights and the sums of gradients stay as they are",
    choices=("fp32", "bf16"),
    default="the type of the weights",
    synonyms=("mixed-precision", "dtype"),
)
CPU_OFFLOAD = Option(
    flag="--cpu-offload",
    meaning="keep shards, gradients and optimizer state in the CPU's memory",
    read=switch,
    synonyms=("offload",),
)


class FullyShardedStrategy(TrainingStrategy):
    """Sharded data parallelism."""

    options: ClassVar[tuple[Option, ...]] = (UNIT, PRECISION, CPU_OFFLOAD, BATCH, SHARD_EVAL, NO_GUESS)
    shards = True
    summary = "sharded over the ranks"
    training: ShardedTraining | None = None

    @classmethod
    def effects(cls, options: Mapping[str, str]) -> tuple[str, str]:
        _, data = super().effects(options)
        units = options.get("fsdp_unit")
        return f"{cls.summary}, " + (f"in units of {units}" if units else "large blocks that it repeats as units"), data

    def begin(self, run: StrategyRun) -> None:
        from jupyter_distrib.interfaces import identity

        self._train_over(run, (("data", identity.world_size()),))

    def returning(self, value: object) -> None:
        if self.training is not None:
            self.training.returning(value)

    def _train_over(self, run: StrategyRun, shape: tuple[tuple[str, int], ...]) -> None:
        """Create the group and the mesh, and install the hooks for the cell."""
        import torch

        from jupyter_distrib.worker.autoparallel.training.sharded import ShardedTraining
        from jupyter_distrib.worker.autoparallel.training.sharding import ShardingPlan

        mesh, met_again = self._make_mesh(run, shape)
        names = mesh.mesh_dim_names or ()
        how = ShardingPlan(
            data=mesh["data"] if "data" in names else None,
            model=names != ("data",),
            unit=run.options.get("fsdp_unit", ""),
            compute={"bf16": torch.bfloat16, "fp32": torch.float32}.get(run.options.get("precision", "")),
            offload="cpu_offload" in run.options,
        )
        self.training = training = ShardedTraining(run, how)
        training.begin(met_again=met_again)

    def _make_mesh(self, run: StrategyRun, shape: tuple[tuple[str, int], ...]) -> tuple[DeviceMesh, bool]:
        """Create the group and the mesh; return the mesh, and whether kept values may differ between ranks."""
        from jupyter_distrib.interfaces import identity
        from jupyter_distrib.worker.autoparallel.training import meshes
        from jupyter_distrib.worker.pytorch import process_group, randomness

        if not run.everyone:
            raise DistributedError(
                "this strategy spreads a model over all ranks, and --on runs the cell on some of them: leave --on out, "
                "or use --strategy none."
            )
        met_again = process_group.current.ensure(process_group.default_backend(identity.device()))
        randomness.adopt_rank_0(run.note)
        met_again = meshes.point_to_current_groups() or met_again
        mesh = meshes.mesh(shape)
        run.names.setdefault("mesh", mesh)
        return mesh, met_again
