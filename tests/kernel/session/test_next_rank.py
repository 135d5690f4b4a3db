"""What the next rank of a pool takes."""

from __future__ import annotations

import pytest

from jupyter_distrib.kernel.session.pools.next_rank import next_rank
from jupyter_distrib.wire import messages as m


def node(name: str = "a", **more: object) -> m.NodeStatus:
    return m.NodeStatus(name=name, cpus=4.0, memory_bytes=8, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (None, ""),
        ((), ""),
        ((node(),), "at once, on the CPU"),
        ((node(free_cpus=3.0), node("b", free_cpus=0.0)), "at once: 3 of 8 CPUs are free"),
        ((node(gpus=2, free_gpus=1), node("b", gpus=2, free_gpus=0)), "at once: 1 of 4 GPUs is free"),
        ((node(gpus=2), node("b", gpus=2, free_gpus=0)), ""),
        ((node(free_cpus=4.0, state="drained"),), "no node can be used now"),
        (
            (node(gpus=1, free_gpus=0, holders=("ada, 1 GPU",)), node("b", free_cpus=4.0)),
            "the GPU is held (ada, 1 GPU): wait for one with --wait S, or give back yours with %distributed_pool stop",
        ),
    ],
)
def test_nodes_tell(nodes: tuple[m.NodeStatus, ...] | None, told: str) -> None:
    assert next_rank(m.ServerStatus(state="", nodes=nodes)) == told


def test_the_engine_knows_better() -> None:
    assert next_rank(m.ServerStatus(state="", nodes=(node(),), next_rank="at once, on n1")) == "at once, on n1"


def test_the_holders_of_one_machines_gpus_are_named() -> None:
    held = m.GpuStatus(index=0, number="0", name="A10", memory_bytes=1, used_bytes=1, holder="b.ipynb since 12:31")
    told = next_rank(m.ServerStatus(state="", nodes=(node(gpus=2, free_gpus=0),), gpus=(held, held)))
    assert told.startswith("all 2 GPUs are held (b.ipynb since 12:31): wait for one with --wait S")
