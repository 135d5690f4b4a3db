from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

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
            "horovod.runner, horovod.torch, horovod.torch.elastic, horovod.spark, horovod.spark.torch, horovod.spark.keras, "
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
        dedent("""\
            stand_ins.enable(['databricks'])
            import databricks.sdk
            from databricks.air import distributed
            print(databricks.sdk.real, distributed.__module__)"""),
        tmp_path,
    )
    assert printed == "True jupyter_distrib.compat.databricks_air"


def test_air_is_a_module_of_its_own_and_of_a_namespace_that_comes_later(tmp_path: Path) -> None:
    printed = python(
        """
stand_ins.enable(["databricks"])
print(importlib.util.find_spec("databricks"))
import databricks.air
print(databricks.air.distributed.__module__, importlib.util.find_spec("databricks"))
import os
os.makedirs(sys.path[1] + "/later/databricks/sdk")
open(sys.path[1] + "/later/databricks/sdk/__init__.py", "w").write("real = True")
sys.path.insert(0, sys.path[1] + "/later")
import databricks.sdk
print(databricks.sdk.real, databricks.air.distributed.__module__)
""",
        tmp_path,
    )
    assert printed.splitlines() == [
        "None",
        "jupyter_distrib.compat.databricks_air None",
        "True jupyter_distrib.compat.databricks_air",
    ]


def test_air_is_an_attribute_of_a_namespace_that_is_installed(tmp_path: Path) -> None:
    for regular in ("", "name = 'regular'"):
        (tmp_path / "databricks" / "sdk").mkdir(parents=True, exist_ok=True)
        (tmp_path / "databricks" / "sdk" / "__init__.py").write_text("real = True")
        if regular:
            (tmp_path / "databricks" / "__init__.py").write_text(regular)
        printed = python(
            dedent("""\
                stand_ins.enable(['databricks'])
                import databricks.sdk
                import databricks.air
                print(databricks.sdk.real, databricks.air.distributed.__module__)"""),
            tmp_path,
        )
        assert printed == "True jupyter_distrib.compat.databricks_air"


def test_an_installed_air_wins(tmp_path: Path) -> None:
    (tmp_path / "databricks").mkdir()
    (tmp_path / "databricks" / "air.py").write_text("distributed = 'real'")
    cell = dedent("""\
        stand_ins.enable(['databricks'])
        import databricks.air
        print(databricks.air.distributed)""")
    assert python(cell, tmp_path) == "real"


@pytest.mark.parametrize(("package", "name"), [("serverless_gpu", "data"), ("databricks/air", "data")])
def test_a_part_that_an_installed_package_does_not_have_is_not_added_to_it(
    package: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / package).mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text("")
    module = f"{package.replace('/', '.')}.{name}"
    printed = python(
        f"stand_ins.enable(['databricks'])\ntry:\n    import {module}\nexcept ImportError as e:\n    print(e)", tmp_path
    )
    assert printed == f"No module named '{module}'"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import databricks.air.tables", "No module named 'databricks.air.tables': databricks is not installed"),
        (
            "from databricks.air.data import UCDataset",
            "has DataLoader, UCVolumeDataset, UCVolumeReader, UCVolumeWriter",
        ),
        (
            "import serverless_gpu.tables",
            "stands in for serverless_gpu, serverless_gpu.launcher, serverless_gpu.compute",
        ),
        ("from serverless_gpu.tables import Table", "No module named 'serverless_gpu.tables'"),
        (
            "from serverless_gpu import tables",
            "No module named 'serverless_gpu.tables': serverless_gpu is not installed",
        ),
        ("from serverless_gpu.ray import Nothing", "serverless_gpu.ray has RayFunction, RayMetricsMonitor, ray_launch"),
        ("from databricks import sql", "stands in for databricks, databricks.air, databricks.air.data only"),
        ("import sparkdl.xgboost", "stands in for sparkdl, sparkdl.horovod, sparkdl.horovod.tensorflow"),
    ],
)
def test_a_part_that_is_missing_says_what_is_served(line: str, told: str) -> None:
    printed = python(
        dedent(f"""\
            stand_ins.enable(['databricks', 'horovod'])
            try:
                {line}
            except ImportError as e:
                print(e)""")
    )
    assert told.replace("serverless_gpu.ray has ", "has ") in printed, printed


@pytest.mark.parametrize("name", ["horovod", "sparkdl", "serverless_gpu", "databricks", "horovod.torch"])
def test_a_library_that_looks_after_an_import_does_not_find_ours_either(name: str) -> None:
    printed = python(
        dedent(f"""\
            stand_ins.enable(['horovod', 'databricks'])
            import horovod.torch, sparkdl, serverless_gpu.runtime, databricks.air
            print(importlib.util.find_spec({name!r}), importlib.util.find_spec('json').name)""")
    )
    assert printed == "None json"


