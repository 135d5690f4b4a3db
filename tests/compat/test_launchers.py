from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.compat.torch_distributor import TorchDistributor
from tests.notebook import Notebook

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Notebook]:
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_compat spark horovod")
        yield book


@pytest.fixture
def book(shared: Notebook) -> Iterator[Notebook]:
    yield shared
    shared.forget()


SPARK = "from pyspark.ml.torch.distributor import TorchDistributor\nimport os\n"
TWO = "TorchDistributor(num_processes=2, use_gpu=False)"


# --------------------------------------------------------------------------------------------------- TorchDistributor


def test_a_function_runs_on_every_rank_and_rank_0_s_value_returns(book: Notebook) -> None:
    book.ok(f"{SPARK}def train(lr, *, steps):\n    return int(os.environ['RANK']), lr, steps, os.environ['WORLD_SIZE']")
    book.ok(f"distributor = {TWO}\nvalues = [distributor.run(train, 0.1, steps=n) for n in range(50)]")
    assert book.ok("values == [(0, 0.1, n, '2') for n in range(50)]").result == "True"


def test_its_signature_is_spark_s() -> None:
    import inspect

    assert str(inspect.signature(TorchDistributor)) == (
        "(num_processes: 'int' = 1, local_mode: 'bool' = True, use_gpu: 'bool' = True) -> 'None'"
    )
    assert list(inspect.signature(TorchDistributor.run).parameters) == ["self", "train_object", "args", "kwargs"]


def test_without_local_mode_the_pool_in_use_has_the_ranks(book: Notebook) -> None:
    book.ok(SPARK + "TorchDistributor(2, False, False).run(lambda: 1)")
    book.ok("from jupyter_distrib.kernel.session import session\nlast = session.current().history[-1]")
    assert book.ok("last.pool, last.record.world_size").result == "('local', 2)"


SCRIPT = """
import sys, os, json
from lib import scale
assert __name__ == "__main__"
path = os.path.join(sys.argv[1], "rank" + os.environ["RANK"])
with open(path, "w") as file:
    json.dump([sys.argv[1:], scale, __file__], file)
"""


def test_a_script_in_a_folder_of_a_repository_runs_with_its_arguments(book: Notebook, folder: Path) -> None:
    (folder / "repository" / "training").mkdir(parents=True)
    (folder / "repository" / "training" / "train.py").write_text(SCRIPT)
    (folder / "repository" / "training" / "lib.py").write_text("scale = 3")
    (folder / "out").mkdir()
    outcome = book.ok(f"{SPARK}{TWO}.run('repository/training/train.py', 'out', '--learning_rate=0.001', 16)")
    assert outcome.result == ""
    script = str(folder / "repository/training/train.py")
    for rank in (0, 1):
        told = json.loads((folder / "out" / f"rank{rank}").read_text())
        assert told == [["out", "--learning_rate=0.001", "16"], 3, script]
    assert book.ok(f"{TWO}.run(lambda: __import__('sys').argv)").result == "['cell.py']"
    assert book.ok(f"{TWO}.run(complex, 1, 2)").result == "(1+2j)"


def test_a_script_takes_no_keywords(book: Notebook, folder: Path) -> None:
    failed = book.fails(f"{SPARK}{TWO}.run('train.py', lr=1)")
    assert failed.ename == "ValueError"
    assert "give the script strings: '--lr=1'" in failed.evalue
    assert "there is no file" in book.fails(f"{SPARK}{TWO}.run('nowhere.py')").evalue


def test_a_script_that_exits_with_a_code_fails_with_it(book: Notebook, folder: Path) -> None:
    (folder / "exits.py").write_text(
        dedent("""\
            import os, sys
            print('from the script')
            sys.exit(3 * int(os.environ['RANK']))""")
    )
    failed = book.fails(f"{SPARK}{TWO}.run('exits.py')")
    assert failed.ename == "RuntimeError"
    assert "rank 1 ended with exit code 3" in failed.evalue
    assert "[rank 0] from the script" in failed.evalue


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "True"])
def test_the_number_of_processes_is_checked(book: Notebook, number: str) -> None:
    failed = book.fails(f"{SPARK}TorchDistributor(num_processes={number}, use_gpu=False)")
    assert (failed.ename, failed.evalue) == (
        "ValueError", f"num_processes must be a whole number of 1 or more; got {number}",
    )  # fmt: skip


