"""The state of the process at the start of every cell on a rank: folder, variables, path, threads, modules as they are
on disk, signal handlers. Rank's main thread.

The process lives on, so traces of a cell that would make the next one fail are removed:

- Signal handlers: Lightning ignores SIGINT while it shuts down, and leaves it ignored.
- States that a library keeps for the life of a program (`libraries/`): Accelerate's arguments and process group,
  MLflow's active runs.
"""

from __future__ import annotations

import linecache
import shlex
import signal
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Any

from jupyter_distrib.cells import event_loops
from jupyter_distrib.interfaces import identity, stand_ins
from jupyter_distrib.interfaces.framework import Groups
from jupyter_distrib.libraries import known, settings
from jupyter_distrib.system import file_owner, process_environment
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import child_processes, local_modules, numa, rank_environment, threads
from jupyter_distrib.worker.output import displaying

_READ_BY_TORCH = (
    "GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"
)  # fmt: skip
"""Variables that torch and its libraries read when torch is imported, which scripts therefore set before."""
_READ_BY_CUDA = "CUDA_VISIBLE_DEVICES"


@cache
def _can_render() -> bool:
    """Return whether the packages that plotly needs for a display in a notebook are installed."""
    return all(find_spec(name) is not None for name in ("IPython", "nbformat"))


class CellEnvironment:
    """Prepares a long-lived process for its next cell."""

    def __init__(self, order: m.WorkerOrder, groups: Groups) -> None:
        self._order, self._groups = order, groups
        self._handlers = SignalHandlers()
        self.modules = local_modules.of_forkserver or local_modules.LocalModules()
        self._libraries = settings.Applied()
        self._variables: dict[str, str] = {}
        self._of_setups: dict[str, tuple[str | None, str]] = {}
        """The variables that set-ups have set differently from the kernel: the kernel's value then, and the set-ups'
        value."""
        self._inputs: object = None
        """The inputs from which `_variables` was computed."""

    def prepare(self, setting: m.Setting) -> list[str]:
        """Apply the kernel's setting to this process. Return a sentence on each changed file whose modules are imported
        again, and on each setting of a library that this process cannot have."""
        self._apply(setting)
        problems = [*numa.bind(setting.numa_binding, self._order), *self._libraries.apply(setting.libraries)]
        forget_singletons()
        child_processes.begin_cell()
        event_loops.begin_cell()
        return [*problems, *(f"{path} has changed and is imported again" for path in self.modules.refresh())]

    def without_effect(self, cell: m.Cell) -> list[str]:
        """Return a sentence for each variable that the cell has set, and that torch or CUDA had read before. Libraries
        such as scikit-learn set some, too, which needs no note."""
        known = {**self._variables, **{name: value for name, (_, value) in self._of_setups.items()}}
        names = _READ_BY_TORCH if self._order.visible_devices is None else (*_READ_BY_TORCH, _READ_BY_CUDA)
        return [
            _without_effect(name, shlex.quote(value))
            for name, value in process_environment.variables().items()
            if name.startswith(names) and known.get(name) != value and _is_in_users_code(name, cell)
        ]

    def hidden_modules(self, cell: m.Cell) -> list[str]:
        """Return a sentence for each local module that the user's code imports, and that a loaded library hides."""
        names = self.modules.imported().union(*map(local_modules.imported_in, (cell.source, *cell.sources.values())))
        return [
            f"`{name}` is the {'standard' if name in sys.stdlib_module_names else 'installed'} module, which a rank "
            f"loads when it starts, and not {path}: give that another name"
            for name, path in local_modules.hidden(names, by_python=bool(cell.script)).items()
        ]

    def keep(self, setting: m.Setting) -> None:
        """Keep the variables and signal handlers that set-ups have set in this process, beyond the cell."""
        for name, value in process_environment.variables().items():
            if self._variables.get(name) != value:
                self._of_setups[name] = setting.env.get(name), value
        self._handlers.keep()

    def restore(self) -> None:
        """Undo the cell's changes of the process."""
        self._handlers.restore()
        close_libraries()

    def _apply(self, setting: m.Setting) -> None:
        """Apply the kernel's current directory, environment and path, and this rank's own variables."""
        of_group = self._groups.environment()
        key = setting.own_environment, setting.env, of_group, identity.cell.attempt, identity.cell.max_restarts
        if key != self._inputs:
            own = rank_environment.environment if setting.own_environment else {}
            given = identity.with_defaults({**own, **setting.env})
            self._variables, self._inputs = {**given, **identity.environment(), **of_group}, key
            # The kernel's own backend would find no kernel in a rank.
            if self._variables.get("MPLBACKEND", "module:").startswith("module:"):
                self._variables["MPLBACKEND"] = displaying.BACKEND
            if _can_render():  # plotly finds no renderer in a program, and then silently shows nothing
                self._variables.setdefault("PLOTLY_RENDERER", "plotly_mimetype")
        own = {
            name: value for name, (of_kernel, value) in self._of_setups.items() if setting.env.get(name) == of_kernel
        }
        rank_environment.apply(setting, {**self._variables, **own} if own else self._variables)
        stand_ins.follow_environment()
        threads.use(self._order.threads, self._variables)


