"""The process state that every cell on a rank finds: folder, variables, path, threads, modules as they are on disk,
signal handlers. Rank's main thread.
"""

from __future__ import annotations

from jupyter_distrib.interfaces import identity, stand_ins
from jupyter_distrib.interfaces.framework import Groups
from jupyter_distrib.libraries import settings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import local_modules, process_reset, rank_environment, spawned_process, threads
from jupyter_distrib.worker.output import displaying


class CellEnvironment:
    """The preparation, for the next cell, of a process that lives on."""

    def __init__(self, order: m.WorkerOrder, groups: Groups) -> None:
        self._order, self._groups = order, groups
        self._handlers = process_reset.Handlers()
        self.modules = local_modules.of_forkserver or local_modules.LocalModules()
        self._libraries = settings.Applied()
        self._variables: dict[str, str] = {}
        self._inputs: object = None
        """The inputs of the cached `_variables`."""

    def prepare(self, setting: m.Setting) -> list[str]:
        """Apply the kernel's setting to this process. Return the changed files whose modules are imported again."""
        self._take(setting)
        self._libraries.apply(setting.libraries)
        process_reset.forget_singletons()
        spawned_process.forget()
        return self.modules.refresh()

    def restore(self) -> None:
        """Undo the cell's changes of the process."""
        self._handlers.restore()
        process_reset.close_libraries()

    def _take(self, setting: m.Setting) -> None:
        """Apply the kernel's present directory, environment and path, and this rank's own variables."""
        of_group = self._groups.environment()
        key = setting.own_environment, setting.env, of_group, identity.attempt, identity.max_restarts
        if key != self._inputs:
            own = rank_environment.environment if setting.own_environment else {}
            given = identity.with_defaults({**own, **setting.env})
            self._variables, self._inputs = {**given, **identity.environment(), **of_group}, key
            # The kernel's own backend would find no kernel in a rank.
            if self._variables.get("MPLBACKEND", "module:").startswith("module:"):
                self._variables["MPLBACKEND"] = displaying.BACKEND
        rank_environment.take(setting, self._variables)
        stand_ins.follow_environment()
        threads.use(self._order.threads, self._variables)
