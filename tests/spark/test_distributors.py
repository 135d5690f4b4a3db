"""pyspark's own distributors, with and without a live view, on a real Spark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.spark.conftest import ON_LOOPBACK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SESSION = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
spark = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
from jupyter_distrib.compat.spark import DeepspeedTorchDistributor, TorchDistributor
import os, sys, time, jupyter_distrib
"""
LOCAL = "TorchDistributor(2, local_mode=True, use_gpu=False)"
TASKS = "TorchDistributor(2, local_mode=False, use_gpu=False)"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook"), env=ON_LOOPBACK) as one:
        one.ok("%load_ext jupyter_distrib")
        assert one.cell(SESSION, 250).status == "ok"
        yield one


@pytest.fixture
def book(shared: Notebook) -> Notebook:
    return shared


def test_what_is_in_spark_stays_there_and_ranks_start_no_distributor(book: Notebook) -> None:
    book.ok("""
context = spark.sparkContext
frame, total, shared = spark.range(4), context.accumulator(0), context.broadcast([1, 2])
names = frame.schema.names
""")
    cell = "%%distributed --ranks 2\n"
    assert book.cell(f"{cell}shared.value, names", 100).result == "ranks 0-1: ([1, 2], ['id'])"
    for code, said in (
        ("frame.count()", "take `x.toPandas()` in an earlier cell"),
        ("spark.range(3)", "it is the connection to Spark"),
        ("total.add(1)", "what ranks add to it would not come back"),
    ):
        assert said in book.fails(cell + code).traceback
    imported = "from pyspark.ml.torch.distributor import TorchDistributor\n"
    launched = book.cell(f"{cell}{imported}TorchDistributor(2, local_mode=True, use_gpu=False).run(len, [])", 100)
    assert "TorchDistributor() on a rank of a distributed cell" in launched.traceback, launched.text


def test_tasks_of_spark_have_torchruns_variables_and_a_live_view(book: Notebook) -> None:
    book.ok("""
def train(scale, *, more):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("x" * 5000, "of rank", dist.get_rank())
    os.system("echo from a child process")
    for step in range(3):
        jupyter_distrib.report(loss=1 / (1 + step))
    dist.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")
    return int(total), scale + more, [os.environ.get(name) for name in names], "MASTER_ADDR" in os.environ
""")
    outcome = book.cell(f"{TASKS}.run(train, 2, more=3)", 250)
    assert outcome.result == "(2, 5, ['0', '2', '0', '0'], True)", outcome.text
    assert "from a child process" in outcome.view
    rows = "[(row['rank'], row['step'], row['loss']) for row in jupyter_distrib.runs()[-1].metrics]"
    assert eval(book.ok(rows).result) == [(rank, step, 1 / (1 + step)) for rank in (0, 1) for step in range(3)]
    logs = book.ok("print(jupyter_distrib.runs()[-1].logs(1))").stdout
    assert logs.count("x") == 5000
    assert "x of rank 1" in logs


def test_the_error_has_the_last_lines_and_the_original_exception(book: Notebook) -> None:
    book.ok("""
class Broken(Exception):
    pass

def train():
    if os.environ["RANK"] == "1":
        for number in range(120):
            print("line", number)
        raise Broken("no data")
    time.sleep(60)
""")
    for distributor in (LOCAL, TASKS):
        outcome = book.cell(
            dedent(f"""\
                try:
                    {distributor}.run(train)
                except RuntimeError as error:
                    caught = error"""),
            120,
        )
        assert outcome.status == "ok", outcome.text
        assert book.ok("type(caught.__cause__) is Broken, str(caught.__cause__)").result == "(True, 'no data')"
        text = eval(book.ok("str(caught)").result)
        assert text.startswith("TorchDistributor failed: rank 1 ended with exit code 1; Broken: no data\n"), text
        assert "[rank 1] line 119" in text


def test_a_cluster_with_tls_is_refused(book: Notebook) -> None:
    book.ok("spark.conf.set('spark.ssl.enabled', 'true')")
    failed = book.cell(f"{TASKS}.run(lambda: 1)", 250)
    book.ok("spark.conf.unset('spark.ssl.enabled')")
    assert failed.ename == "RuntimeError", failed.text
    assert "This cluster has TLS encryption enabled" in failed.evalue


