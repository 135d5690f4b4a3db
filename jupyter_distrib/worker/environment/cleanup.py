"""The work of an idle rank: before its first cell it warms its device; after a cell, when the notebook has its answer,
it cleans up its memory. Rank's main thread."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.framework import Framework
from jupyter_distrib.serialization import payload, tensors
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import cell

COLLECT_AFTER_S = 0.02
"""The idle time after which a rank collects garbage: not while the next cell may be on its way."""
WARM_AFTER_S = 0.2
"""The idle time after which a rank that has had no cell warms its device: not while the first one is on its way."""
FREE_AFTER_S = 0.5
"""The idle time after which a failed cell's large values on the GPU are freed: a debugger that opens by itself is
first."""
RELEASE_AFTER_S = 1.0
"""The idle time after which a rank gives back memory of its GPU that it holds in reserve."""


class Cleanup:
    """The cleanup that drops a cell's data, except for kept names."""

    def __init__(self, framework: Framework, *, has_gpu: bool) -> None:
        self._framework, self._has_gpu = framework, has_gpu
        self._cold = has_gpu
        """Whether the device has computed nothing yet."""
        self._garbage = self._reserved = False
        """Whether a cell has left garbage, and memory of the GPU in reserve."""
        self._free: Callable[[], None] | None = None
        """The function that frees the GPU's memory of a failed cell."""
        self.is_urgent = False
        """Whether the last cell's data refer to themselves, so that they would take memory beside the next cell's."""
        self._kept_by = ""
        """The last run that kept values."""

    def after(self, command: m.Execute, namespace: dict[str, object]) -> None:
        """Drop the values that the cell has not kept."""
        keep = command.setting.keep
        self._cold = False
        identity.strategy = None  # it holds the cell's names
        tensors.whole.clear()
        self._framework.finish(value for name, value in namespace.items() if name not in keep)
        if keep:
            cell.keep_only(namespace, keep)
            self._kept_by = command.run
        else:
            sys.modules["__main__"] = cell.fresh_module()
            namespace.pop("get_ipython", None)  # it holds the namespace
            self.is_urgent = cell.defines_code(namespace)
        # Memory of a GPU that runs out does not make Python collect.
        self.is_urgent = self.is_urgent or self._has_gpu
        self._free, self._garbage, self._reserved = None, True, self._has_gpu

    def after_failure(self, free: Callable[[], None]) -> None:
        """Leave a failed cell's values to a debugger, but free what is large on a GPU when the rank idles."""
        self._cold = False
        if self._has_gpu:
            self._free, self._garbage, self._reserved = free, True, True

    def forget(self, keys: tuple[str, ...]) -> None:
        """Drop kept values."""
        for key in keys:
            payload.kept_values.pop(key, None)
        if not any(key.startswith(f"{self._kept_by}/") for key in payload.kept_values):
            sys.modules["__main__"] = cell.fresh_module()  # the present module has them as globals
        gc.collect()

    def when_idle(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield what is to be done next, each after the time that the rank must be idle for it."""
        if self._cold:
            yield WARM_AFTER_S, self._warm
        if self._free is not None:
            yield FREE_AFTER_S, self._free_values
        if self._garbage:
            yield COLLECT_AFTER_S, self.collect
        if self._reserved:
            yield RELEASE_AFTER_S, self._release

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
