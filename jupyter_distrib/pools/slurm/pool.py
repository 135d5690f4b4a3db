"""Ranks in an allocation of Slurm, with `srun` as the way to each of its nodes."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option
from jupyter_distrib.pools.command.hosts_pool import SHARED, HostsPool

if TYPE_CHECKING:
    from jupyter_distrib.pools.slurm.reservation import SlurmCluster
    from jupyter_distrib.system.call_soon import CallSoon
    from jupyter_distrib.system.event_loop import Loop


def _own(name: str, metavar: str, meaning: str) -> Option:
    return Option(flag=f"--{name}", metavar=metavar, meaning=meaning, default="Slurm's", main=True)


class SlurmPool(HostsPool):
    """The pool of a Slurm cluster, whose hosts are the nodes of an allocation."""

    kind = "slurm"
    engine = "Slurm"
    capabilities: ClassVar = replace(HostsPool.capabilities, read_variables={"job": "SLURM_JOB_ID"})
    needed: ClassVar = {}
    options: ClassVar = (
        _own("partition", "NAME", "the partition"),
        _own("account", "NAME", "the account that is charged"),
        _own("qos", "NAME", "the quality of service"),
        _own("time", "TIME", "the time limit: 30, 2:00:00, 1-0"),
        _own("gres", "GRES", "generic resources of each node: gpu:4"),
        _own("constraint", "FEATURES", "the features that nodes must have"),
        Option(flag="--salloc", metavar="OPTIONS", meaning="further options of salloc: '--mem=4G --exclusive'"),
        *SHARED,
    )

    def check(self) -> dict[str, str]:
        if shutil.which("srun") is None:
            raise PoolError(
                "the slurm pool needs srun, which is not here: start the notebook on a node of the cluster."
            )
        job = os.environ.get("SLURM_JOB_ID", "")  # a coordinator is of one allocation, or makes its own
        return self.given | {"job": job}

    def try_out(self) -> str:
        """Return a sentence on when Slurm would start a job of one rank; no job is made. Raises `PoolError`."""
        if job := self.check()["job"]:
            return f"The notebook is in Slurm job {job}, on whose nodes the ranks run."
        from jupyter_distrib.pools.slurm.allocation import would_start

        return would_start(self.given)

    @property
    def title(self) -> str:
        return f"Slurm job {self.given['job']}" if self.given["job"] else "Slurm"

    def reach(self, loop: Loop, calls: CallSoon, archive: Future[bytes]) -> SlurmCluster:
        from jupyter_distrib.pools.slurm.reservation import SlurmCluster

        return SlurmCluster(self.given, loop, calls, archive)