def test_gpus_that_are_missing_are_an_error(book: Notebook) -> None:
    failed = book.fails(f"{SPARK}TorchDistributor(num_processes=2)")
    assert failed.ename == "RuntimeError"
    assert "give use_gpu=False" in failed.evalue


def test_gpus_are_looked_for_at_once_whatever_the_mode(book: Notebook) -> None:
    failed = book.fails(f"{SPARK}TorchDistributor(num_processes=2, local_mode=False, use_gpu=True)")
    assert (failed.ename, failed.evalue) == (
        "RuntimeError",
        "use_gpu=True needs GPUs, and this machine has none: give use_gpu=False, or choose another pool.",
    )
    failed = book.fails(f"{DEEPSPEED}DeepspeedTorchDistributor(numGpus=2, nnodes=2, localMode=False)")
    assert (failed.ename, failed.evalue) == (
        "RuntimeError",
        "useGpu=True needs GPUs, and this machine has none: give useGpu=False, or choose another pool.",
    )
    failed = book.fails(f"{DEEPSPEED}DeepspeedTorchDistributor()")
    assert failed.evalue.endswith("give useGpu=False, or localMode=False for another pool.")
    failed = book.fails(
        "from spark_tensorflow_distributor import MirroredStrategyRunner\nMirroredStrategyRunner(num_slots=2)"
    )
    assert (failed.ename, "use_gpu=True needs GPUs" in failed.evalue) == ("RuntimeError", True)


NCCL = """\
def train():
    import torch.distributed as dist
    dist.init_process_group('nccl')
    return dist.get_backend()
"""


def test_advice_on_options_is_in_the_words_of_the_caller(book: Notebook) -> None:
    failed = book.fails(f"{SPARK}{NCCL}{TWO}.run(train)")
    assert "or run it with TorchDistributor.backend_fallback = True." in failed.evalue
    assert "--backend" not in failed.evalue + failed.traceback
    book.ok("TorchDistributor.backend_fallback = True")
    assert book.ok(f"{TWO}.run(train)").result == "'gloo'"
    book.ok("TorchDistributor.backend_fallback = False")
    failed = book.fails(f"import jupyter_distrib\n{NCCL}jupyter_distrib.distributed(ranks=2)(train).distributed()")
    assert "or run it with backend_fallback=True." in failed.text
    assert "--backend" not in failed.text
    failed = book.fails(
        dedent("""\
            %%distributed --ranks 2
            import torch.distributed as dist
            dist.init_process_group('nccl')""")
    )
    assert "or run it with --backend-fallback." in failed.text


@pytest.mark.parametrize(
    ("decorate", "why"),
    [
        ("jupyter_distrib.distributed(gpus=2, gpu_type='A10')", "gpu_type='A10'"),
        ("jupyter_distrib.distributed(gpus=2, gpu_type='a10')", "gpu_type='a10'"),
        ("serverless_gpu.distributed(gpus=2, gpu_type='A10')", "gpu_type='A10'"),
        ("databricks.air.distributed(2, 'GPU_1xA10')", "accelerator_type='A10'"),
    ],
)
def test_a_type_of_gpu_that_is_missing_is_refused_in_the_words_of_the_caller(
    book: Notebook, decorate: str, why: str
) -> None:
    book.ok("%distributed_compat databricks\nimport jupyter_distrib, serverless_gpu, databricks.air")
    for call in ("distributed()", "submit().result()"):
        failed = book.fails(f"{decorate}(lambda: 1).{call}")
        assert why in failed.evalue
        assert "--gpu" not in failed.evalue


def test_more_processes_than_gpus_are_an_error_unless_it_is_to_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_distrib.compat.launching.gpu_count", lambda pool: 2)  # the rest needs no GPU
    with pytest.raises(RuntimeError, match="num_processes=4 is more than the 2 GPUs of this machine"):
        TorchDistributor(4)
    monkeypatch.setattr(TorchDistributor, "shrinks", True)
    assert TorchDistributor(4).num_processes == 2
    assert TorchDistributor(1).num_processes == 1


