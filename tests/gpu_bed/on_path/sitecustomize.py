"""Python imports this when it starts, in every process of a test bed: stand-ins come behind `pynvml` and into `torch`
when somebody imports them. And nobody but a rank with a GPU imports torch's compiler before the bed lets them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType

STAND_INS = {"pynvml": "feigned_nvml", "torch": "feigned_cuda"}
COMPILER = "torch._dynamo"
"""What a forkserver imports after torch, and takes long."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds what others find, and has it changed when it has been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == COMPILER:
            wait_for_compiler()
        if name not in STAND_INS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, STAND_INS[name])
        return spec


class Loader(importlib.abc.Loader):
    """Loads as another loader does, then installs a stand-in."""

    def __init__(self, loader: importlib.abc.Loader, stand_in: str) -> None:
        self._loader, self._stand_in = loader, stand_in

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def get_data(self, path: str) -> bytes:
        """Read a file beside the module: torch's `version.py` tells of the build that the bed has."""
        feigned: bytes | None = None
        if path.endswith("version.py"):
            feigned = importlib.import_module(self._stand_in).version_file()
        return self._loader.get_data(path) if feigned is None else feigned  # type: ignore[attr-defined, no-any-return]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(self._stand_in).install(module)


def wait_for_compiler() -> None:
    """Wait until the bed has a compiler; not in a rank with a GPU, which would keep its next cell waiting."""
    from feigned_nvml import FOLDER, bed

    while not bed()["compiler"] and not (FOLDER / "groups" / str(os.getpid())).exists():
        time.sleep(0.01)


if "CUDA_GPU_BED" in os.environ:
    sys.meta_path.insert(0, Finder())
