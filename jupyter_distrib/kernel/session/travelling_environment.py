"""The part of the kernel's environment that means something elsewhere: under another interpreter, or on another
machine. Kernel side; standard library only."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache

from jupyter_distrib.system import process_environment

_EVERYWHERE = ("NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")
"""Variables about how ranks talk to one another, whoever has set them."""
_NOWHERE = ("RAY_AUTH_",)
"""The key to the cluster, which a cell that runs there does not need."""


def that_travel() -> dict[str, str]:
    """Variables for ranks on other machines: those that the notebook has set or changed itself.

    What the kernel was started with is about its own machine, or is a secret that nobody has asked to send.
    """
    at_start = _at_start()
    return {
        name: value
        for name, value in process_environment.variables().items()
        if not name.startswith(_NOWHERE)
        if name.startswith(_EVERYWHERE) or at_start.get(name, value if not at_start else None) != value
    }


@cache
def _at_start() -> dict[str, str]:
    """The environment that this process was exec'd with; empty if the system does not tell."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def without_own(path: Iterable[str]) -> tuple[str, ...]:
    """The entries that are the user's: the notebook's folder, sources, packages installed in place."""
    return tuple(folder for folder in path if not _is_own(folder))


@cache
def _is_own(folder: str) -> bool:
    real = os.path.realpath(folder)
    return real.endswith(".zip") or any(real == own or real.startswith(own + os.sep) for own in _own_folders())


@cache
def _own_folders() -> frozenset[str]:
    """The standard library and what is installed; not `sysconfig`'s `data`, which may be all of `/usr`."""
    paths = sysconfig.get_paths()
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    bases = [os.path.join(base, "lib", library) for base in (sys.base_prefix, sys.prefix)]
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(map(os.path.realpath, (*installed, *bases, site.getusersitepackages())))
