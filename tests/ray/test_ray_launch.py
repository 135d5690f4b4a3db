"""Ray programs: a Ray cluster of its own for a function, on the nodes of the ranks, and nothing left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until
from tests.ray.conftest import Cluster, name_it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def book(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    name_it(cluster, folder)
    with Notebook(folder) as one:
        one.ok("%load_ext jupyter_distrib\n%distributed_compat databricks")
        one.ok("from serverless_gpu.ray import ray_launch")
        yield one


def members() -> list[str]:
    """The processes of clusters that `ray_launch` has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if "/jd-tmp-" in line:
            found.append(line[:200])
    return found


def test_a_function_runs_on_the_head_of_a_cluster_of_all_nodes(book: Notebook) -> None:
    book.ok("""
@ray_launch(pool="lab", ranks=2)
def foo(add, *, more):
    import os, ray
    ray.init(log_to_driver=False)

    @ray.remote(num_cpus=0)
    def one():
        return 1

    nodes = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    return ray.get(one.remote()) + add + more, nodes, "RAY_ADDRESS" in os.environ, os.environ["RANK"]
""")
    outcome = book.cell("foo.distributed(10, more=100)", 280)
    assert outcome.result == "(111, ['127.0.0.2', '127.0.0.3'], True, '0')", outcome.text
    assert wait_until(lambda: not members(), 30), members()


def test_an_error_of_the_function_is_raised_and_nothing_is_left(book: Notebook) -> None:
    book.ok("""
class Broken(Exception):
    pass

@ray_launch(gpus=2)
def foo():
    import os, ray
    assert "RANK" not in os.environ or ray.cluster_resources()["CPU"]  # as in the platform's own example, which does not call ray.init
    raise Broken("no data")
""")
    outcome = book.cell("foo.distributed()", 280)
    assert outcome.ename == "Broken", outcome.text
    internal = ("__function__", "__arguments__", "__keywords__", "on_ray", "member(")
    assert [name for name in internal if name in outcome.text] == []
    assert "has not reached" not in outcome.text, "the ranks that wait meanwhile hang in nothing"
    assert wait_until(lambda: not members(), 30), members()
    assert book.fails("foo()").ename == "Broken", "here"
