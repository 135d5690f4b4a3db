"""The experiment trackers: observers that record runs in another system, one module for each under the system's name.

    %%distributed --track mlflow  -->  kernel/trackers/mlflow.py: follow(run)  -->  an observer of the run, or None

A new tracker needs one module and no other change; other packages add trackers by an entry point:

    [project.entry-points."jupyter_distrib.trackers"]
    aim = "their_package.tracker:follow"

Called in the kernel, in the thread that begins a run. A tracker that is neither asked for nor used by the notebook is
not imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.system import entry_points

if TYPE_CHECKING:
    from jupyter_distrib.kernel.record.observer import Follow

ENTRY_POINTS = "jupyter_distrib.trackers"
NONE = "none"
"""The name that switches off all trackers for a cell."""


def names() -> tuple[str, ...]:
    """Return the names of all trackers."""
    return (*_built_in(), *(name for name in _points() if name not in _built_in()))


def wanted(asked: Collection[str], *, attached: bool = False) -> list[str]:
    """Return the trackers that may follow a run: those that are asked for, and those whose library is loaded here,
    since the notebook may have begun a run with it, if it has begun this one."""
    loaded = () if attached else sys.modules
    return [] if NONE in asked else [name for name in names() if name in asked or name in loaded]


def context(asked: Collection[str]) -> dict[str, object]:
    """Return what the trackers of a run have to know of this thread, which submits the run, since another thread will
    begin it: by name, the run of theirs that is active here."""
    if "mlflow" not in wanted(asked):
        return {}
    from jupyter_distrib.kernel.trackers import mlflow

    return {"mlflow": mlflow.active_run()}


def check_installed(asked: Collection[str]) -> None:
    """Raise `OptionsError` for a tracker of this package whose library is not installed."""
    for name in asked:
        if name in _built_in() and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise OptionsError(
                f"--track {name} needs the package {name}, which is not installed here: "
                f"run %pip install 'jupyter_distrib[{name}]', or leave --track {name} out"
            )


def load(name: str) -> Follow:
    """Return the function of this tracker that takes a run and returns its observer."""
    if name in _built_in():
        follow: Follow = importlib.import_module(f"{__name__}.{name}").follow
    else:
        follow = _points()[name].load()
    return follow


@cache
def _built_in() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def _points() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in entry_points.of_group(ENTRY_POINTS)}
