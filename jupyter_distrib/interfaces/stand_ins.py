"""Serves the import names of other platforms by our stand-ins, once a notebook asks for them.

    %distributed_compat spark    then    from pyspark.ml.torch.distributor import TorchDistributor

An installed package always takes precedence. Names at the top (`horovod`) are served by a finder at the end of
`sys.meta_path`, to import statements only: a library that merely looks whether the package is there finds nothing, also
after such an import.
Names inside a package of which we provide one part (`pyspark.ml.torch.distributor`) are only put into `sys.modules`, so
that the package itself stays missing.

Kernel and ranks, which follow the kernel by an environment variable; standard library only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

VARIABLE = "JUPYTER_DISTRIB_COMPAT"
"""Environment variable with the names of the platforms, joined by commas."""
_HOME = "jupyter_distrib.compat"
PLATFORMS: dict[str, dict[str, str]] = {
    "databricks": {
        "serverless_gpu": "serverless_gpu",
        "serverless_gpu.launcher": "serverless_gpu",
        "serverless_gpu.compute": "serverless_gpu",
        "serverless_gpu.runtime": "serverless_gpu_runtime",
        "serverless_gpu.ray": "ray_launch",
        "serverless_gpu.data": "serverless_gpu_data",
        "databricks": "databricks",
        "databricks.air": "databricks_air",
        "databricks.air.data": "serverless_gpu_data",
    },
    "spark": {
        "pyspark.ml.torch.distributor": "torch_distributor",
        "pyspark.ml.deepspeed": "deepspeed_distributor",
        "pyspark.ml.deepspeed.deepspeed_distributor": "deepspeed_distributor",
        "spark_tensorflow_distributor": "mirrored_strategy_runner",
    },
    "horovod": {
        "sparkdl": "horovod_runner",
        "sparkdl.horovod": "horovod_runner",
        "sparkdl.horovod.tensorflow": "horovod_log_callback",
        "sparkdl.horovod.tensorflow.keras": "horovod_log_callback",
        "horovod": "horovod_run",
        "horovod.runner": "horovod_run",
        "horovod.torch": "horovod.torch",
        "horovod.torch.elastic": "horovod.elastic",
        "horovod.spark": "horovod_spark",
        "horovod.spark.torch": "horovod_estimators",
        "horovod.spark.keras": "horovod_estimators",
        "horovod.spark.lightning": "horovod_estimators",
    },
}
"""Import names of each platform, with the module of `compat/` that serves each."""
_NAMESPACES = ("databricks",)
"""The names at the top that are namespaces: our names inside them are served beside an installed part."""
_on: dict[str, str] = {}
"""The names that are served in this process."""
_followed = ""


def enable(platforms: Iterable[str]) -> None:
    """Serve the names of these platforms from now on, in this process and in the ranks of later runs."""
    chosen = [name for name in PLATFORMS if name in {*platforms, *os.environ.get(VARIABLE, "").split(",")}]
    if chosen:
        os.environ[VARIABLE] = ",".join(chosen)
        follow_environment()


def follow_environment() -> None:
    """Serve the names of the platforms that the environment names; called before each cell of a rank."""
    global _followed
    wanted = os.environ.get(VARIABLE, "")
    if wanted == _followed:
        return
    _followed = wanted
    _on.clear()
    for platform in wanted.split(","):
        _on.update(PLATFORMS.get(platform, {}))
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
        _hide_from_find_spec()
    for name in _on:
        if "." in name and name.partition(".")[0] not in _on and not _is_installed(name):
            sys.modules.setdefault(name, StandInModule(name))


def top_names() -> dict[str, str]:
    """Return the packages that are replaced as a whole, each with its platform."""
    every = ((name, platform) for platform, names in PLATFORMS.items() for name in names)
    return {name: platform for name, platform in every if "." not in name and name not in _NAMESPACES}


def real_packages(platform: str) -> list[str]:
    """Return the packages of a platform that are installed here, which get no stand-in."""
    tops = dict.fromkeys(name.partition(".")[0] for name in PLATFORMS[platform])
    return [top for top in tops if top not in _NAMESPACES and _is_installed(top)]


def _is_installed(name: str) -> bool:
    """Return whether this module is installed; an installed package is assumed to have all its modules, unless it is a
    namespace."""
    top = name.partition(".")[0]
    try:
        spec = _find_spec(top)
        if spec is None or spec.origin is not None:
            return spec is not None and not isinstance(spec.loader, StandInLoader)
        return _find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class StandInModule(types.ModuleType):
    """A module under a foreign name that loads ours when one of its attributes is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"jupyter_distrib's stand-in for {name}.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="jupyter_distrib")
        # So that the import of a missing part asks the finder, whose error names the existing parts.
        self.__path__: list[str] = []

    def names(self) -> tuple[str, ...]:
        """Return the names that the module has."""
        ours = importlib.import_module(f"{_HOME}.{_on[self.__name__]}")
        return tuple(ours.__all__)

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, (self.__name__,)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        ours = importlib.import_module(f"{_HOME}.{_on[self.__name__]}")
        try:
            return getattr(ours, name)
        except AttributeError:
            raise AttributeError(_missing(self.__name__, name, ours.__all__)) from None


