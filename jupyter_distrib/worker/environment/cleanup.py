"""The work of an idle rank: it warms up its device before the first cell, frees memory after a cell, once the notebook
has its result, and imports what the next cells will need. Rank's main thread."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

from jupyter_distrib.cells import cell
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.framework import Framework
from jupyter_distrib.serialization import payload, tensors
from jupyter_distrib.wire import messages as m

COLLECT_AFTER_S = 0.02
"""Idle seconds before a rank collects garbage, in case the next cell is on its way."""
WARM_AFTER_S = 0.2
"""Idle seconds before a new rank warms up its device, in case its first cell is on its way."""
FREE_AFTER_S = 0.5
"""Idle seconds before a failed cell's large GPU values are freed; a debugger that opens automatically comes first."""
RELEASE_AFTER_S = 1.0
"""Idle seconds before a rank returns cached GPU memory."""
PRELOAD_AFTER_S = 0.5
"""Idle seconds before a rank that has run a cell imports a library."""


class Cleanup:
    """Drops a cell's data, except for kept names."""

    def __init__(self, framework: Framework, *, has_gpu: bool) -> None:
        self._framework, self._has_gpu = framework, has_gpu
        self._cold = has_gpu
        """Whether the device has not computed anything yet."""
        self._garbage = self._reserved = False
        """Whether a cell has left garbage, and cached GPU memory."""
        self._free: Callable[[], None] | None = None
        """Frees the GPU memory of a failed cell."""
        self.is_urgent = False
        """Whether the last cell's data contain reference cycles, so that they would stay in memory during the next
        cell."""
        self._imports: Iterator[None] | None = framework.preload()
        """Imports what cells will need, unless the rank was forked with all of it; None at the end."""
        self._has_run = False
        """Whether a cell has run, and may have left state in this process, so that the agent does not replace it."""
        self._kept_by = ""
        """The last run that kept values."""

    def after(self, command: m.Execute, namespace: dict[str, object]) -> None:
        """Drop the values that the cell has not kept."""
        keep = command.setting.keep
        self._cold, self._has_run = False, True
        identity.cell.strategy = None  # it holds the cell's names
        tensors.whole.clear()
        tensors.shapes_only = False
        self._framework.finish(value for name, value in namespace.items() if name not in keep)
        if keep:
            cell.keep_only(namespace, keep)
            self._kept_by = command.run
        else:
            cell.become_main(cell.fresh_module())
            namespace.pop("get_ipython", None)  # it holds the namespace
            self.is_urgent = cell.defines_code(namespace)
        # Memory of a GPU that runs out does not make Python collect.
        self.is_urgent = self.is_urgent or self._has_gpu
        self._free, self._garbage, self._reserved = None, True, self._has_gpu

    def after_failure(self, free: Callable[[], None]) -> None:
        """Keep a failed cell's values for a debugger, but free large GPU values once the rank is idle."""
        self._cold, self._has_run = False, True
        if self._has_gpu:
            self._free, self._garbage, self._reserved = free, True, True

    def forget(self, keys: tuple[str, ...]) -> None:
        """Drop kept values."""
        for key in keys:
            payload.kept_values.pop(key, None)
        if not any(key.startswith(f"{self._kept_by}/") for key in payload.kept_values):
            cell.become_main(cell.fresh_module())  # the present module has them as globals
        gc.collect()

    def when_idle(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield the pending tasks, each with the idle seconds required before it."""
        if self._cold:
            yield WARM_AFTER_S, self._warm
        if self._free is not None:
            yield FREE_AFTER_S, self._free_values
        if self._garbage:
            yield COLLECT_AFTER_S, self.collect
        if self._reserved:
            yield RELEASE_AFTER_S, self._release
        while self._has_run and self._imports is not None:
            yield PRELOAD_AFTER_S, self._import_next

    def collect(self) -> None:
        self._garbage = self.is_urgent = False
        gc.collect()

    def _free_values(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            free()

    def _warm(self) -> None:
        self._cold = False
        self._framework.warm_device()

    def _release(self) -> None:
        self._reserved = False
        self._framework.release_memory()

    def _import_next(self) -> None:
        assert self._imports is not None
        try:
            next(self._imports)
        except Exception:  # noqa: BLE001 - StopIteration, or an error that the cell which needs the library will report
            self._imports = None
