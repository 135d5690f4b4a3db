"""The part of the kernel's environment that is valid under another interpreter or on another machine. Kernel side;
standard library only."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache

from jupyter_distrib.system import process_environment

_EVERYWHERE = ("NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")
"""Prefixes of variables about the communication between ranks, which travel even if the notebook has not set them."""
_NOWHERE = ("RAY_AUTH_",)
"""Prefixes of variables that never travel: the key to the cluster, which a cell that runs on it does not need."""


def that_travel() -> dict[str, str]:
    """Return the variables for ranks on other machines: variables that the notebook has set or changed itself.

    The variables with which the kernel was started are about its own machine, or are secrets that nobody asked to send.
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
    """Return the environment with which this process was started; empty if the system does not give it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def without_own(path: Iterable[str]) -> tuple[str, ...]:
    """Return the user's own entries of a path: the notebook's folder, sources, packages installed in place."""
    return tuple(folder for folder in path if not _is_own(folder))


@cache
def _is_own(folder: str) -> bool:
    real = os.path.realpath(folder)
    return real.endswith(".zip") or any(real == own or real.startswith(own + os.sep) for own in _own_folders())


@cache
def _own_folders() -> frozenset[str]:
    """Return the folders of the standard library and of installed packages; without `sysconfig`'s `data`, which may be
    all of `/usr`."""
    paths = sysconfig.get_paths()
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    bases = [os.path.join(base, "lib", library) for base in (sys.base_prefix, sys.prefix)]
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(map(os.path.realpath, (*installed, *bases, site.getusersitepackages())))