def test_the_error_has_exit_code_last_lines_and_the_original_exception(book: Notebook) -> None:
    book.ok(f"""{SPARK}
class Broken(Exception):
    pass

def train():
    if os.environ["RANK"] == "1":
        for number in range(120):
            print("line", number)
        raise Broken("no data")
""")
    book.ok(
        dedent(f"""\
            try:
                {TWO}.run(train)
            except RuntimeError as error:
                caught = error""")
    )
    assert book.ok("type(caught.__cause__) is Broken").result == "True"
    text = eval(book.ok("str(caught)").result)
    assert text.startswith("TorchDistributor failed: rank 1 ended with exit code 1; Broken: no data\n")
    assert "The last 100 lines of output:\n[rank 1] line 20\n" in text
    assert text.endswith("[rank 1] line 119")
    shown = book.fails("raise caught").traceback
    assert "Cell In[" in shown
    assert "in train(...)" in shown
    assert shown.endswith("\nRuntimeError: TorchDistributor failed: rank 1 ended with exit code 1; Broken: no data")
    assert "launching.py" not in shown


def test_a_process_that_dies_is_reported_with_its_signal(book: Notebook) -> None:
    failed = book.fails(
        f"{SPARK}def train():\n    if os.environ['RANK'] == '1':\n        os.kill(os.getpid(), 9)\n"
        "    import time; time.sleep(60)\n" + TWO + ".run(train)"
    )
    assert failed.ename == "RuntimeError"
    assert "rank 1 ended with exit code -9; RankLost" in failed.evalue


def test_an_error_of_nccl_names_the_interfaces(book: Notebook) -> None:
    failed = book.fails(
        f"{SPARK}def train():\n    raise RuntimeError('NCCL error: ncclInternalError: Internal check failed')\n"
        f"{TWO}.run(train)"
    )
    assert "NCCL_SOCKET_IFNAME" in failed.text


# ---------------------------------------------------------------------------------------------------------- DeepSpeed

DEEPSPEED = "from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor\nimport os\n"


def test_a_function_runs_on_all_gpus_of_all_nodes_and_rank_0_s_value_returns(book: Notebook, folder: Path) -> None:
    (folder / "deepspeed.py").write_text("def initialize(config):\n    return config['train_batch_size']")
    book.ok(f"""{DEEPSPEED}
def train(x, *, y):
    import deepspeed
    from jupyter_distrib.compat.deepspeed_distributor import config
    return os.environ["RANK"], os.environ["WORLD_SIZE"], deepspeed.initialize(config()), x, y
""")
    run = "DeepspeedTorchDistributor(1, 2, False, False, {'train_batch_size': 8}).run(train, 1, y=2)"
    assert book.ok(run).result == "('0', '2', 8, 1, 2)"


def test_the_configuration_is_a_file_as_long_as_the_function_runs(book: Notebook, folder: Path) -> None:
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    book.ok(f"{DEEPSPEED}import sys\ndef train():\n    return sys.argv[1:], open(sys.argv[3]).read()")
    make = "DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig='zero.json')"
    arguments, text = eval(book.ok(f"value = {make}.run(train)\nvalue").result)
    assert arguments[:2] == ["--deepspeed", "--deepspeed_config"]
    assert json.loads(text) == {"zero_optimization": {"stage": 2}}
    assert not Path(arguments[2]).exists()
    assert book.ok("DeepspeedTorchDistributor(1, useGpu=False).run(lambda: __import__('sys').argv[1:])").result == (
        "['--deepspeed']"
    )


def test_a_script_finds_the_configuration_at_the_end_of_its_arguments(book: Notebook, folder: Path) -> None:
    (folder / "args.py").write_text(
        "import sys, json; json.dump([sys.argv, open(sys.argv[-1]).read()], open('told', 'w'))"
    )
    book.ok(
        f"{DEEPSPEED}DeepspeedTorchDistributor(1, useGpu=False, deepspeedConfig={{'a': 1}}).run('args.py', '--lr', 1)"
    )
    arguments, text = json.loads((folder / "told").read_text())
    assert arguments[:5] == [str(folder / "args.py"), "--lr", "1", "--deepspeed", "--deepspeed_config"]
    assert (len(arguments), json.loads(text)) == (6, {"a": 1})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("numGpus=0", "numGpus must be a whole number of 1 or more; got 0"),
        ("nnodes=2", "localMode=True is one node; got nnodes=2: give localMode=False"),
    ],
)
def test_its_arguments_are_checked(book: Notebook, arguments: str, why: str) -> None:
    assert why in book.fails(f"{DEEPSPEED}DeepspeedTorchDistributor({arguments}, useGpu=False)").evalue


