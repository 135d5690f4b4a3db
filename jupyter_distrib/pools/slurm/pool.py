"""Ranks in an allocation of Slurm, with `srun` as the way to each of its nodes."""

from __future__ import annotations

import os
import shutil
from typing import ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option
from jupyter_distrib.pools.base import IDLE, PACKAGES, Capabilities, Lost, Sink
from jupyter_distrib.pools.command.pool import COPY_FILES, INTERFACE, NODES, PYTHON_THERE, connected
from jupyter_distrib.pools.server_link import LocalNode
from jupyter_distrib.wire import messages as m


def _own(name: str, metavar: str, meaning: str) -> Option:
    return Option(flag=f"--{name}", metavar=metavar, meaning=meaning, default="Slurm's")


class SlurmPool:
    """The pool of a Slurm cluster."""

    kind = "slurm"
    options: ClassVar = (
        _own("partition", "NAME", "the partition"),
        _own("account", "NAME", "the account that is charged"),
        _own("qos", "NAME", "the quality of service"),
        _own("time", "TIME", "the time limit: 30, 2:00:00, 1-0"),
        _own("gres", "GRES", "generic resources of each node: gpu:4"),
        _own("constraint", "FEATURES", "the features that nodes must have"),
        Option(flag="--salloc", metavar="OPTIONS", meaning="further options of salloc: '--mem=4G --exclusive'"),
        PYTHON_THERE,
        NODES,
        INTERFACE,
        IDLE,
        *PACKAGES,
        COPY_FILES,
    )
    capabilities: ClassVar = Capabilities(streams_content=True)

    def __init__(self, **options: str) -> None:
        self._options = {"python": "python3", **options}

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        if shutil.which("srun") is None:
            raise PoolError(
                "the slurm pool needs srun, which is not here: start the notebook on a node of the cluster."
            )
        job = os.environ.get("SLURM_JOB_ID", "")  # a coordinator is of one allocation, or makes its own
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        return connected(self.kind, {**self._options, "job": job, "job_nodes": nodes}, hello, sink, lost)