class StandInLoader(importlib.abc.Loader):
    """The loader of stand-ins."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: ours is loaded when the module is used."""


class StandInFinder(importlib.abc.MetaPathFinder):
    """The finder at the end of `sys.meta_path`, for modules that no package has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_import():
            return None
        if fullname in _on and not _is_real(fullname.rpartition(".")[0]):
            return importlib.machinery.ModuleSpec(fullname, StandInLoader(), origin="jupyter_distrib", is_package=True)
        top = fullname.partition(".")[0]
        if (found := _found_since(top, fullname)) is not None:
            return found
        parent, _, part = fullname.rpartition(".")
        if (
            isinstance(served := sys.modules.get(parent), StandInModule)
            and parent not in _NAMESPACES
            and not _more(parent)
        ):
            raise ModuleNotFoundError(_missing(parent, part, served.names()), name=top)  # as `from parent import part`
        ours = [name for name in _on if name == top or name.startswith(f"{top}.")]
        if ours and (top not in sys.modules or isinstance(sys.modules[top], StandInModule)):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: {top} is not installed, and jupyter_distrib stands in for "
                f"{', '.join(ours)} only (%distributed_compat)",
                name=top,
            )
        return None


def _missing(module: str, name: str, names: Iterable[str]) -> str:
    return (
        f"{module}.{name} is not there: jupyter_distrib stands in for {module} (%distributed_compat) and has "
        f"{', '.join(names)} of it"
    )


def _is_real(package: str) -> bool:
    """Return whether this package was imported and is the installed one, to which no part of ours is added."""
    module = sys.modules.get(package)
    return module is not None and package not in _NAMESPACES and not isinstance(module, StandInModule)


def _more(module: str) -> bool:
    """Return whether modules inside this one are served."""
    return any(other.startswith(f"{module}.") for other in _on)


def _found_since(top: str, fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module in a namespace that was installed after our stand-in for it was imported."""
    package = sys.modules.get(top)
    if top not in _NAMESPACES or not isinstance(package, StandInModule) or fullname == top:
        return None
    spec = importlib.machinery.PathFinder.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return None
    package.__path__ = list(spec.submodule_search_locations)
    return importlib.machinery.PathFinder.find_spec(fullname, package.__path__)


_UNCHANGED = "_jupyter_distrib_unchanged"


def _original_find_spec() -> Callable[..., importlib.machinery.ModuleSpec | None]:
    function = importlib.util.find_spec
    if not isinstance(function, types.FunctionType):
        return function
    unchanged = types.FunctionType(function.__code__, function.__globals__, "find_spec", function.__defaults__)
    known: dict[str, Any] = vars(function)  # for this module, loaded again
    return cast("Callable[..., importlib.machinery.ModuleSpec | None]", known.setdefault(_UNCHANGED, unchanged))


_find_spec = _original_find_spec()


def _hide_from_find_spec() -> None:
    """Make `importlib.util.find_spec` find no stand-in, under every name that a library has bound that function to."""
    if isinstance(importlib.util.find_spec, types.FunctionType):
        importlib.util.find_spec.__code__ = _hiding_find_spec.__code__
    else:
        importlib.util.find_spec = _find_no_stand_in


def _hiding_find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """Find a module; this code runs with the names of `importlib.util`."""
    from jupyter_distrib.interfaces import stand_ins  # noqa: PLW0406 - it has none of the names of this module

    return stand_ins._find_no_stand_in(name, package)  # noqa: SLF001 - of this module


def _find_no_stand_in(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """Find a module as `importlib.util.find_spec` does, but no stand-in: code that looks for a package wants the
    package."""
    if isinstance(sys.modules.get(name), StandInModule):
        return None
    return _find_spec(name, package)


def _is_import() -> bool:
    """Return whether the finder was called by an import, not by `importlib.util.find_spec`."""
    frame: types.FrameType | None = sys._getframe(2)  # noqa: SLF001 - the standard library looks at callers so, too
    while frame is not None and frame.f_code.co_name == "_find_spec":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_find_and_load_unlocked"


_FINDER = StandInFinder()
