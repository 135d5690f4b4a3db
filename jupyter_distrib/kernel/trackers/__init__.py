"""The experiment trackers: observers that record runs in another system, one module for each under the tracker's name.

    %%distributed --track mlflow  -->  kernel/trackers/mlflow.py: follow(run)  -->  an observer of the run, or None

A new tracker needs one module and no other change. It has

    follow(run)      returns an observer of the run, or None; called for runs that ask for the tracker by its name, and
                     for all while its library is loaded in the notebook, which may have begun a run with it
    library = "aim"  the module that it writes with; left out if it needs none
    active_run()     returns what of the thread that submits a run `follow` has to know, since another thread will begin
                     the run: `ObservedRun.context` has it, by the tracker's name; may be left out
    unrecorded(run)  returns variables for the ranks of a run that the observer cannot follow; may be left out

Other packages add trackers by an entry point, which names the function in such a module:

    [project.entry-points."jupyter_distrib.trackers"]
    aim = "their_package.tracker:follow"

Their module is imported when a run asks for the tracker, or a module of the tracker's name is loaded in the notebook.
Called in the kernel, in the thread that begins a run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.system import entry_points
from jupyter_distrib.system.data_class import data_class

if TYPE_CHECKING:
    from jupyter_distrib.kernel.record.observer import Follow, ObservedRun

ENTRY_POINTS = "jupyter_distrib.trackers"
NONE = "none"
"""The name that switches off all trackers for a cell."""


def names() -> tuple[str, ...]:
    """Return the names of all trackers."""
    return (*_built_in(), *(name for name in _points() if name not in _built_in()))


def wanted(asked: Collection[str], used: Collection[str] = (), *, attached: bool = False) -> list[str]:
    """Return the trackers that may follow a run: the requested ones and, unless the run is attached, any that its code
    uses or whose library is loaded here, since the notebook may have started a run with it."""
    if NONE in asked:
        return []
    return [name for name in names() if name in asked or (not attached and _is_in_use(name, used))]


def context(asked: Collection[str], used: Collection[str] = ()) -> dict[str, object]:
    """Return each tracker's active run in this thread, by tracker name, for the thread that will start the submitted
    run."""
    found: dict[str, object] = {}
    for name in wanted(asked, used):
        tracker = _loaded(name)
        if tracker is not None and tracker.active_run is not None:
            with suppress(Exception):  # foreign code may raise anything; `follow` says what is wrong
                found[name] = tracker.active_run()
    return found


def check_installed(asked: Collection[str]) -> None:
    """Raise `OptionsError` for a tracker whose library is not installed."""
    for name in asked:
        tracker = _loaded(name) if name in names() else None
        if tracker is not None and tracker.library and not _is_installed(tracker.library):
            advice = f"run %pip install 'jupyter_distrib[{name}]'" if name in _built_in() else "install it"
            raise OptionsError(
                f"--track {name} needs the package {tracker.library}, which is not installed here: "
                f"{advice}, or leave --track {name} out"
            )


def load(name: str) -> Follow:
    """Return the tracker's function that takes a run and returns its observer."""
    return _tracker(name).follow


def unrecorded(name: str, run: ObservedRun) -> Mapping[str, str]:
    """Return the variables for the ranks of a run that a tracker was asked to follow but cannot."""
    tracker = _loaded(name) if name in names() else None
    return {} if tracker is None or tracker.unrecorded is None else tracker.unrecorded(run)


@data_class
class _Tracker:
    """The names of a tracker's module."""

    follow: Follow
    library: str
    active_run: Callable[[], object] | None
    unrecorded: Callable[[ObservedRun], Mapping[str, str]] | None


@cache
def _tracker(name: str) -> _Tracker:
    if name in _built_in():
        module: Any = importlib.import_module(f"{__name__}.{name}")
        follow: Follow = module.follow
    else:
        follow = _points()[name].load()
        module = sys.modules[_points()[name].module]
    return _Tracker(
        follow=follow,
        library=getattr(module, "library", ""),
        active_run=getattr(module, "active_run", None),
        unrecorded=getattr(module, "unrecorded", None),
    )


def _loaded(name: str) -> _Tracker | None:
    """Return a tracker; None if it cannot be imported, which the output of its run then says."""
    try:
        return _tracker(name)
    except Exception:  # noqa: BLE001 - foreign code
        return None


def _is_in_use(name: str, used: Collection[str]) -> bool:
    """Return whether the code uses a tracker that is installed, or its library is loaded in the notebook."""
    if name not in _built_in() and name not in sys.modules:
        return False  # a module of another package is not imported to see what its library is
    tracker = _loaded(name)
    if tracker is None:
        return False
    return tracker.library in sys.modules or (name in used and _is_installed(tracker.library))


def _is_installed(library: str) -> bool:
    if library in sys.modules:
        return True
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the spec of the package that contains it
        return False


@cache
def _built_in() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def _points() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in entry_points.of_group(ENTRY_POINTS)}