def _without_effect(name: str, value: str) -> str:
    if name == _READ_BY_CUDA:
        return (
            f"{name} was set when CUDA, which reads it once, was in use already, so this rank keeps its GPU: choose "
            f"GPUs in the notebook, with %env {name}={value}"
        )
    return (
        f"{name} was set when torch, which reads it, was loaded already, so it has no effect here: set it with "
        f"--env {name}={value}"
    )


def _is_in_users_code(name: str, cell: m.Cell) -> bool:
    """Return whether the cell, or a module of the user that this process has imported, has this name in its text."""
    if any(name in text for text in (cell.source, *cell.sources.values())):
        return True
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return any(
        name in line for file in files if file and file_owner.is_users(file) for line in linecache.getlines(file)
    )


_handler = getattr(signal, "_signal", signal).getsignal
"""`signal.getsignal` without the conversion to an enum, which takes most of the time."""
_SHARED_STATES = known.shared_states()
_AFTER_CELL = known.after_cell()
_HOLDER_DEPTH = 3
"""Depth of the search for a shared state: the trainer holds an accelerator, which holds its state."""
_MOST_PARTS = 100
"""Number of items to search in a list or dict: a longer one is data."""


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class SignalHandlers:
    """The signal handlers at the start of every cell."""

    def __init__(self) -> None:
        named = signal.valid_signals() & set(signal.Signals)  # the many real-time signals would cost time at each cell
        self._first = [(int(number), _handler(number)) for number in named]

        self._running: set[int] = set()
        """Timers that set-ups have started."""

    def keep(self) -> None:
        """Take the present handlers, except that of SIGINT, for those at the start of every cell, and leave the present
        timers running."""
        self._running = {timer for timer in _TIMERS if signal.getitimer(timer)[0]}
        self._first = [
            (number, handler if number == signal.SIGINT else _handler(number)) for number, handler in self._first
        ]

    def restore(self) -> None:
        for timer in _TIMERS:  # its signal would kill the rank
            if timer not in self._running:
                signal.setitimer(timer, 0)
        for number, handler in self._first:
            if handler is not None and _handler(number) != handler:
                signal.signal(number, handler)


def forget_singletons() -> None:
    """Reset the shared states of libraries for the next cell."""
    for cls in _singletons():
        cls._shared_state = {}  # a new dict: kept values of an earlier cell continue to use the old one


def resume_singletons(read: Iterable[object], kept: Iterable[object]) -> None:
    """Restore the shared states that a kept value uses, if this cell reads that value."""
    if not (classes := _singletons()):
        return
    of_earlier = {id(value) for value in kept}
    for value in read:
        for instance in _held(value, tuple(classes), _HOLDER_DEPTH) if id(value) in of_earlier else ():
            type(instance)._shared_state = instance.__dict__  # noqa: SLF001 - they have no public way to change it


def close_libraries() -> None:
    """Have the libraries loaded by the cell close what it left open."""
    for name, close in _AFTER_CELL:
        if (module := sys.modules.get(name)) is not None:
            try:
                close(module)
            except Exception:  # noqa: BLE001 - foreign code; the cell has ended already
                traceback.print_exc()


def _singletons() -> list[Any]:
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _SHARED_STATES)
    return [cls for cls in classes if isinstance(getattr(cls, "_shared_state", None), dict)]


def _held(value: object, classes: tuple[type, ...], depth: int) -> Iterator[Any]:
    if isinstance(value, classes):
        yield value
    elif depth:
        for part in _parts(value):
            yield from _held(part, classes, depth - 1)


def _parts(value: object) -> Iterable[object]:
    match value:
        case list() | tuple():
            return value[:_MOST_PARTS]
        case dict():
            return islice(value.values(), _MOST_PARTS)
        case type() | types.ModuleType() | types.FunctionType():
            return ()
        case _:
            return list(getattr(value, "__dict__", {}).values())
