"""Executes the cells of a rank one after another, each from its command to the event of its end. Rank's main thread.

The stages of a cell:

    IDLE -> BEGINNING -> RUNNING -> RETURNING -> ENDING -> PACKING -> ENDING -> IDLE

A cell that fails goes to `ENDING` from any of them, and is not packed. `DEBUGGING` interrupts any stage for a while. An
interrupt may end all stages but `IDLE` and `ENDING`.
"""

from __future__ import annotations

import os
import sys
import time
import types
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jupyter_distrib.cells import cell
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces import strategy as strategy_module
from jupyter_distrib.interfaces.framework import Framework
from jupyter_distrib.serialization import definitions, payload
from jupyter_distrib.system import process
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker import end_of_cell
from jupyter_distrib.worker.debugging import debugger_channel
from jupyter_distrib.worker.debugging.debugger_channel import DebuggerChannel
from jupyter_distrib.worker.debugging.kept_failure import KeptFailure
from jupyter_distrib.worker.debugging.probe import Prober
from jupyter_distrib.worker.environment import (
    cell_environment,
    child_processes,
    local_modules,
    rank_environment,
    script_end,
)
from jupyter_distrib.worker.environment.cell_environment import CellEnvironment
from jupyter_distrib.worker.environment.changed_values import ChangedValues
from jupyter_distrib.worker.environment.cleanup import Cleanup
from jupyter_distrib.worker.environment.setups import Setups
from jupyter_distrib.worker.interrupts import CellStage, Interrupts
from jupyter_distrib.worker.messenger import Messenger
from jupyter_distrib.worker.output import displaying, reporting
from jupyter_distrib.worker.output.late_output import LateThreads
from jupyter_distrib.worker.process.control_thread import ControlThread
from jupyter_distrib.worker.process.device_check import DeviceCheck, give_up
from jupyter_distrib.worker.process.outcome import outcome
from jupyter_distrib.worker.process.repair import Repair


