"""Cells in a Spark application with two executors; refusals."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.spark import master, pool
from tests.notebook import Notebook
from tests.spark.conftest import DRIVER, running

slow = pytest.mark.slow
patient = pytest.mark.timeout(400)
START_S = 300.0


@pytest.fixture
def book(cells: Notebook) -> Notebook:
    return cells


@slow
@patient
def test_a_cell_meets_over_both_executors_of_a_local_cluster(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --strategy ddp
            import os, torch, torch.distributed as dist
            t = torch.ones(1)
            dist.all_reduce(t)
            print('of rank', rank)
            (rank, int(t), int(os.environ['NODE_RANK']), local_rank)"""),
        timeout_s=START_S,
    )
    assert outcome.result.splitlines() == [f"rank {rank}: ({rank}, 4, {rank // 2}, {rank % 2})" for rank in range(4)], (
        outcome.text
    )
    assert "Waiting: Spark starts an application for these ranks" in outcome.text
    assert "Waiting: Spark at local-cluster[2,2,2048] runs; Ray starts in its executors" in outcome.text
    assert "of rank 3" in outcome.view


@slow
@patient
def test_horovod_s_function_runs_in_the_executors(book: Notebook) -> None:
    code = """
%distributed_compat horovod
import horovod.spark
def work(x, y=0):
    import os
    import horovod.torch as hvd
    hvd.init()
    return hvd.cross_rank(), hvd.allgather_object(hvd.rank()), os.environ["MARK"], x + y
"""
    book.ok(code)
    call = "print(horovod.spark.run(work, (1,), {'y': 2}, num_proc=4, env={'MARK': 'here'}))"
    found = book.cell(call, timeout_s=START_S)
    assert str([(rank // 2, [0, 1, 2, 3], "here", 3) for rank in range(4)]) in found.stdout, found.text
    assert book.cell("len(horovod.spark.run(lambda: 1))", timeout_s=START_S).result == "4"


@slow
@patient
def test_the_kernel_loads_neither_ray_nor_spark(book: Notebook) -> None:
    loaded = "[name for name in ('ray', 'pyspark', 'py4j') if name in sys.modules]"
    assert book.ok(f"import sys\n{loaded}").result == "[]"
    assert re.search(r"Spark, with Ray at 10\.99\.0\.1:\d+", book.ok("%distributed_status").result)


@slow
@patient
def test_ranks_do_not_see_what_spark_and_ray_have_set(book: Notebook) -> None:
    names = "[name for name in os.environ if name.startswith(('RAY_', 'SPARK_', 'PYSPARK_', 'PYTHON'))]"
    outcome = book.cell(
        dedent(f"""\
            %%distributed
            import os, sys
            {names}, [p for p in sys.path if 'pyspark' in p]"""),
        START_S,
    )
    assert outcome.result == "ranks 0-3: (['PYTHONHASHSEED', 'PYTHONPATH'], [])", outcome.text


@slow
@patient
def test_an_interrupt_and_an_exception_are_those_of_every_pool(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed
            import time
            print('it is on', flush=True)
            while True: time.sleep(1)""")
    )
    book.until("it is on", START_S)
    book.interrupt()
    assert book.finish(30).ename == "KeyboardInterrupt"
    assert book.fails("%%distributed\nif rank == 1: raise LookupError('mine')").ename == "LookupError"
    assert book.ok("%%distributed\nrank").result.startswith("rank 0: 0")


@slow
@patient
def test_no_command_line_has_the_token_of_the_cluster(book: Notebook) -> None:
    assert "rank 3" in book.cell("%%distributed\nrank", timeout_s=START_S).result
    variables = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in running(DRIVER)]
    tokens = {
        each.partition(b"=")[2].decode() for of in variables for each in of if each.startswith(b"RAY_AUTH_TOKEN=")
    }
    assert len(tokens) == 1
    assert running("spark.executorEnv"), "Java has settings on its command line"
    assert running(*tokens, "hunter2") == []


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("sc://server:15002", "is Spark Connect, whose client cannot start Ray in the cluster"),
        ("yarn", "is YARN, where Ray on Spark is not supported here"),
        ("k8s://https://server:443", 'start Ray there with KubeRay and use its address with kind = "ray"'),
        ("nonsense", "is not a Spark master for Ray on Spark"),
        ("local[x]", "is not a Spark master for Ray on Spark"),
    ],
)
def test_masters_that_cannot_work_are_refused_with_the_way_to_go(chosen: str, said: str) -> None:
    with pytest.raises(PoolError, match=re.escape(said)) as refusal:
        pool.check(chosen)
    assert "\n" not in str(refusal.value)
    assert repr(chosen) in str(refusal.value)


def test_masters_that_can_work_are_not_refused() -> None:
    good = ["", "spark://one:7077,two:7077", "local-cluster[2,2,2048]", "local", "local[4]", "local[*]", "local[2, 3]"]
    assert [master.refusal(each) for each in good] == [""] * len(good)
    assert master.local_cores("local[4]") == 4
    assert master.local_cores("local-cluster[2,2,2048]") == 0
    assert (master.executors("local-cluster[3, 2, 2048]"), master.executors("spark://one:7077")) == (3, 0)


def test_the_variable_for_spark_connect_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://server")
    with pytest.raises(PoolError, match="Spark Connect"):
        pool.check("")


@pytest.mark.parametrize("home", ["", "/nowhere"])
def test_a_missing_java_is_one_sentence(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(PoolError, match=r"^Spark needs Java, and .*: apt-get install openjdk-17-jre-headless"):
        pool.check("local")
