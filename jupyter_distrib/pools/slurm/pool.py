"""Ranks in an allocation of Slurm, with `srun` as the way to each of its nodes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import Option, not_an_option, one_line, shown
from jupyter_distrib.pools.command.hosts_pool import SHARED, HostsPool

if TYPE_CHECKING:
    from jupyter_distrib.pools.slurm.reservation import SlurmCluster
    from jupyter_distrib.system.call_soon import CallSoon
    from jupyter_distrib.system.event_loop import Loop


_TIME = re.compile(r"(\d{1,5}-)?\d{1,7}(:\d{1,2}){0,2}|unlimited|infinite", re.IGNORECASE)
"""A time as in `man sbatch`."""


def time_limit(name: str, text: str) -> str:
    """Read a time limit as Slurm writes it."""
    if not _TIME.fullmatch(text):
        raise OptionsError(f"{name} must be a time as Slurm writes it: 30 (minutes), 2:00:00 or 1-0; got {shown(text)}")
    return text


def _own(name: str, metavar: str, meaning: str, read: Callable[[str, str], str] = not_an_option) -> Option:
    return Option(flag=f"--{name}", metavar=metavar, meaning=meaning, read=read, default="Slurm's", main=True)


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
        _own("time", "TIME", "the time limit: 30, 2:00:00, 1-0", time_limit),
        _own("gres", "GRES", "generic resources of each node: gpu:4"),
        _own("constraint", "FEATURES", "the features that nodes must have"),
        Option(
            flag="--salloc",
            metavar="OPTIONS",
            meaning="further options of salloc: '--mem=4G --exclusive'",
            read=one_line,
        ),
        *SHARED,
    )

    def check(self) -> dict[str, str]:
        job = os.environ.get("SLURM_JOB_ID", "")  # a coordinator belongs to one allocation, or requests its own
        needed = ("srun", "scontrol", *(() if job else ("salloc", "scancel")))
        if missing := next((name for name in needed if shutil.which(name) is None), ""):
            raise PoolError(
                f"the slurm pool needs {missing}, which is not installed here: start the notebook on a node of the "
                "cluster with all of Slurm's commands, or add their folder to PATH."
            )
        return self.given | {"job": job}

    def try_out(self) -> str:
        """Return a sentence on when Slurm would start a job of one rank; starts no job. Raises `PoolError`."""
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
