"""How many ranks go to which node of a Ray cluster, and what is said if they cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jupyter_distrib.coordinator.node_count import NodeCount
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.ray.placement_plan import PlacementRequest, Wanted
from jupyter_distrib.pools.ray.serve import read_wanted as wanted
from jupyter_distrib.wire import messages as m

COMMAND = m.OpenWorkerGroup(group="c", size=0, gpus=True)


def node(cpus: float, gpus: float = 0, kind: str = "") -> dict[str, Any]:
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **({f"accelerator_type:{kind}": 1.0} if kind else {})}
    return {"NodeID": f"{cpus}{gpus}{kind}", "Resources": resources}


def need(nodes: list[dict[str, Any]], wanted: Wanted | None = None, **command: Any) -> PlacementRequest:
    return PlacementRequest.of(replace(COMMAND, **command), wanted or Wanted(), nodes)


CPUS = [node(4), node(8)]
GPUS = [node(16, 2, "A10G"), node(16, 4, "H100"), node(8)]


def test_as_few_nodes_as_can_be_and_evenly() -> None:
    asked = need(CPUS, size=6, gpus=False)
    assert asked.there(CPUS) == [8, 4]
    assert asked.shapes([8, 4]) == [[6], [3, 3]]
    assert need(CPUS, size=12, gpus=False).shapes([8, 4]) == [], "not 6 and 6, nor 8 and 4"
    assert need(CPUS, Wanted(nodes=NodeCount(2)), size=5, gpus=False).shapes([8, 4]) == [[3, 2]]
    assert need(CPUS, Wanted(nodes=NodeCount(4)), size=2, gpus=False).shapes([8, 4]) == [[1, 1]]


def test_cells_that_name_no_number_get_all_gpus_or_two_cpus() -> None:
    assert need(GPUS).size([4, 2, 0]) == 6
    assert need(CPUS).size([8, 4]) == 2


def test_gpus_of_a_type_are_found_in_any_case() -> None:
    asked = need(GPUS, size=2, gpu_type="a10g")
    assert (asked.kind, asked.there(GPUS)) == ("accelerator_type:A10G", [2, 0, 0])
    assert asked.bundle(2) == {"CPU": 2.0, "GPU": 2, "accelerator_type:A10G": 0.001}


def test_a_type_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(PoolError, match=r"^--gpu-type V100, but the Ray cluster has A10G, H100; leave it out"):
        need(GPUS, size=1, gpu_type="V100")
    assert need(GPUS, size=1, gpu_type="v100", wait_s=9.0).kind == "accelerator_type:V100", "it may come"


def test_gpus_that_no_node_has_are_waited_for_if_a_number_is_asked_for() -> None:
    """A cluster may be scaled to zero; a cell that names no number takes what there is."""
    assert need(CPUS, size=4, wait_s=9.0).gpus
    assert not need(CPUS, size=4).gpus
    assert not need(CPUS, wait_s=9.0).gpus


def test_too_few_is_one_sentence() -> None:
    asked = need(GPUS, size=9)
    assert asked.too_few(asked.there(GPUS)) == (
        "--gpus 9, but the Ray cluster has room for 6 on 2 nodes (4, 2); ask for at most that many, "
        "or use --wait S if it grows by itself."
    )
    assert "--ranks 9 on 1 nodes, but the Ray cluster has room for 12 on 2 nodes (8, 4), at 1 CPU" in need(
        CPUS, Wanted(nodes=NodeCount(1)), size=9, gpus=False
    ).too_few([8, 4])
    ranks = need(CPUS, Wanted(cpus_per_rank=16), size=2, gpus=False)
    assert ranks.too_few([0, 0]) == (
        "--ranks 2, but the Ray cluster has room for 0, at 16 CPU for each; use --wait S if it grows by itself."
    )
    assert ranks.too_few([]).startswith("the Ray cluster has no node that is alive: start one")


@pytest.mark.parametrize(
    ("there", "nodes", "shape"),
    [([4, 4], 0, [4, 4, 4]), ([4, 4], 4, [3, 3, 3, 3]), ([0, 0], 2, [6, 6])],
)
def test_what_is_waited_for_is_made_of_nodes_like_those_that_are_there(
    there: list[int], nodes: int, shape: list[int]
) -> None:
    assert need(CPUS, Wanted(nodes=NodeCount(nodes)), size=12, gpus=False).grown(there) == shape


@pytest.mark.parametrize("there", [[], [0, 0]])
def test_where_no_node_has_room_nothing_is_said_of_new_ones(there: list[int]) -> None:
    """A head without CPUs, its workers scaled to zero: any size of node will do, which then is known."""
    asked = need(CPUS, size=12, gpus=False, wait_s=9.0)
    assert asked.grown(there) == [1] * 12
    assert asked.strategy([1] * 12, there) == "PACK"
    assert asked.strategy([4, 4, 4], [4, 4]) == "STRICT_SPREAD"
    assert asked.strategy([12], [12]) == "PACK"
    nodes = need(CPUS, Wanted(nodes=NodeCount(2)), size=12, gpus=False, wait_s=9.0)
    assert nodes.strategy([6, 6], there) == "STRICT_SPREAD"


def test_what_is_short_is_said_with_its_number() -> None:
    total, free = {"CPU": 40.0, "GPU": 6.0}, {"CPU": 20.0, "GPU": 3.0}
    ranks = need(CPUS, Wanted(cpus_per_rank=2), size=5, gpus=False)
    assert ranks.busy(CPUS, {"CPU": 12.0}, {"CPU": 3.0}) == (
        "10 CPUs are asked for, and 3 of 12 are free in the Ray cluster."
    )
    assert need(GPUS, size=4).busy(GPUS, total, free) == "4 GPUs are asked for, and 3 of 6 are free in the Ray cluster."
    assert need(GPUS, size=2, gpu_type="a10g").busy(GPUS, total, {"CPU": 20.0, "GPU": 1.0}) == (
        "2 GPUs of type A10G (the Ray cluster has 2) are asked for, and 1 of 6 are free in the Ray cluster."
    )
    asked = need(GPUS, Wanted(cpus_per_rank=8), size=2)
    assert asked.busy(GPUS, total, {"CPU": 9.0, "GPU": 2.0}).startswith("16 CPUs are asked for, and 9 of 40 are free")
    assert need(CPUS, size=1, gpus=False).busy(CPUS, {"CPU": 12.0}, {}).startswith("1 CPU is asked for, and 0 of 12")
    assert need(CPUS, size=40, gpus=False, wait_s=9.0).busy(CPUS, {"CPU": 12.0}, {}).endswith(" It has to grow.")


def test_what_is_not_a_notebooks_can_be_ended_waited_for_or_shared() -> None:
    shared = ", or let ranks take none with --cpus-per-rank 0."
    assert need(CPUS, size=4, gpus=False).advice([8, 4], {"CPU": 3.0}).endswith(f"wait for them with --wait S{shared}")
    assert need(CPUS, size=4, gpus=False).advice([8, 4], {}).endswith("wait for them with --wait S."), (
        "nor a thousandth"
    )
    assert need(GPUS, size=4).advice([4, 2], {"CPU": 9.0}).endswith("wait for them with --wait S.")
    assert need(CPUS, size=40, gpus=False, wait_s=9.0).advice([8, 4], {}) == "", "the cluster has to grow"


def test_what_is_free_in_the_wrong_place_is_not_said_to_be_taken() -> None:
    """As after the loss of a node, which Ray takes for alive for some seconds."""
    asked = need(CPUS, Wanted(nodes=NodeCount(2), cpus_per_rank=0), size=2, gpus=False)
    assert asked.advice([1000, 1000], {"CPU": 3.9}) == (
        " But they are not free on 2 nodes, or a node has just been lost: wait with --wait S."
    )


def test_ranks_may_take_no_cpu() -> None:
    asked = need(CPUS, Wanted(cpus_per_rank=0), size=64, gpus=False)
    assert asked.shapes(asked.there(CPUS))[0] == [64]
    assert asked.bundle(64) == {"CPU": 0.001}, "Ray wants something in a bundle"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"cpus_per_rank": "4"}, {"OMP_NUM_THREADS": "4"}),
        ({"cpus_per_rank": "0.5"}, {"OMP_NUM_THREADS": "1"}),
        ({"cpus_per_rank": "0"}, {}),
        ({"cpus_per_rank": "4", "runtime_env": '{"env_vars": {"OMP_NUM_THREADS": 2}}'}, {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_ranks_use_as_many_threads_as_they_take_cpus(options: dict[str, str], expected: dict[str, str]) -> None:
    assert wanted(options).env == expected


@pytest.mark.parametrize(("beside", "expected"), [({}, "/opt/python"), ({"image_uri": "mine"}, ""), ({"pip": []}, "")])
def test_an_executable_is_looked_for_where_it_is_before_ray_makes_anything(
    beside: dict[str, object], expected: str
) -> None:
    environment = {"py_executable": "/opt/python", **beside}
    asked = wanted({"runtime_env": json.dumps(environment)})
    assert (asked.executable, asked.runtime_env) == (expected, environment)
