"""Makes the order that starts a rank, and starts a rank as a program of its own. Runs in the agent's loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.system.launch import AGENT
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


def order(command: m.OpenWorkerGroup, local_rank: int, count: int, gpus: Sequence[Gpu], cores: int) -> m.WorkerOrder:
    """Return the order that starts one rank of a worker group.

    Args:
        command: The command that asked for the worker group.
        local_rank: Number of the rank on this node.
        count: Number of ranks started for this worker group, with this one: a replaced rank is another worker.
        gpus: GPUs of the worker group, one for each local rank; none for CPU ranks.
        cores: Number of cores of this node that its ranks share.
    """
    size = command.size
    return m.WorkerOrder(
        group=command.group,
        worker=f"{command.group}.{local_rank}.{count}",
        agent_pid=os.getpid(),
        agent=os.environ.get(AGENT, ""),
        rank=command.first_rank + local_rank,
        world_size=command.world_size or size,
        local_rank=local_rank,
        local_world_size=size,
        node_rank=command.node_rank,
        interface=command.interface,
        device=_device(local_rank, gpus),
        visible_devices=_visible(local_rank, gpus, replaced=count > size),
        threads=max(1, cores // size),
    )


def _visible(local_rank: int, gpus: Sequence[Gpu], *, replaced: bool) -> str | None:
    """Return the rank's CUDA_VISIBLE_DEVICES: the GPUs of all ranks, so that they reach one another; of MIG slices only
    its own, since CUDA shows a process no more than one.

    A rank that replaces another has UUIDs there: if the driver has lost a GPU since, numbers have moved.
    """
    if not gpus:
        return None
    own = gpus[local_rank]
    if own.slice is not None:
        return own.uuid
    return ",".join(gpu.lasting_name if replaced else gpu.called for gpu in gpus if gpu.slice is None)


def _device(local_rank: int, gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "cpu"
    whole = [gpu for gpu in gpus if gpu.slice is None]
    own = gpus[local_rank]
    return f"{own.kind}:{whole.index(own) if own in whole else 0}"


def as_program(rank: Rank, load_env: dict[str, str]) -> int:
    """Start a rank as a program of its own, for variables that are read when a program loads; return its process id."""
    env = {**os.environ, **load_env}
    with Descriptors(rank.descriptors.take()) as fds:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_distrib.worker.process.standalone", *map(str, fds)],
            pass_fds=tuple(fds),
            env=env,
            cwd="/",
        )
    process.returncode = 0  # the loop reaps it, not subprocess
    return process.pid
