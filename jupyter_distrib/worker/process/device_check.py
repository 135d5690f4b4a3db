"""Checks a rank's device after a cell that did not end well, and the kept values that the cell was changing. Rank's
main thread. No effect on ranks without a device.

A GPU error breaks the context for the life of the process: every later call fails with the same error, at a line that
is not to blame. And a cell that is stopped leaves work behind that waits for other ranks: when that is aborted, the
work behind it in the queue computes with half of the data.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from jupyter_distrib.interfaces.framework import Framework
from jupyter_distrib.serialization import payload
from jupyter_distrib.system import process
from jupyter_distrib.wire import messages as m

LIMIT_S = 1.5
"""Seconds for a device to finish a cell's work without other ranks; less than the time until a kill."""


class DeviceCheck:
    """Checks the device of one rank.

    Args:
        send: Sends notes to the view, and reports to the agent.
    """

    def __init__(
        self, order: m.WorkerOrder, framework: Framework, send: Callable[[m.Noted | m.DeviceProgress], None]
    ) -> None:
        self._rank, self._framework, self._send = order.rank, framework, send
        self.has_device = order.visible_devices is not None
        self._torn: dict[str, str] = {}
        """Keys of kept values that were stopped in the middle of a step, with the labels of the stopped runs."""

    def check_before_end(self, command: m.Execute, error: BaseException | None) -> bool:
        """Return whether the cell broke the device, after sending a note if so; the rank must then exit."""
        if not self.has_device or error is None or not self._framework.is_of_device(error):
            return False
        state = self._framework.drain(LIMIT_S)
        if state.error:
            self._send(m.Noted(run=command.run, rank=self._rank, text=self._broken(command, error, state.error)))
        return bool(state.error)

    def after_end(self, command: m.Execute, namespace: dict[str, object], was_cut: Callable[[], bool]) -> None:
        """Wait for the device to finish the cell's work, and report its progress. A rank whose device never finishes
        exits.

        `was_cut` returns whether collectives of the cell were aborted: results computed after an aborted one are wrong.
        """
        others_s = self._framework.groups.wait_s()
        state = self._framework.drain(others_s or LIMIT_S)
        if state.error or not (state.drained or others_s):
            reason = state.error or f"it has not finished the work of the last cell within {LIMIT_S} s"
            give_up(f"rank {self._rank} is replaced, because its GPU cannot be used any more: {reason}.")
        finished = state.drained and not was_cut()
        if not finished:
            values = {id(value) for value in namespace.values()}
            read = [key for key, value in payload.kept_values.items() if id(value) in values]
            self._torn |= dict.fromkeys(read, command.label or command.cell.filename)
        groups = self._framework.groups
        progress = m.DeviceProgress(
            run=command.run, rank=self._rank, finished=finished and groups.can_stay(), sequence=groups.sequence()
        )
        self._send(progress)

    def note_torn(self, command: m.Execute, namespace: dict[str, object]) -> None:
        """Send a note for each value that the cell reads and that was in the middle of a step when a run was
        stopped."""
        self._torn = {key: run for key, run in self._torn.items() if key in payload.kept_values}
        torn = {id(payload.kept_values[key]): run for key, run in self._torn.items()}
        for name, value in namespace.items() if torn else ():
            if run := torn.get(id(value)):
                text = f"`{name}` was in the middle of a step when {run} ended: load a checkpoint for exact values"
                self._send(m.Noted(run=command.run, rank=None, text=text))

    def _broken(self, command: m.Execute, error: BaseException, reason: str) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == command.cell.filename), None)
        where = f", line {line}" if line else ""
        return (
            f"this broke the GPU context of rank {self._rank} ({command.cell.filename}{where}: {reason}), so the rank "
            "is replaced, and its kept values are lost; CUDA reports errors late: --env CUDA_LAUNCH_BLOCKING=1 shows "
            "the line that caused it"
        )


def give_up(reason: str) -> NoReturn:
    """End this process at once: exit handlers would only meet the same error again."""
    print(reason, file=sys.stderr)
    process.flush_streams()
    os._exit(1)