# --------------------------------------------------------------------------------------------- MirroredStrategyRunner

TENSORFLOW = "from spark_tensorflow_distributor import MirroredStrategyRunner\nimport os\n"


def test_the_workers_find_each_other_and_the_first_one_s_value_returns(book: Notebook) -> None:
    book.ok(f"""{TENSORFLOW}
def train(scale):
    import json, socket
    told = json.loads(os.environ["TF_CONFIG"])
    own = told["cluster"]["worker"][told["task"]["index"]]
    with socket.create_server((own.split(":")[0], int(own.split(":")[1]))):
        print("index", told["task"]["index"], told["task"]["type"], flush=True)
    return len(set(told["cluster"]["worker"])), told["task"]["index"], scale
""")
    outcome = book.ok(
        "MirroredStrategyRunner(num_slots=3, use_gpu=False, use_custom_strategy=True).run(train, scale=2)"
    )
    assert outcome.result == "(3, 0, 2)"
    assert all(f"index {rank} worker" in outcome.view for rank in range(3))


def test_without_a_strategy_of_its_own_the_function_runs_in_tensorflow_s_scope(book: Notebook, folder: Path) -> None:
    (folder / "tensorflow.py").write_text(
        dedent("""\
            import contextlib
            class distribute:
                class MultiWorkerMirroredStrategy:
                    def scope(self):
                        global inside
                        inside = True
                        return contextlib.nullcontext()
        """)
    )
    code = dedent("""\
        def train():
            import tensorflow
            return tensorflow.inside
    """)
    assert book.ok(f"{TENSORFLOW}{code}MirroredStrategyRunner(num_slots=2, use_gpu=False).run(train)").result == "True"
    (folder / "tensorflow.py").unlink()
    failed = book.fails("MirroredStrategyRunner(num_slots=2, use_gpu=False).run(train)")
    assert "needs TensorFlow for its ranks, which is not installed" in failed.evalue


def test_local_mode_calls_the_function_here_and_the_arguments_are_checked(book: Notebook) -> None:
    make = "MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=False)"
    assert book.ok(f"{TENSORFLOW}{make}.run(lambda a: (a, os.getpid()), a=1) == (1, os.getpid())").result == "True"
    assert book.ok("os.environ.get('TF_CONFIG')").result == ""
    assert "num_slots must be a whole number" in book.fails("MirroredStrategyRunner(num_slots=0)").evalue
    failed = book.fails("MirroredStrategyRunner(num_slots=2, local_mode=True, use_gpu=False)")
    assert (failed.ename, "give num_slots=1" in failed.evalue) == ("ValueError", True)


# ------------------------------------------------------------------------------------------------------------ Horovod

HOROVOD = "from sparkdl import HorovodRunner\nimport os\n"


@pytest.mark.parametrize(("np", "size"), [(-2, 2), (2, 2), (0, 2)])
def test_the_runner_returns_rank_0_s_value(book: Notebook, np: int, size: int) -> None:
    code = "def main(a):\n    return os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'], a\n"
    assert book.ok(f"{HOROVOD}{code}HorovodRunner(np={np}).run(main, a=1)").result == f"('0', '{size}', 1)"


def test_a_failure_is_reported_as_by_a_launcher(book: Notebook) -> None:
    failed = book.fails(f"{HOROVOD}HorovodRunner(np=-2).run(lambda: 1 / int(os.environ['RANK']))")
    assert failed.ename == "RuntimeError"
    assert "HorovodRunner failed: rank 0 ended with exit code 1; ZeroDivisionError" in failed.evalue


