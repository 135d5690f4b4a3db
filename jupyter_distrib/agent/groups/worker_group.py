"""Runs the ranks of one worker group on this node: their processes, the run they execute, and what happens when one
stops or dies.

    open -> Ready from all -> WorkerGroupOpened -> Execute -> events ... -> Ended -> (repair) -> Execute -> ...

Runs in the agent's loop. `agent/groups/state.py` has the states of the worker group, and the moves between them.
`stop_ladder.py` stops a run. A rank that is gone is replaced from the
forkserver while the notebook already has its answer.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.groups.group_output import GroupOutput
from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.agent.groups.repair import GroupRepair
from jupyter_distrib.agent.groups.room import AskRoom, FindOtherGpu, Room
from jupyter_distrib.agent.groups.start import GroupStart, StartReports
from jupyter_distrib.agent.groups.state import MOVES
from jupyter_distrib.agent.groups.state import NodeGroupState as State
from jupyter_distrib.agent.groups.state import NodeGroupTrigger as Trigger
from jupyter_distrib.agent.groups.store import GroupStore
from jupyter_distrib.agent.ranks import exit_info
from jupyter_distrib.agent.ranks.forkservers import Forkservers
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.agent.ranks.starter import RankStarter
from jupyter_distrib.agent.runs.run import NodeRun
from jupyter_distrib.server.worker_group import Emit, PendingCell, StateMachine, WorkerGroupState
from jupyter_distrib.system import open_files, package_folders
from jupyter_distrib.system.control_groups import OutOfMemoryKills
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import encode

_OLD_DRIVER = "driver on your system is too old"
"""Words of torch where the driver does not support the CUDA that it is built for."""
COUNT_AFTER_S = 0.05
"""Seconds into a run before out-of-memory kills are counted: many runs are over by then."""
LEAVE_AFTER_S = 0.3
"""Seconds after which CPU ranks that are no longer needed leave, so that their successors get the processor first."""


class NodeWorkerGroup(WorkerGroupState[NodeRun]):
    """The workers that one `OpenWorkerGroup` asked for."""

    def __init__(
        self,
        command: m.OpenWorkerGroup,
        *,
        loop: Loop,
        forkservers: Forkservers,
        gpus: list[Gpu],
        node_has_gpus: Callable[[], tuple[bool | None, str]],
        notes: tuple[str, ...] = (),
        overlay: str = "",
        logs: Path,
        emit: Emit,
    ) -> None:
        super().__init__(command, emit)
        self.gpus = gpus
        self._node_has_gpus, self._notes = node_has_gpus, notes
        self.on_failed: Callable[[str], None] = lambda reason: None
        """Callback that closes the worker group."""
        self.ask_room: AskRoom = lambda ranks, unit, then: then(Room())
        """Function that gets room for more ranks, as far as nobody waits for it."""
        self.give_back: Callable[[Sequence[Gpu]], None] = lambda gpus: None
        """Function that gives GPUs back."""
        self.find_other_gpu: FindOtherGpu = lambda gpu, error, then: then(None, "")
        """Function that leases another GPU for a rank that could not start on its own."""
        self._news: list[str] = []
        """Sentences about its ranks for the next run."""
        self._room = Room()
        self._states = StateMachine(State.STARTING, MOVES)
        self.ranks = RankTable()
        wait = partial(self._states.move, Trigger.REPAIR)
        self.store = GroupStore(command, self.ranks, emit=emit, loop=loop, on_reset_awaited=wait)
        self.debuggers = RankDebuggers(self.ranks, emit)
        self._group_repair = GroupRepair(self.ranks, self.store, loop=loop, emit=emit, on_ready=self._continue_if_ready)
        starter = RankStarter(command, gpus=gpus, overlay=overlay, loop=loop, forkservers=forkservers, owner=self)
        self.starts = GroupStart(
            starter,
            self.ranks,
            self.store,
            loop=loop,
            state=lambda: self.state,
            leave_after_s=0.0 if gpus else LEAVE_AFTER_S,
            before_start=self._before_start,
            on_impossible=self._restart_without,
        )
        StartReports(
            command,
            self.ranks,
            loop=loop,
            forkservers=forkservers,
            emit=emit,
            over=lambda: self.state is not State.STARTING,
        )
        self._loop, self._output, self._oom_kills = loop, GroupOutput(loop, logs), OutOfMemoryKills()

    @property
    def state(self) -> State:
        return self._states.state

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def temporary_folders(self) -> set[str]:
        """Return the folders of temporary files that the present or last run has set for its ranks."""
        run = self.run or self._group_repair.last
        return {run.command.setting.env["TMPDIR"]} if run and run.command.setting.env.get("TMPDIR") else set()

    @property
    def has_early_ranks(self) -> bool:
        """Return whether its ranks may be replaced by preloaded ones.

        Ranks whose group spans other nodes are not exchanged, nor ranks with GPUs, where a second CUDA context takes
        memory beside the first, or cannot be made.
        """
        return not self.gpus and not self.store.spans_nodes and any(rank.early for rank in self.ranks)

    def infos(self) -> tuple[m.WorkerInfo, ...]:
        def device(rank: Rank) -> str:
            gpu = self.gpus[rank.order.local_rank] if self.gpus else None
            return f"{gpu.name} (GPU {gpu.number})" if gpu else ""

        return tuple(rank.info(device(rank)) for rank in sorted(self.ranks, key=lambda rank: rank.number))

    # ------------------------------------------------------------------------------------------------ starting

    def open(self) -> None:
        """Start every rank; `WorkerGroupOpened` or `WorkerGroupRefused` follows."""
        self.starts.start(range(self.command.size))

    def _before_start(self) -> None:
        self._group_repair.cancel()
        self._states.move(Trigger.REPAIR)

    def _restart_without(self, rank: Rank, reason: str) -> None:
        """Restart the worker group with one rank less if the waiting cell allows that; else give it up."""
        pending = self.pending
        size = pending.fewer(self.command.size - 1) if pending is not None else 0
        if pending is None or self.store.spans_nodes or not size:
            return self.fail(reason)
        self.pending = pending.with_fewer(size, f"rank {rank.number} cannot be replaced, {reason}")
        self.command = replace(self.command, size=size)
        if self.gpus:  # its GPU stays leased, but unused, until the worker group is closed
            self.gpus.append(self.gpus.pop(rank.order.local_rank))
        self.kept.clear()
        self.starts.start_resized(self.command, self.gpus[:size])

    def find_room(self, size: int, unit: int, then: Callable[[int], None]) -> None:
        if self.kept:
            return then(0)  # the room would be lost

        def found(more: Room) -> None:
            if self.closed:
                self.give_back(more.gpus)
                return then(0)
            self._room = more
            then(self.command.size + more.ranks)

        return self.ask_room(size - self.command.size, unit, found)

    def nodes(self) -> int:
        return 0

    def drop_room(self) -> None:
        room, self._room = self._room, Room()
        self.give_back(room.gpus)
        if room.ranks and self.run is None and not self.closed:
            self._replace_gone()

    def _use_room(self, size: int) -> None:
        """Replace the ranks by more."""
        room, self._room = self._room, Room()
        self.gpus = sorted((*self.gpus, *room.gpus), key=lambda gpu: (gpu.index, gpu.slice or 0))
        self.command = replace(self.command, size=size)
        self.starts.start_resized(self.command, self.gpus)

    def fail(self, reason: str) -> None:
        """Close the unusable worker group, and report why to the kernel and to the waiting cell. Takes effect once."""
        cls = m.WorkerGroupRefused if self.state is State.STARTING else m.WorkerGroupClosed
        if not self._states.move(Trigger.GIVE_UP):
            return
        if (pending := self.pop_pending()) is not None:
            pending.fail(reason)
        self.on_failed(reason)
        self.emit(cls(group=self.name, reason=reason), ())

    def fail_for(self, error: Exception) -> None:
        """Close the worker group because of an internal error."""
        traceback.print_exc()  # into the agent's log
        self.fail(f"the agent met an internal error in this worker group ({open_files.typed_reason(error)}).")

    def _on_ready(self, rank: Rank, event: m.Ready) -> None:
        rank.state, rank.early, rank.reports_reset = "idle", event.early, rank.has_device or event.reports_reset
        self.starts.record_ready(rank)
        self._continue_if_ready()

    def _on_reset(self, rank: Rank) -> None:
        self.store.resets.stop_waiting(rank)
        if rank.state == "starting":
            rank.state = "idle"
            self._continue_if_ready()

    def _continue_if_ready(self) -> None:
        """Report changes and start the waiting cell, once no rank is starting any more."""
        first = self.state is State.STARTING
        if self.ranks.starting or not self._states.move(Trigger.UP):
            return
        if first:
            exist, problem = self._node_has_gpus()
            opened = m.WorkerGroupOpened(
                group=self.name,
                workers=self.infos(),
                gpus=bool(self.gpus),
                node_has_gpus=exist,
                gpu_problem=problem,
                notes=self._notes,
                package_folders=package_folders.on_path(),
            )
            self.emit(opened, ())
        if lost := self.ranks.pop_lost():
            self.emit(m.WorkerGroupChanged(group=self.name, workers=self.infos(), lost=lost), ())
        self._begin_pending()

    # ------------------------------------------------------------------------------------------------ running

    def _begin_pending(self) -> None:
        """Execute the cell that waits, if the ranks are ready for it."""
        if self.state is State.READY and (pending := self.pop_pending()) is not None:
            self.execute(pending.command, pending.descriptors, pending.emit)

    def execute(self, command: m.Execute, descriptors: Descriptors, emit: Emit, frame: bytes = b"") -> None:
        """Hand the cell to its ranks, now or when all of them are up; `frame` is the encoded command."""
        if len(command.ranks) > self.command.size:
            self._use_room(len(command.ranks))
        if not self._states.move(Trigger.CELL):
            self.pending = PendingCell(command=command, descriptors=Descriptors(descriptors.take()), emit=emit)
            return
        self.store.begin_use()
        for rank in self.ranks:
            rank.streams.begin_run()  # messages so far belong to the run before
        frame = frame or encode(command, len(descriptors))
        self.debuggers.failed_run = ""
        ranks = self.ranks.current
        with descriptors:
            for number in ranks.keys() & command.ranks:
                ranks[number].state = "running"
                ranks[number].post_frame(frame, tuple(descriptors))
        # The rest is done while the ranks are busy with the cell.
        self.run = run = NodeRun(
            command,
            ranks=ranks,
            loop=self._loop,
            output=self._output.start_run(command.run, emit),
            emit=emit,
            spans_nodes=self.store.spans_nodes,
        )
        self._output.send_stray_notes(command.run, self.ranks, emit)
        for text in self._news:
            emit(m.Noted(run=command.run, rank=None, text=text), ())
        self._news.clear()
        run.later(COUNT_AFTER_S, self._oom_kills.count)
        run.begin_watching(self.gpus)

    def stop(self, *, force: bool = False) -> None:
        """Climb the ladder, or with `force` its last step at once. Does nothing when nothing runs."""
        if (pending := self.pop_pending()) is not None:
            pending.cancel()
        elif self.run is not None:
            self.run.stop(force=force)

    def ask_stacks(self) -> None:
        if self.run is not None:
            self.run.stacks.ask()

    def debug(self, command: m.Debug) -> None:
        self.debuggers.send(command)

    def cut_remote_sockets(self, command: m.CutRemoteSockets) -> None:
        """Cut sockets for the current run or the last one, see `NodeRun.cut_remote_sockets`."""
        run = self.run or self._group_repair.last
        if run is not None and run.command.run == command.run:
            run.cut_remote_sockets(command)

    def keep_groups(self, command: m.KeepNodeGroups) -> None:
        """Keep groups, see `GroupRepair.keep`."""
        self._group_repair.keep(command)

    # ------------------------------------------------------------------------------------------------ what ranks say

    def on_message(self, rank: Rank, message: m.Message, fds: Sequence[int]) -> None:
        try:
            if not Descriptors(fds).complete:
                raise open_files.error()
            self._handle_message(rank, message, fds)
        except Exception as error:  # noqa: BLE001 - the ranks of others live on
            self.fail_for(error)

    def _handle_message(self, rank: Rank, message: m.Message, fds: Sequence[int]) -> None:
        match message:
            case m.Ready():
                self._on_ready(rank, message)
            case m.DeviceSettled():
                self._on_reset(rank)
            case m.DeviceProgress():
                self._group_repair.on_report(message, self.run)
            case m.Wrote():
                self._output.write_late(rank.number, message)  # from a thread of an earlier run
            case m.StreamsReplaced():
                rank.streams.replace(message.run, fds)
            case m.Returned() | m.Failed() | m.Interrupted():
                self._on_end_of_cell(rank, message, tuple(fds))
            case m.DebuggerPrompted() | m.DebuggerLeft() if self.run is None:
                self.emit(message, ())  # from the debugging of a run that has failed
            case _:
                if self.run is not None:
                    self.run.on_message(message, tuple(fds))

    def on_output(self, rank: Rank, stream: str, data: bytes) -> None:
        """Take output of a rank."""
        run = self.run
        if run is not None and rank.number in run.command.ranks:
            run.output.write(rank.number, stream, data, show=rank.number in run.pending)
        else:
            rank.streams.note_idle_output()
            self._output.write_to_log(rank.number, stream, data)

    def on_hang_up(self, rank: Rank) -> None:
        self.on_rank_lost(rank, None, 0)

    def _on_end_of_cell(self, rank: Rank, event: m.Returned | m.Failed | m.Interrupted, fds: tuple[int, ...]) -> None:
        """Handle the end of the cell on a rank."""
        if rank.process.killed:
            return  # the news of its death is on the way and belongs to this run: the next run must not begin before it
        run = self.run
        rank.state = "idle"
        if not isinstance(event, m.Returned) and event.awaits_device:
            self.store.resets.start_waiting(rank)
        rank.streams.end_run()
        if run is None or rank.number not in run.pending:
            return
        run.on_end_of_cell(rank, event, fds)
        if isinstance(event, m.Returned | m.Interrupted) and event.kept:
            self.kept |= {f"{event.run}/{name}": time.time() for name in event.kept.types}
        self._finish_if_over(run)

    def _finish_if_over(self, run: NodeRun) -> None:
        if run.pending or self.run is not run:
            return
        self.run = None
        self._states.move(Trigger.OVER)
        if self.ranks.starting:  # some reset their process groups
            self._states.move(Trigger.REPAIR)
        self.debuggers.failed_run = "" if run.health.clean else run.command.run
        self.ran_s += time.monotonic() - run.started_s
        run.end()
        self.on_ended(run)
        if not run.health.clean:
            self._oom_kills.count()
        if not self.closed:
            self._repair(run)
            # When the notebook has its answer.
            self._loop.soon(lambda: self._output.replace_shared_streams(self.ranks, run.command.run))
            self._begin_pending()

    def _repair(self, run: NodeRun) -> None:
        """Prepare the worker group for the next run: replace dead ranks, and the store if groups may be broken."""
        self._group_repair.last = run
        if self._room.ranks:
            return  # all ranks are about to be replaced
        if not self._replace_gone():
            self._group_repair.start(run)

    def _replace_gone(self) -> bool:
        """Start a rank in place of each that is gone; return whether there is any."""
        gone = [rank.order.local_rank for rank in self.ranks if rank.state == "gone"]
        if gone:
            self.starts.start(gone)
        return bool(gone)

    # ------------------------------------------------------------------------------------------------ ending

    def on_rank_lost(self, rank: Rank, code: int | None, peak_rss_bytes: int) -> None:
        """Handle the unexpected end of a rank's process: report it to the run, stop the other ranks, replace the
        process."""
        try:
            self._lost(rank, code, peak_rss_bytes)
        except Exception as error:  # noqa: BLE001 - the ranks of others live on
            self.fail_for(error)

    def _lost(self, rank: Rank, code: int | None, peak_rss_bytes: int) -> None:
        rank.process.reaped = True
        self.store.resets.stop_waiting(rank)
        self.ranks.remove_replaced(rank)
        if not rank.process.ended:
            rank.read_rest()
        rank.end()
        if not self.ranks.is_current(rank) or self.closed:
            return
        was_starting = rank.state == "starting"
        reason = self._why_not_started(rank, code) if was_starting else ""
        if was_starting and self.state is State.STARTING:
            return self.fail(reason)
        rank.state = "gone"
        self.ranks.record_lost(rank.number)
        run = self.run
        if run is not None and rank.number in run.pending:
            run.on_rank_lost(rank, code, peak_rss_bytes, self._oom_kills)
            self.stop()
            self._finish_if_over(run)
        elif run is None:
            self.debuggers.report_end(rank.number)
            if was_starting:
                self._start_again(rank, reason)
            else:
                self.starts.start([rank.order.local_rank])
            # The next cell has to wait until the ranks of all nodes have met anew, and must know beforehand.
            if self.store.spans_nodes and not self.closed:
                lost = (rank.number,)
                self.emit(m.WorkerGroupChanged(group=self.name, workers=self.infos(), lost=lost), ())

    def _why_not_started(self, rank: Rank, code: int | None) -> str:
        error = exit_info.device_error(rank.streams.stderr_tail)
        if self.gpus and _OLD_DRIVER in error:  # which the driver did not tell beforehand
            return (
                f"rank {rank.number} could not be started, because the GPU driver is too old for this torch: update "
                "the driver, install a torch for an older CUDA, or use --ranks N."
            )
        if self.gpus and error:
            gpu = self.gpus[rank.order.local_rank]
            return (
                f"rank {rank.number} could not be started, because GPU {gpu.number} cannot be used ({error}): "
                "nvidia-smi shows its state; choose other GPUs with %env CUDA_VISIBLE_DEVICES=..., or CPU ranks with "
                "--ranks N."
            )
        lines = "\n".join(exit_info.last_lines(rank.streams.stderr_tail))
        return f"rank {rank.number} {exit_info.describe_end(code)} before it was ready.\n{lines}".rstrip()

    def _start_again(self, rank: Rank, reason: str) -> None:
        """Replace a rank that died while starting; on another GPU if its own cannot be used."""
        if not self.gpus:
            return self.starts.start_again(rank, reason)
        place, error = rank.order.local_rank, exit_info.device_error(rank.streams.stderr_tail)
        gpu = self.gpus[place]

        def found(other: Gpu | None, why: str) -> None:
            if self.closed or not self.ranks.is_current(rank):
                return self.give_back([other] if other else [])
            if other is None:
                advice = "ask for fewer GPUs, or free one of those in %distributed_status."
                explanation = f"{why}, and no other is free for rank {rank.number}: {advice}" if why else reason
                return self.starts.start_again(rank, explanation)
            self.gpus[place] = other
            self.starts.use_gpus(self.gpus)
            self.give_back([gpu])
            self._news.append(f"rank {rank.number} has GPU {other.number} from now on: {why}")
            return self.starts.start_again(rank, f"rank {rank.number} could not be started: {why}.")

        rank.state = "starting"  # a cell waits for the next process
        return self.find_other_gpu(gpu, error if self.starts.has_failed(rank) else "", found)

    def forget(self, command: m.Forget) -> None:
        for key in command.keys:
            self.kept.pop(key, None)
        for rank in self.ranks:
            rank.post(command)

    def close(self, *, force: bool, reason: str = "") -> None:
        """End every rank: at once, or after its exit handlers. The run on them ends now, for this reason."""
        self._states.move(Trigger.CLOSE)
        self.store.close()
        self.store.resets.close()
        self._group_repair.cancel()
        if (pending := self.pop_pending()) is not None:
            pending.cancel()
        if self.run is not None:
            self.run.give_up(reason or "its ranks were stopped")
            self._finish_if_over(self.run)
        if force:
            for rank in self.ranks.everyone():
                rank.end()
        else:
            self.starts.dismiss(self.ranks)
        self._output.close()


class RankDebuggers:
    """The debuggers of the ranks of a worker group.

    Args:
        emit: Sends an event to the kernel.
    """

    def __init__(self, ranks: RankTable, emit: Emit) -> None:
        self._ranks, self._emit = ranks, emit
        self.failed_run = ""
        """Id of the last run if it failed, so that its ranks keep its state for a debugger; else empty."""

    def send(self, command: m.Debug) -> None:
        """Pass a debugger command on to its rank."""
        if command.action == "drop":
            self.failed_run = ""
        rank = self._ranks.current.get(command.rank)
        if rank is not None and rank.state in ("idle", "running"):
            rank.post(command)
        else:
            self.report_end(command.rank, command.run)

    def report_end(self, rank: int, run: str = "") -> None:
        """Report the end of a rank to a user who is debugging the failure of a run: by default the last run, if it
        failed."""
        if not (run := run or self.failed_run):
            return
        gone = f"rank {rank} has ended, so its memory is gone."
        self._emit(m.DebuggerLeft(run=run, rank=rank, text=gone, at_s=time.monotonic()), ())
