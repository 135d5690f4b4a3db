from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import ROOT, Notebook
from tests.settings_files import write_trusted


def python(code: str, folder: Path | None = None) -> str:
    """What a program prints that has the stand-ins on, in a process of its own."""
    start = "import importlib.util, sys\nfrom jupyter_distrib.interfaces import stand_ins\n"
    path = [str(ROOT), *([str(folder)] if folder else [])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}\n{start}{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_part_of_a_package_that_is_missing_is_found_and_the_package_is_not() -> None:
    printed = python("""
stand_ins.enable(["spark"])
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor
print(TorchDistributor.__name__, DeepspeedTorchDistributor.__name__)
print(importlib.util.find_spec("pyspark"), "pyspark" in sys.modules)
for line in ("import pyspark", "from pyspark.sql import SparkSession"):
    try:
        exec(line)
    except ModuleNotFoundError as error:
        print(error.name, str(error).partition(", pyspark.ml.deepspeed")[0])
""")
    assert printed.splitlines() == [
        "TorchDistributor DeepspeedTorchDistributor",
        "None False",
        "pyspark No module named 'pyspark': pyspark is not installed, and jupyter_distrib stands in for pyspark.ml.torch.distributor",
        "pyspark No module named 'pyspark': pyspark is not installed, and jupyter_distrib stands in for pyspark.ml.torch.distributor",
    ]


@pytest.mark.versions
def test_a_library_that_looks_for_a_package_does_not_find_ours() -> None:
    printed = python("""
stand_ins.enable(["horovod", "databricks"])
print([importlib.util.find_spec(name) for name in ("horovod", "sparkdl", "serverless_gpu")])
import horovod
print(horovod.run.__module__)
import horovod.torch as hvd
print(hvd.allreduce.__module__, "horovod" in sys.modules["horovod.torch"].__name__)
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    print(error)
try:
    horovod.spark
except AttributeError as error:
    print(error)
""")
    assert printed.splitlines() == [
        "[None, None, None]",
        "jupyter_distrib.compat.horovod_run",
        "jupyter_distrib.compat.horovod.differentiable True",
        (
            "No module named 'horovod.tensorflow': horovod is not installed, and jupyter_distrib stands in for horovod, "
            "horovod.torch, horovod.torch.elastic, horovod.spark, horovod.spark.torch, horovod.spark.keras, "
            "horovod.spark.lightning only (%distributed_compat)"
        ),
        "horovod.spark is not there: jupyter_distrib stands in for horovod (%distributed_compat) and has run of it",
    ]


def test_a_package_that_is_installed_wins(tmp_path: Path) -> None:
    for name in ("serverless_gpu", "pyspark"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("real = True")
    printed = python(
        """
stand_ins.enable(["databricks", "spark"])
import serverless_gpu, pyspark
print(serverless_gpu.real, pyspark.real, stand_ins.real_packages("databricks"), stand_ins.real_packages("spark"))
try:
    import pyspark.ml.torch.distributor
except ModuleNotFoundError as error:
    print(error)
""",
        tmp_path,
    )
    assert printed.splitlines() == [
        "True True ['serverless_gpu'] ['pyspark']",
        "No module named 'pyspark.ml'",
    ]


def test_air_is_found_beside_another_part_of_its_namespace(tmp_path: Path) -> None:
    (tmp_path / "databricks" / "sdk").mkdir(parents=True)
    (tmp_path / "databricks" / "sdk" / "__init__.py").write_text("real = True")
    printed = python(
        "stand_ins.enable(['databricks'])\nimport databricks.sdk\nfrom databricks.air import distributed\n"
        "print(databricks.sdk.real, distributed.__module__)",
        tmp_path,
    )
    assert printed == "True jupyter_distrib.compat.databricks_air"


def test_nothing_is_served_before_it_is_asked_for() -> None:
    assert python("print(importlib.util.find_spec('horovod'), stand_ins._FINDER in sys.meta_path)") == "None False"


# ------------------------------------------------------------------------------------------------------ in a notebook


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    write_trusted(folder, 'compat = ["horovod"]\n')
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib")
        yield book


@pytest.mark.slow
def test_the_lines_of_the_seed_import_here_and_on_the_ranks(book: Notebook) -> None:
    assert "serverless_gpu" in book.ok("%distributed_compat databricks").stdout
    book.ok("""
import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.launcher import distributed as same
from serverless_gpu.compute import GPUType
from serverless_gpu import runtime as rt
assert same is distributed

@distributed(gpus=2, remote=False)
def place(x):
    from serverless_gpu import runtime
    from serverless_gpu.runtime import get_world_size
    return runtime.get_global_rank(), get_world_size(), rt.get_local_rank(), serverless_gpu.__name__, x
""")
    assert book.ok("place.distributed(5)").result == (
        "rank 0: (0, 2, 0, 'serverless_gpu', 5)\nrank 1: (1, 2, 1, 'serverless_gpu', 5)"
    )
    assert book.ok("GPUType.H100 == 'H100', rt.get_world_size()").result == "(True, 1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("import serverless_gpu", "Run %distributed_compat databricks in the notebook: it serves these imports."),
        ("raise ImportError('Extension horovod.torch has not been built: build it')", "uninstall horovod, run %distributed_compat"),
    ],
)  # fmt: skip
def test_an_import_that_fails_says_how_it_is_served(tmp_path: Path, code: str, hint: str) -> None:
    with Notebook(tmp_path) as plain:
        plain.ok("%load_ext jupyter_distrib")
        assert hint in plain.fails(f"%%distributed --ranks 1\n{code}").text


@pytest.mark.slow
def test_the_lines_of_air(book: Notebook) -> None:
    book.ok("%distributed_compat databricks")
    book.ok("from databricks.air import distributed as air\n@air(num_accelerators=2)\ndef two(): return 1")
    assert book.ok("list(two.distributed())").result == "[1, 1]"
    book.ok("@air(accelerator_type='GPU_8xH100')\ndef eight(): return 1\noptions = eight.options")
    assert book.ok("options.gpu_type, options.gpus").result == "('H100', None)"
    wrong = book.fails("@air(accelerator_type='8 x H100')\ndef f(): ...")
    assert "accelerator_type is a text such as GPU_1xA10 or GPU_8xH100; got '8 x H100'" in wrong.traceback
    assert (
        "ray_launch needs Ray, which is not installed here"
        in book.fails(
            "from databricks.air import ray_launch\nray_launch(num_accelerators=2)(lambda: 1).distributed()"
        ).traceback
    )


@pytest.mark.slow
def test_the_settings_serve_names_as_well(book: Notebook) -> None:
    assert book.ok("import horovod\nhorovod.run(lambda x: x + 1, args=(1,), num_proc=2)").result == "[2, 2]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "%distributed_compat needs the name of a platform: choose databricks, spark or horovod"),
        ("sparc", "%distributed_compat sparc is not known: did you mean spark?"),
    ],
)
def test_a_wrong_platform_is_refused(book: Notebook, line: str, why: str) -> None:
    assert why in book.fails(f"%distributed_compat {line}").traceback