def test_run_returns_a_list_by_rank_and_writes_output_into_folders(book: Notebook, folder: Path) -> None:
    code = dedent("""\
        import horovod, os, sys
        def work(x, y=0):
            print('out', os.environ['HOROVOD_RANK'])
            print('err', file=sys.stderr)
            return int(os.environ['HOROVOD_RANK']) + x + y
    """)
    call = "horovod.run(work, args=(10,), kwargs={'y': 5}, num_proc=2, output_filename='logs')"
    assert book.ok(code + call).result == "[15, 16]"
    assert (folder / "logs" / "rank.1" / "stdout").read_text() == "out 1\n"
    assert (folder / "logs" / "rank.0" / "stderr").read_text() == "err\n"


def test_an_elastic_run_is_started_again_when_a_rank_is_lost(book: Notebook) -> None:
    code = """
import horovod
def work():
    import os, signal
    import horovod.torch as hvd
    hvd.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if not attempt and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return hvd.allgather_object(attempt)
"""
    assert book.ok(f"{code}horovod.run(work, num_proc=2, min_num_proc=1)").result == "[[1, 1], [1, 1]]"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("hosts='a:1', hostfile='f'", "hosts and hostfile exclude each other"),
        ("hosts='a:1'", "hosts has no counterpart: choose a pool on these machines"),
        ("use_gloo=True, use_mpi=True", "use_gloo and use_mpi exclude each other"),
        ("host_discovery_script='hosts.sh'", "host_discovery_script has no counterpart: the pool finds hosts"),
        ("num_proc=2, max_num_proc=4", "max_num_proc has no counterpart: no ranks are added while it runs"),
        ("num_proc=0", "num_proc must be a whole number of 1 or more; got 0"),
    ],
)
def test_arguments_that_have_no_counterpart_are_refused(book: Notebook, arguments: str, why: str) -> None:
    failed = book.fails(f"import horovod\nhorovod.run(lambda: 1, {arguments})")
    assert (failed.ename, failed.evalue.startswith(why)) == ("ValueError", True), failed.evalue


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            "run(lambda: 1, num_proc=2)",
            "PoolError: the spark pool needs pyspark, which is not installed here: pip install",
        ),
        ("run(lambda: 1, use_mpi=True, use_gloo=True)", "ValueError: use_gloo and use_mpi exclude each other"),
        ("run(lambda: 1, stdout=open('/dev/null', 'w'))", "ValueError: stdout has no counterpart: the output of ranks"),
        ("run_elastic(lambda: 1, num_proc=2, max_num_proc=4)", "ValueError: max_num_proc has no counterpart"),
    ],
)
def test_without_spark_and_with_what_has_no_counterpart_it_is_refused(book: Notebook, call: str, why: str) -> None:
    failed = book.fails(f"import horovod.spark\nhorovod.spark.{call}")
    assert f"{failed.ename}: {failed.evalue}".startswith(why), failed.evalue


@pytest.mark.parametrize(
    ("name", "instead"), [("torch.Torch", "horovod.spark.run"), ("keras.Keras", "MirroredStrategy")]
)
def test_an_estimator_says_what_takes_its_place(book: Notebook, name: str, instead: str) -> None:
    module, kind = name.split(".")
    failed = book.fails(f"from horovod.spark.{module} import {kind}Estimator\n{kind}Estimator(num_proc=2, epochs=1)")
    assert failed.ename == "NotImplementedError"
    assert f"{kind}Estimator of horovod.spark is not available" in failed.evalue
    assert instead in failed.evalue


def test_only_what_the_driver_is_told_is_shown_unless_all_is_asked_for(book: Notebook) -> None:
    code = dedent("""\
        from sparkdl.horovod import log_to_driver
        def main():
            print('from a rank')
            log_to_driver('epoch ' + os.environ['RANK'])
    """)
    quiet = book.ok(f"{HOROVOD}{code}HorovodRunner(np=-2).run(main)")
    assert sorted(quiet.stdout.split("\n")) == ["", "epoch 0", "epoch 1"]
    assert quiet.view == ""
    loud = book.ok("HorovodRunner(np=-2, driver_log_verbosity='all').run(main)")
    assert re.search(r"from a rank", loud.view)
    assert "epoch 1" in loud.view
    assert "driver_log_verbosity must be all or log_callback_only" in (
        book.fails("HorovodRunner(np=-2, driver_log_verbosity='loud')").evalue
    )