def test_each_rank_trains_on_one_partition_of_a_frame(book: Notebook) -> None:
    book.ok("""
def train(batch_size):
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader
    loader = _get_spark_partition_data_loader(num_samples=5, batch_size=batch_size, num_workers=0)
    print("of", os.environ["RANK"], [int(each) for batch in loader for each in batch[0]])
    return "done"
frame = spark.range(8).repartitionByRange(2, "id")
""")
    outcome = book.cell(f"{TASKS}._train_on_dataframe(train, frame, batch_size=5)", 250)
    assert outcome.result == "'done'", outcome.text
    assert "of 0 [0, 1, 2, 3, 0]" in outcome.view, outcome.view
    assert "of 1 [4, 5, 6, 7, 4]" in outcome.view


def test_pysparks_own_class_runs_in_a_one_rank_cell(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 1
            from pyspark.sql import SparkSession
            from pyspark.ml.torch.distributor import TorchDistributor
            spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', False).getOrCreate()
            def train():
                import os
                print('live from ' + os.environ['RANK'], flush=True)
                return 7
            value = TorchDistributor(2, local_mode=True, use_gpu=False).run(train)
            spark.stop()
            value"""),
        300,
    )
    assert outcome.result == "rank 0: 7", outcome.text
    assert "live from 0" in outcome.view
    assert "live from 1" in outcome.view


def test_deepspeed_gets_its_configuration_by_its_arguments(book: Notebook) -> None:
    book.ok("""
def train():
    import json
    print("zero", json.load(open(sys.argv[sys.argv.index("--deepspeed_config") + 1])))
    return sys.argv[1], os.environ["WORLD_SIZE"]
""")
    line = "DeepspeedTorchDistributor(numGpus=2, useGpu=False, deepspeedConfig={'train_batch_size': 4}).run(train)"
    outcome = book.cell(line, 250)
    assert outcome.result == "('--deepspeed', '2')", outcome.text
    assert "zero {'train_batch_size': 4}" in outcome.view


def test_a_file_gets_deepspeeds_arguments_behind_its_own(book: Notebook) -> None:
    book.ok("open('train.py', 'w').write('import sys\\nprint(__name__, sys.argv)')\nopen('ds.json', 'w').write('{}')")
    line = "DeepspeedTorchDistributor(2, 1, True, False, os.path.abspath('ds.json')).run('train.py', '--lr', 1)"
    outcome = book.cell(line, 250)
    assert (outcome.status, outcome.result) == ("ok", ""), outcome.text
    assert "/train.py', '--lr', '1', '--deepspeed', '--deepspeed_config', '" in outcome.view, outcome.view
    assert "__main__ ['" in outcome.view


@pytest.mark.parametrize("distributor", [LOCAL, TASKS])
def test_an_interrupt_stops_a_distributor(book: Notebook, distributor: str) -> None:
    book.start(
        dedent(f"""\
            def train():
                print('it is on')
                time.sleep(300)
            {distributor}.run(train)""")
    )
    book.until("it is on", 250)
    book.interrupt()
    outcome = book.finish(60)
    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert outcome.wall_s < 250
    assert book.ok("spark.range(3).count()").result == "3"
    for script in Path(tempfile.gettempdir()).glob("tmp*/train.py"):
        shutil.rmtree(script.parent)  # Spark's own, of tasks that were ended


def test_an_interrupt_stops_the_ranks_of_a_cell_while_a_session_lives_in_the_kernel(book: Notebook) -> None:
    """Spark's handler of SIGINT holds in the very cell that makes the session."""
    book.ok(
        dedent("""\
            def train():
                print('it is on', flush=True)
                while True: time.sleep(1)""")
    )
    book.start(
        dedent("""\
            import signal
            spark.stop()
            spark = builder.getOrCreate()
            assert signal.getsignal(signal.SIGINT).__name__ == 'signal_handler'
            jupyter_distrib.distributed(ranks=2)(train).distributed()""")
    )
    book.until("it is on", 250)
    book.interrupt()
    outcome = book.finish(20)
    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert "interrupted" in outcome.view
    assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
    assert book.ok("spark.range(3).count()").result == "3"


def test_a_run_in_local_tasks_shows_no_encoded_lines(tmp_path: Path) -> None:
    """The two ends of Spark's log have different addresses here, where Spark's is not that of the host."""
    with Notebook(tmp_path, {**ON_LOOPBACK, "SPARK_LOCAL_IP": "127.0.0.2"}) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok("from pyspark.sql import SparkSession\nspark = SparkSession.builder.master('local[2]').getOrCreate()")
        shown = book.ok(
            dedent("""\
                from jupyter_distrib.compat.spark import TorchDistributor
                def train():
                    print('hello')
                TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train)""")
        )
        assert "[0-1] hello" in shown.view
        assert " V AAAA" not in shown.text + shown.stdout + shown.stderr
        book.ok("spark.stop()")
