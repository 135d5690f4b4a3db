"""The list of all libraries that are treated specially, and their combined answers to one question. A library with
code of its own has a file beside this one."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries.accelerate import ACCELERATE
from jupyter_distrib.libraries.compressed_files import BZ2, GZIP, LZMA
from jupyter_distrib.libraries.deepspeed import DEEPSPEED
from jupyter_distrib.libraries.h5py import H5PY
from jupyter_distrib.libraries.keras import KERAS
from jupyter_distrib.libraries.library import Library
from jupyter_distrib.libraries.lightning import LIGHTNING
from jupyter_distrib.libraries.lmdb import LMDB
from jupyter_distrib.libraries.mlflow import MLFLOW
from jupyter_distrib.libraries.numpy_objects import NUMPY
from jupyter_distrib.libraries.pydantic import PYDANTIC
from jupyter_distrib.libraries.pyspark import PYSPARK
from jupyter_distrib.libraries.ray import RAY
from jupyter_distrib.libraries.rich import RICH
from jupyter_distrib.libraries.tensorboard import TENSORBOARD
from jupyter_distrib.libraries.tensorflow import TENSORFLOW
from jupyter_distrib.libraries.torch_objects import TORCH
from jupyter_distrib.libraries.torchmetrics import TORCHMETRICS
from jupyter_distrib.libraries.tqdm import TQDM
from jupyter_distrib.libraries.transformers import TRANSFORMERS, refuse_shards
from jupyter_distrib.libraries.triton import TRITON
from jupyter_distrib.libraries.wandb import WANDB

LIBRARIES = (
    ACCELERATE,
    BZ2,
    Library(modules=("composer",), divides_data=True),
    Library(
        modules=("concurrent",),
        stays={
            "concurrent.futures:Executor": "its threads or processes belong to the notebook: make it in the cell",
            "concurrent.futures:Future": "its call runs in the notebook: take its result() in an earlier cell",
        },
    ),
    Library(
        modules=("duckdb",),
        stays={
            "duckdb:DuckDBPyConnection": "a connection belongs to its process: connect in the cell",
            "duckdb:DuckDBPyRelation": "a relation belongs to its connection: send its table, `relation.arrow()`",
        },
    ),
    Library(
        modules=("ipywidgets",),
        stays={
            "ipywidgets.widgets.widget:Widget": "a widget belongs to the notebook's page: "
            "give its value a name in an earlier cell, and use that"
        },
    ),
    Library(modules=("datasets",), extra="trl"),
    DEEPSPEED,
    Library(modules=("ignite",), adds_up_metrics=True),
    GZIP,
    H5PY,
    Library(
        modules=("jinja2",),
        stays={
            "jinja2:Template": "a template is code that belongs to its process: send its text, and make it in the cell",
            "jinja2:Environment": "an environment holds templates of its process: make it in the cell",
        },
    ),
    KERAS,
    LIGHTNING,
    Library(modules=("litdata",), divides_data=True),
    LMDB,
    LZMA,
    MLFLOW,
    NUMPY,
    Library(modules=("peft",), mend={"peft.peft_model": partial(refuse_shards, "PeftModel")}),
    Library(modules=("petastorm",), divides_data=True),
    Library(
        modules=("pyarrow",),
        stays={
            "pyarrow.parquet:ParquetFile": "it does not tell its path: open it in the cell, or use "
            "`pyarrow.dataset.dataset(path)`",
            "pyarrow:NativeFile": "it does not tell its path: open it in the cell",
            "pyarrow:RecordBatchFileReader": "it does not tell its path: open it in the cell",
        },
    ),
    PYDANTIC,
    PYSPARK,
    RAY,
    RICH,
    Library(
        modules=("safetensors",),
        stays={"safetensors:safe_open": "it does not tell its path: open it in the cell"},
    ),
    Library(modules=("streaming",), divides_data=True),  # mosaicml-streaming
    Library(
        modules=("subprocess",),
        stays={"subprocess:Popen": "a process belongs to the program that started it: start it in the cell"},
    ),
    Library(
        modules=("sqlite3",), stays={"sqlite3:Connection": "a connection belongs to its process: connect in the cell"}
    ),
    TENSORBOARD,
    TENSORFLOW,
    Library(
        modules=("threading",), stays={"threading:Thread": "a thread belongs to its process: start it in the cell"}
    ),
    TORCH,
    TORCHMETRICS,
    TQDM,
    TRANSFORMERS,
    TRITON,
    Library(modules=("trl",), extra="trl"),
    Library(modules=("unsloth",), comes_before="transformers, trl and peft"),
    WANDB,
)

_DIVIDE = {module for library in LIBRARIES if library.divides_data for module in library.modules}
_FIRST = {library.modules[0]: library.comes_before for library in LIBRARIES if library.comes_before}
_WRAP = {module for library in LIBRARIES if library.wraps_models for module in library.modules}


def first_imported(sources: Iterable[str]) -> str:
    """Return a sentence on a library in these programs that needs new ranks, since it must be imported before others;
    empty if there is none."""
    for name, others in _FIRST.items():
        for source in sources:
            if name in source and re.search(rf"^[ \t]*(?:import|from)[ \t]+{name}\b", source, re.MULTILINE):
                return f"on new ranks, since {name} has to be imported before {others}"
    return ""


def extras() -> dict[str, str]:
    """Return, for each module, the extra of this package that installs it."""
    return {library.modules[0]: library.extra for library in LIBRARIES if library.extra}


def cpu_environment() -> dict[str, str]:
    """Return the variables that tell libraries that a rank has no accelerator."""
    return {name: value for library in LIBRARIES for name, value in library.cpu_environment.items()}


def instead_of_launching() -> str:
    """Return advice, for use in a sentence, on what to call instead of the libraries' own launchers."""
    return ", ".join(library.instead_of_launching for library in LIBRARIES if library.instead_of_launching)