class CellRunner:
    """Runs cells and catches every exception of user code.

    Args:
        order: The identity of this rank.
        repair: Repairs the process after the cell's own code, and holds its notes for the agent.
    """

    def __init__(
        self,
        order: m.WorkerOrder,
        repair: Repair,
        framework: Framework,
        *,
        messenger: Messenger,
        interrupts: Interrupts,
        control: ControlThread,
        prober: Prober,
        cleanup: Cleanup,
        debugger: DebuggerChannel,
    ) -> None:
        self._pid = os.getpid()
        self._order, self._framework, self._groups = order, framework, framework.groups
        self._messenger, self._interrupts, self._control = messenger, interrupts, control
        self._prober, self._cleanup, self._debugger = prober, cleanup, debugger
        self.failure = KeptFailure(cleanup, debugger, messenger.send)
        self._environment = CellEnvironment(order, framework.groups)
        self._device = DeviceCheck(order, framework, messenger.send)
        self._late = LateThreads(order.rank, messenger.send)
        self._setups = Setups(order.device, self._note)
        self._repair, self._loading = repair, repair.notes.loading
        self._changed: ChangedValues | None = None

    def execute(self, command: m.Execute, fds: list[int]) -> None:
        run, rank = command.run, self._order.rank
        device = self._order.device
        began_at_s = time.monotonic()
        self.failure.drop()
        self._messenger.begin(m.Started(run=run, rank=rank, pid=self._pid, device=device, at_s=began_at_s))
        module = cell.fresh_module()
        value, error = self._run(command, fds, module)
        if error is not None:
            local_modules.drop_orphans()
        if isinstance(error, SystemExit):
            self._groups.wait_for_arrivals(until=lambda: self._control.cut)
        broken = self._device.check_before_end(command, error)
        event, out_fds = self._outcome(command, module.__dict__, value, error, began_at_s)
        if not isinstance(event, m.Failed):
            self._note_changes(command, value)
        self._changed = None  # also after a failure, whose values are let go
        awaits_device = self._device.has_device and isinstance(event, m.Failed | m.Interrupted)
        if isinstance(event, m.Failed | m.Interrupted):
            event = replace(event, awaits_device=awaits_device)
        if isinstance(event, m.Failed):
            event = replace(event, broke_device=broken)
        failed = error if isinstance(event, m.Failed) else None
        del value, error
        self._late.end(run)
        if command.cell.script:
            script_end.flush_files()
        process.flush_streams()
        if process.has_children():
            self.replace_streams(run)
        self._environment.modules.remember()
        for text in (
            *self._environment.without_effect(command.cell),
            *self._environment.hidden_modules(command.cell),
        ):
            self._messenger.send(m.Noted(run=run, rank=rank, text=text))
        self._control.ended(run)
        self._messenger.send(event, out_fds)
        for fd in out_fds:
            os.close(fd)
        if broken:
            give_up(f"rank {rank} is replaced, because its GPU cannot be used any more.")
        if awaits_device:
            self._device.after_end(command, module.__dict__, lambda: self._control.cut)
        if failed is None:
            self._cleanup.after(command, module.__dict__)
        else:
            self.failure.keep(command, module, failed)
        self._environment.restore()
        self._groups.tidy()
        self._interrupts.stage = CellStage.IDLE

    def replace_streams(self, run: str) -> None:
        """Open new output streams, so that processes that outlive their cell do not write into the output of the next
        one."""
        try:
            ends = process.renew_streams()
        except OSError:  # too many open files: the old streams are better than a lost rank
            ends = []
        self._messenger.send(m.StreamsReplaced(run=run), ends)
        for fd in ends:
            os.close(fd)

    def _run(self, command: m.Execute, fds: list[int], module: types.ModuleType) -> tuple[Any, BaseException | None]:
        """Run the cell and return its value, or the exception that it raised."""
        try:
            with ExitStack() as parts:
                try:
                    self._interrupts.stage = CellStage.BEGINNING
                    self._interrupts.end_if_stopping()
                    strategy = self._begin(parts, command, fds, module)
                    self._interrupts.stage = CellStage.RUNNING
                    identity.cell.begun, value = True, None
                    if command.cell.script:
                        self._script(command.cell, module, strategy)
                    else:
                        value = cell.execute(command.cell, module.__dict__, strategy.adapted, self._repair.python)
                    child_processes.leave_if_forked(self._pid)
                    self._repair.after_cell(partial(self.replace_streams, command.run))
                    self._interrupts.stage = CellStage.RETURNING
                    strategy.returning(value)
                    end_of_cell.run_registered(ok=True)
                    return value, None
                finally:
                    last = self._interrupts.stage
                    self._interrupts.stage = CellStage.ENDING  # before any call, in which an interrupt would be raised
                    by_cell = last in (CellStage.RUNNING, CellStage.DEBUGGING)  # what comes before is not undone
                    if by_cell:
                        self._repair.python()
                    child_processes.leave_if_forked(self._pid, sys.exception())
                    if by_cell:
                        self._repair.after_cell(partial(self.replace_streams, command.run))
        except BaseException as error:  # noqa: BLE001 - foreign code, and SystemExit and KeyboardInterrupt with it
            self._interrupts.stage = CellStage.ENDING  # again, for an interrupt that came before the move
            return None, error

    def _script(self, script: m.Cell, module: types.ModuleType, strategy: strategy_module.Strategy) -> None:
        """Run a script to the end that it has as a program. `sys.exit(0)` is such an end."""
        with script_end.ScriptEnd() as ending:
            try:
                cell.execute(script, module.__dict__, strategy.adapted)
            except SystemExit as left:
                if left.code:
                    raise
                child_processes.leave_if_forked(self._pid, left)
                ending.wait()
                raise
            child_processes.leave_if_forked(self._pid)
            ending.wait()

    def _begin(
        self, parts: ExitStack, command: m.Execute, fds: list[int], module: types.ModuleType
    ) -> strategy_module.Strategy:
        """Begin the parts of a cell. They end in the reverse order.

        None is a function with `contextmanager`: it would set the `__traceback__` of what the cell raises, which a
        frozen dataclass forbids.
        """
        expected = not command.unanswered and debugger_channel.is_expected(command.cell)
        parts.callback(self._close_outputs)
        self._prepare(command, fds, module)
        if expected:
            parts.callback(self._groups.wait_endlessly, on=False)
            self._groups.wait_endlessly(on=True)  # one of the other ranks may stop in the debugger
        strategy = self._begin_strategy(parts, command, module.__dict__)
        self._groups.arrived()
        self._prober.begin(command.run, command.cell.filename)  # the cell's own collectives count from here
        parts.callback(end_of_cell.run_registered, ok=False)
        if command.profile:
            self._begin_profiler(parts, command)
        self._debugger.begin(command.run, command.cell.filename, unanswered=command.unanswered, expected=expected)
        parts.callback(self._debugger.finish)
        self._control.reserve()
        self._repair.begin_cell()
        return strategy

    def _close_outputs(self) -> None:
        if (reporter := identity.cell.reporter) is not None:
            identity.cell.reporter = None
            reporter.close()
        displaying.close()

    def _begin_strategy(
        self, parts: ExitStack, command: m.Execute, names: dict[str, object]
    ) -> strategy_module.Strategy:
        strategy = identity.cell.strategy = self._load_strategy(command.setting.strategy)
        run = self._strategy_run(command, names)

        def end(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
            strategy.end(ok=kind is None)
            run.release()

        parts.push(end)
        strategy.begin(run)
        return strategy

    def _begin_profiler(self, parts: ExitStack, command: m.Execute) -> None:
        profiler = self._framework.profiler(command, self._messenger.send)
        if profiler is None:
            text = f"--profile records what torch does, and these ranks compute with {self._framework.name}"
            self._messenger.send(m.Noted(run=command.run, rank=self._order.rank, text=text))
            return

        def end(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
            profiler.end(stopped=self._interrupts.ended_cell(error))

        profiler.begin()
        parts.push(end)

    def _outcome(
        self,
        command: m.Execute,
        namespace: dict[str, object],
        value: Any,
        error: BaseException | None,
        began_at_s: float,
    ) -> tuple[m.RunEvent, list[int]]:
        """Return the cell's end event. Pickling the value runs the user's code too, and may be stopped."""

        def end_event(value: Any, error: BaseException | None) -> tuple[m.RunEvent, list[int]]:
            rank, sequence, stopped = self._order.rank, self._groups.sequence(), self._interrupts.caused
            times = self._framework.phase_times()
            return outcome(
                command,
                rank,
                namespace,
                value,
                error,
                began_at_s=began_at_s,
                stopped=stopped,
                sequence=sequence,
                times=times,
                peak_bytes=self._framework.peak_bytes() if command.measures_peak else None,
            )

        try:
            try:
                self._interrupts.stage = CellStage.ENDING if error is not None else CellStage.PACKING
                return end_event(value, error)
            finally:
                self._interrupts.stage = CellStage.ENDING  # as in `_run`
        except BaseException as broken:  # noqa: BLE001 - as in `_run`
            self._interrupts.stage = CellStage.ENDING
            return end_event(None, broken)

    def _prepare(self, command: m.Execute, fds: list[int], module: types.ModuleType) -> None:
        run, rank, send = command.run, self._order.rank, self._messenger.send
        identity.cell = identity.CellState(attempt=command.attempt, max_restarts=command.max_restarts)
        self._framework.prepare()
        if command.cell.script:
            self._environment.modules.unload()  # as in a new process
        for text in self._environment.prepare(command.setting):
            send(m.Noted(run=run, rank=rank, text=text))
        self._late.begin()
        identity.cell.reporter = reporting.Reporter(run, rank, send, grows=command.most_ranks > 0)
        identity.cell.displayer = displaying.Displayer(run, rank, send)
        if command.setups and (missing := self._setups.missing(command)):
            self._set_up(command, missing)
        cell.become_main(module)
        if command.measures_peak:
            self._framework.measure_peak()
        namespace = module.__dict__
        namespace |= rank_environment.names(command, namespace)
        if not payload.kept_values:  # else their classes are found, too
            definitions.forget_names()
        cell.add_sources(command.cell)
        data, buffers = payload.from_parcel(command.inputs, fds[0] if fds else None, fds[1:])
        payload.unpack_inputs(data, buffers, namespace, device=self._order.device, loading=self._loading)
        self._loading("")
        self._device.note_torn(command, namespace)
        if self._order.rank == 0 and not command.cell.script:
            self._changed = ChangedValues(namespace, payload.kept_values.values())
        cell_environment.resume_singletons(namespace.values(), payload.kept_values.values())
        self._groups.begin(f"{run}/{command.attempt}" if command.attempt else run)
        self._prober.begin(run, command.cell.filename)

    def _set_up(self, command: m.Execute, setups: list[m.Setup]) -> None:
        """Run the set-ups that this rank has not run yet, and keep what they have changed in its environment."""
        for each in setups:
            self._prober.begin(command.run, each.cell.filename)
            self._setups.run(each, command.run)
        self._environment.keep(command.setting)

    def _note_changes(self, command: m.Execute, value: object) -> None:
        text = ""
        with suppress(Exception):  # classes of the user may behave in any way, and the cell has ended well
            text = self._changed.note(command.cell.source, command.setting.keep, value) if self._changed else ""
        if text:
            self._messenger.send(m.Noted(run=command.run, rank=None, text=text))

    def _note(self, run: str, text: str) -> None:
        self._messenger.send(m.Noted(run=run, rank=self._order.rank, text=text))

    def _load_strategy(self, name: str) -> strategy_module.Strategy:
        found = strategy_module.load(name)
        if found.framework not in ("", self._framework.name):
            raise DistributedError(
                f"--strategy {name} computes with {found.framework}, and these ranks with {self._framework.name}: "
                "leave out --on, so that it gets ranks of its own."
            )
        return found()

    def _strategy_run(self, command: m.Execute, names: dict[str, object]) -> strategy_module.StrategyRun:
        return strategy_module.StrategyRun(
            options=command.setting.strategy_options,
            filename=command.cell.filename,
            everyone=identity.everyone(command),
            names=names,
            exchange=self._groups.exchange,
            note=lambda text: self._messenger.send(m.Noted(run=command.run, rank=None, text=text)),
            keep=command.setting.keep,
            stopped=self._was_stopped,
        )

    def _was_stopped(self) -> bool:
        error = sys.exception()
        return error is not None and self._interrupts.caused(error)
