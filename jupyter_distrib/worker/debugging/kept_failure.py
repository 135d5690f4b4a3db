"""The failure of the last cell, which this rank keeps for a debugger: its exception, and with that the frames of its
traceback and all that they hold. Rank's main thread.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import dataclass

from jupyter_distrib.system import open_files
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.debugging import failed_values
from jupyter_distrib.worker.debugging.debugger_channel import DebuggerChannel
from jupyter_distrib.worker.environment.cleanup import Cleanup

_ROOM = 32
"""Files that a cell opens for its group and more; where there is no room, the failed cell's are closed before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    command: m.Execute
    module: types.ModuleType
    error: BaseException


class KeptFailure:
    """The keeper of the last failure, from the end of its cell until the next cell."""

    def __init__(self, cleanup: Cleanup, channel: DebuggerChannel, send: Callable[[m.Event], None]) -> None:
        self._cleanup, self._channel, self._send = cleanup, channel, send
        self._failure: _Failure | None = None
        self._freed = 0
        """The number of its variables that were freed."""

    def keep(self, command: m.Execute, module: types.ModuleType, error: BaseException) -> None:
        """Keep a failure in place of the cleanup after its cell; soon without what is large on a GPU."""
        self._failure = _Failure(command=command, module=module, error=error)
        self._freed = 0
        self._cleanup.after_failure(self._free)

    def _free(self) -> None:
        if self._failure is not None:
            self._freed += failed_values.free(self._failure.error, frozenset(self._failure.command.setting.keep))

    def drop(self) -> None:
        """Drop the failure, if there is one, and clean up after its cell."""
        failure, self._failure = self._failure, None
        if failure is not None:
            command, names = failure.command, failure.module.__dict__
            failure.error.__traceback__ = None
            del failure
            self._cleanup.after(command, names)
            if self._cleanup.is_urgent or not open_files.has_room(_ROOM):
                self._cleanup.collect()

    def examine(self, order: m.Debug) -> None:
        """Answer questions about the failure, until the user or the agent ends that."""
        failure = self._failure
        if failure is None or failure.command.run != order.run:
            text = f"rank {order.rank} keeps no failure of that run: only the last cell's is kept, until --done."
            return self._send(m.DebuggerLeft(run=order.run, rank=order.rank, text=text, at_s=time.monotonic()))
        from jupyter_distrib.worker.debugging.debugger import RankPdb

        self._channel.begin(order.run, failure.command.cell.filename, examining=True)
        try:
            return RankPdb(self._channel).examine(failure.error.__traceback__, freed=self._freed)
        finally:
            self._channel.finish()