def test_a_name_of_find_spec_that_was_bound_before_does_not_find_ours_either() -> None:
    printed = python("""
from importlib.util import find_spec
import pkgutil
class Looks:
    look = staticmethod(importlib.util.find_spec)
stand_ins.enable(["horovod", "databricks"])
import horovod.torch, sparkdl, serverless_gpu.runtime, json
names = ("horovod", "horovod.torch", "sparkdl", "serverless_gpu")
print({str(find(name)) for find in (find_spec, Looks.look) for name in names}, find_spec("json").name, find_spec(".util", "importlib").name)
del sys.modules["jupyter_distrib.interfaces.stand_ins"]
from jupyter_distrib.interfaces import stand_ins
print(find_spec("horovod"), find_spec("json").name)
""")
    assert printed.splitlines() == ["{'None'} json importlib.util", "None json"]


def test_names_of_the_platforms_are_there() -> None:
    printed = python("""
stand_ins.enable(["databricks", "horovod"])
import horovod, horovod.runner
from serverless_gpu.runtime import get_replica_rank
from serverless_gpu.ray import RayMetricsMonitor, ray_launch
from sparkdl.horovod.tensorflow.keras import LogCallback
print(horovod.runner.run is horovod.run, get_replica_rank(), RayMetricsMonitor.__name__)
callback = LogCallback(per_batch_log=True)
callback.on_train_begin()
callback.on_epoch_begin(3)
callback.on_train_batch_end(7, {"loss": 0.25})
callback.on_epoch_end(3, {"loss": 0.125, "accuracy": 1})
print("keras" in sys.modules)
""")
    assert printed.splitlines() == [
        "True 0 RayMetricsMonitor",
        "[log_to_driver] epoch 3, batch 7, loss 0.25",
        "[log_to_driver] epoch 3, loss 0.125, accuracy 1",
        "False",
    ]


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
    assert book.ok("place.distributed(5)").result == "[(0, 2, 0, 'serverless_gpu', 5), (1, 2, 1, 'serverless_gpu', 5)]"
    assert book.ok("place.distributed(5) + [1] == [*place.distributed(5), 1]").result == "True"
    assert book.ok("GPUType.H100 == 'H100', rt.get_world_size()").result == "(True, 1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("import serverless_gpu", "Run %distributed_compat databricks in the notebook: it serves these imports."),
        ("raise ImportError('Extension horovod.torch has not been built: build it')", "uninstall horovod, and run %distributed_compat"),
    ],
)  # fmt: skip
def test_an_import_that_fails_says_how_it_is_served(tmp_path: Path, code: str, hint: str) -> None:
    with Notebook(tmp_path) as plain:
        plain.ok("%load_ext jupyter_distrib")
        assert hint in plain.fails(f"%%distributed --ranks 1\n{code}").text


@pytest.mark.slow
def test_the_lines_of_air(book: Notebook) -> None:
    book.ok("%distributed_compat databricks")
    book.ok(
        dedent("""\
            from databricks.air import distributed as air
            @air(num_accelerators=2)
            def two(): return 1""")
    )
    assert book.ok("list(two.distributed())").result == "[1, 1]"
    book.ok(
        dedent("""\
            @air(accelerator_type='GPU_8xH100')
            def eight(): return 1
            options = eight.options""")
    )
    assert book.ok("options.gpu_type, options.gpus").result == "('H100', None)"
    wrong = book.fails("@air(accelerator_type='8 x H100')\ndef f(): ...")
    assert "accelerator_type must be a string such as GPU_1xA10 or GPU_8xH100; got '8 x H100'" in wrong.traceback
    assert (
        "ray_launch needs Ray, which is not installed here"
        in book.fails(
            "from databricks.air import ray_launch\nray_launch(num_accelerators=2)(lambda: 1).distributed()"
        ).traceback
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["from serverless_gpu import distributed as d", "from databricks.air import distributed as d"]
)
def test_a_decorator_without_parentheses_takes_the_defaults(book: Notebook, line: str) -> None:
    book.ok(
        dedent(f"""\
            %distributed_compat databricks
            {line}
            @d
            def two(x): return x
            values = two.distributed(3)""")
    )
    assert book.ok("list(values), two.__name__").result == "([3, 3], 'two')"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["from serverless_gpu.ray import ray_launch", "from databricks.air import ray_launch"])
def test_ray_launch_without_parentheses_takes_the_defaults(book: Notebook, line: str) -> None:
    book.ok("%distributed_compat databricks")
    failed = book.fails(
        dedent(f"""\
            {line}
            @ray_launch
            def one(): return 1
            one.distributed()""")
    )
    assert "ray_launch needs Ray" in failed.traceback
    assert "ray_init needs Ray" in book.fails("from databricks.air import ray_init\nray_init()").traceback


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
