"""The private names of other software that the package uses, looked up in what is installed here.

A new version that lacks one fails by its name. A name alone does not say that it still means the same: the tests
marked `versions` execute what relies on them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import io
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.system import private_names, process_environment
from jupyter_distrib.system.private_names import LIBRARIES, Library, MissingNameError


def version_of(library: Library) -> str:
    return platform.python_version() if library.name == "Python" else importlib.metadata.version(library.name)


def numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:2]]


# ------------------------------------------------------------------------------------------- instances and results


def fsdp_module() -> Any:
    """A model of one rank that has made a step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module: Any = torch.nn.Linear(2, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    module(torch.ones(1, 2)).sum().backward()
    state = module._get_fsdp_state()
    module.param_group = (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])[0]
    module.parameter = module.param_group.fsdp_params[0]
    return module


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


def loss() -> Any:
    import torch

    return torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), torch.ones(2)).grad_fn


def divided() -> Any:
    import torch

    return (torch.ones(2, requires_grad=True) / 2).grad_fn


def summed() -> Any:
    import torch

    return torch.ones(2, requires_grad=True).sum().grad_fn


def checkpointed() -> Any:
    import torch
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    return checkpoint_wrapper.checkpoint_wrapper(torch.nn.Linear(1, 1))


def compiled() -> Any:
    import torch

    return torch.compile(torch.nn.Linear(1, 1))


def typed_storage() -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=torch.UntypedStorage(1), dtype=torch.uint8, _internal=True)


def loader() -> Any:
    import torch

    return torch.utils.data.DataLoader([1])  # type: ignore[arg-type]


def gloo() -> Any:
    import torch

    return torch.distributed.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def pickler() -> Any:
    import io

    import cloudpickle

    return cloudpickle.Pickler(io.BytesIO())


def written(where: str) -> Callable[[], Any]:
    """The attributes that the methods of a class set, for objects that are hard to make."""

    def example() -> Any:
        source = inspect.getsource(named(where))
        return SimpleNamespace(**dict.fromkeys(re.findall(r"self\.(\w+)(?: = |: .* = )", source)))

    return example


def named(where: str) -> Any:
    module, _, name = where.partition(":")
    return attrgetter(name)(importlib.import_module(module))


EXAMPLES: dict[str, Callable[[], Any]] = {
    "bz2:BZ2File()": lambda: importlib.import_module("bz2").BZ2File(io.BytesIO()),
    "lzma:LZMAFile()": lambda: importlib.import_module("lzma").LZMAFile(io.BytesIO()),
    "torch.distributed.fsdp:fully_shard()": fsdp_module,
    "torch.distributed.device_mesh:DeviceMesh()": mesh,
    "torch.nn.functional:mse_loss()": loss,
    "torch:div()": divided,
    "torch:sum()": summed,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper()": checkpointed,
    "torch:compile()": compiled,
    "torch:TypedStorage()": typed_storage,
    "torch.utils.data:DataLoader()": loader,
    "ctypes:CDLL()": lambda: importlib.import_module("ctypes").CDLL(None),
    "torch.optim:Optimizer()": written("torch.optim:Optimizer"),
    "torch.distributed:new_group()": gloo,
    "cloudpickle.cloudpickle:Pickler()": pickler,
    "ipykernel.comm.comm:BaseComm()": written("ipykernel.comm.comm:BaseComm"),
    "ipykernel.zmqshell:ZMQInteractiveShell()": written("ipykernel.zmqshell:ZMQInteractiveShell"),
    "deepspeed.runtime.engine:DeepSpeedEngine()": written("deepspeed.runtime.engine:DeepSpeedEngine"),
    "pyspark:SparkContext()": written("pyspark:SparkContext"),
    "ipykernel.kernelbase:Kernel()": written("ipykernel.kernelbase:Kernel"),
    "mlflow:MlflowClient()": written("mlflow:MlflowClient"),
    "datasets:IterableDataset()": lambda: importlib.import_module("datasets").IterableDataset.from_generator(list),
    "datasets:Dataset.from_dict()": lambda: importlib.import_module("datasets").Dataset.from_dict({"a": [1]}),
}


WITH_CUDA = {"torch._C._distributed_c10d _dump_nccl_trace", "torch._C _cuda_clearCublasWorkspaces"}


def has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def is_there(full: str, examples: dict[str, Any]) -> bool:
    where, _, name = full.rpartition(" ")
    first, called, rest = where.partition("()")
    importlib.import_module(first.partition(":")[0])
    if not called:
        return private_names.has(private_names.found(where), name)
    if first not in examples:
        examples[first] = EXAMPLES.get(f"{first}()", named(first))()
    owner = examples[first]
    for part in filter(None, rest.split(".")):
        owner = getattr(owner, part.removesuffix("()"), None)
        owner = owner() if part.endswith("()") and owner is not None else owner
    return private_names.has(owner, name)


def gone(library: Library) -> list[str]:
    """What the installed version should have by the table, and does not."""
    version, examples = numbers(version_of(library)), dict[str, Any]()
    missing = []
    for full in private_names.every(library):
        first, last = library.changing.get(full, ("", ""))
        is_due = (not first or version >= numbers(first)) and (not last or version <= numbers(last))
        is_due = is_due and (full not in WITH_CUDA or has_cuda())
        try:
            there = is_there(full, examples)
        except ImportError:
            there = False
        if is_due and not there:
            missing.append(full)
    return missing


@pytest.fixture
def alone(torch_keeps_descriptors: None) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_installed_version_has_each_name(library: Library, alone: None) -> None:
    if library.name != "Python" and not process_environment.version(library.name):
        pytest.skip(f"{library.name} is not installed")
    assert gone(library) == [], f"{library.name} {version_of(library)} no longer has these"


# ----------------------------------------------------------------------------------- without one of them, in words


def test_a_needed_name_that_is_gone_is_reported_with_the_versions_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloudpickle import cloudpickle

    private_names.check(private_names.CLOUDPICKLE)
    monkeypatch.delattr(cloudpickle, "_class_setstate")
    version = importlib.metadata.version("cloudpickle")
    said = (
        f"cloudpickle {version} has no cloudpickle.cloudpickle._class_setstate, which jupyter_distrib needs: "
        "install cloudpickle 3.0 to 3.1, or a newer jupyter_distrib."
    )
    with pytest.raises(MissingNameError, match=f"^{re.escape(said)}$"):
        private_names.check(private_names.CLOUDPICKLE)


LOSSES = (
    "import torch; del torch.utils.data.dataloader._BaseDataLoaderIter",
    "import torch.distributed as d; del d.ProcessGroup._get_backend",
    "import torch; del torch.autograd.profiler.profile._prepare_trace",
    "import torch.distributed as d; del d.distributed_c10d._world",
)


@pytest.mark.slow
def test_a_cloudpickle_without_a_name_is_refused_by_an_error_of_ours() -> None:
    program = (
        "from cloudpickle import cloudpickle as c; del c._class_setstate\n"
        "import jupyter_distrib.serialization.definitions"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("jupyter_distrib.errors.PayloadError: cloudpickle ")
    assert "has no cloudpickle.cloudpickle._class_setstate, which jupyter_distrib needs" in last


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_torch_without_a_name_is_refused_and_not_met_by_an_attribute_error(loss: str) -> None:
    program = f"{loss}\nimport jupyter_distrib.worker.pytorch.pytorch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingNameError: torch " in last
    assert loss.rpartition(".")[2] in last
    assert "install torch 2.9 to 2.15" in last
