"""What is told of a cluster's nodes. No Ray: it is given what `ray.nodes()` gives."""

from __future__ import annotations

from dataclasses import replace

from jupyter_distrib.pools.ray.serve import statuses
from jupyter_distrib.wire import messages as m

NODES = [
    {
        "NodeID": "b",
        "NodeManagerAddress": "10.0.0.8",
        "Resources": {"CPU": 16.0, "memory": 64e9, "GPU": 2.0, "accelerator_type:A10": 1.0, "node:10.0.0.8": 1.0},
    },
    {"NodeID": "a", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 4.0, "memory": 8e9}},
]


SMALL = m.NodeStatus(name="10.0.0.7", cpus=4.0, memory_bytes=8_000_000_000)
LARGE = m.NodeStatus(name="10.0.0.8", cpus=16.0, memory_bytes=64_000_000_000, gpus=2, gpu_type="A10")


def test_each_node_is_reported_with_what_is_free() -> None:
    free = {"a": {"CPU": 1.0}, "b": {"CPU": 16.0, "GPU": 1.0}}
    assert statuses(NODES, free) == (
        replace(SMALL, free_cpus=1.0, free_gpus=0),
        replace(LARGE, free_cpus=16.0, free_gpus=1),
    )


def test_what_is_free_may_not_be_known() -> None:
    assert statuses(NODES, {}) == (SMALL, LARGE)