def divides_data(thing: object) -> bool:
    """Return whether `thing` is a data loader, data set or sampler of a library that divides data itself, or derived
    from one."""
    return any(cls.__module__.partition(".")[0] in _DIVIDE for cls in type(thing).__mro__)


def adds_up_metrics() -> bool:
    """Return whether a library is loaded whose metrics add up over the ranks."""
    return any(module in sys.modules for library in LIBRARIES if library.adds_up_metrics for module in library.modules)


def prepares_loaders() -> bool:
    """Return whether a library has an object, such as an `Accelerator`, that shards the loaders it is given, and until
    then expects lengths and schedules of whole loaders."""
    return any(
        getattr(getattr(sys.modules.get(module), name, None), "_shared_state", None)
        for module, _, name in (each.prepares_loaders.partition(":") for each in LIBRARIES if each.prepares_loaders)
    )


def wraps_model(module: object) -> bool:
    """Return whether a module belongs to a library whose modules reduce the gradients of the modules inside."""
    return _top(module) in _WRAP


def shared_states() -> list[tuple[str, str]]:
    """Return the classes, as (module, name), whose instances share a state for the life of a program."""
    return [
        (module, name) for library in LIBRARIES for module, names in library.shared_states.items() for name in names
    ]


_Form = Callable[[Any], tuple[Any, ...]]


def sent_forms() -> Mapping[type, _Form]:
    """Return the functions that reduce instances of these loaded classes, and of derived ones, for a rank. The result
    is kept until one of these modules is loaded: each pickle asks for it, also the one for the size of each name."""
    global _made
    loaded = tuple(map(sys.modules.get, _modules()))
    if _made is not None and _made[0] == loaded:
        return _made[1]
    modules, found, is_whole = sys.modules, dict[type, _Form](), True
    for module, name, form in _forms():
        if module in modules:
            if isinstance(cls := getattr(modules[module], name, None), type):
                found[cls] = form
            else:  # another thread may be importing it
                is_whole = False
    _made = (loaded, found) if is_whole else None
    return found


_made: tuple[tuple[ModuleType | None, ...], Mapping[type, _Form]] | None = None
"""The modules for which these functions were last looked up, and the functions."""


@cache
def _modules() -> tuple[str, ...]:
    return tuple(dict.fromkeys(module for module, _, _ in _forms()))


@cache
def _forms() -> tuple[tuple[str, str, _Form], ...]:
    """Return the same as module, name of the class, and function, for all libraries."""
    forms: dict[tuple[str, str], _Form] = dict.fromkeys(shared_states(), _refused)
    for library in LIBRARIES:
        stay: dict[str, _Form] = {name: partial(_stays, reason) for name, reason in library.stays.items()}
        for place, form in {**library.sent, **stay}.items():
            module, _, name = place.partition(":")
            forms[module, name] = form
    return tuple((*place, form) for place, form in forms.items())


def _stays(reason: str, _: object) -> tuple[Any, ...]:
    raise pickle.PicklingError(reason)


def _refused(_: object) -> tuple[Any, ...]:
    raise pickle.PicklingError("it describes the notebook's process, not a rank")


def mends() -> dict[str, Callable[[ModuleType], None]]:
    """Return the functions to call with a module after its import, by the module's full name."""
    return {module: mend for library in LIBRARIES for module, mend in library.mend.items()}


def after_cell() -> list[tuple[str, Callable[[ModuleType], None]]]:
    """Return the functions to call with a loaded module after each cell, each with the module's full name."""
    return [(module, end) for library in LIBRARIES for module, end in library.after_cell.items()]


def repeated_blocks(model: Any) -> set[str]:
    """Return the names of the classes that the model's own library declares as its blocks."""
    return {name for library in LIBRARIES for name in library.repeated_blocks(model)}


def is_split(part: object) -> bool:
    """Return whether a stream is a share made by `datasets.distributed.split_dataset_by_node`."""
    return getattr(part, "_distributed", None) is not None


def counts_samples(stream: object) -> bool:
    """Return whether a stream of `datasets` skips or takes a number of samples: ranks that divide its shards would each
    skip or take a part of that number, and so read other samples."""
    parts = [getattr(stream, "_ex_iterable", None)]
    for part in parts:
        if getattr(part, "split_when_sharding", False):
            return True
        parts += [each for each in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())) if each]
    return False


def dataset_fingerprint(thing: object) -> object:
    """Return the fingerprint of a dataset of `datasets`, which spares reading its tables; None for anything else."""
    try:
        return getattr(thing, "_fingerprint", None)
    except Exception:  # noqa: BLE001 - an object of the user may answer in any way
        return None


def _top(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]
