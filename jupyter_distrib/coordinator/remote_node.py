"""The coordinator's view of one node: a channel to its relay, and through the relay one agent. Passes frames on.

Used in the coordinator's loop; what the engine reports arrives in other threads and comes back to the loop through
`CallSoon`.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jupyter_distrib.agent.ranks.log_file import LogFile
from jupyter_distrib.coordinator import file_sync
from jupyter_distrib.coordinator.engine import Channel, ContentPart, Receive, Reservation, Transfer
from jupyter_distrib.coordinator.file_sync import CopiedFile, FilePart, FileSync
from jupyter_distrib.coordinator.node_segments import HeldSegments
from jupyter_distrib.coordinator.relay_inbox import Answer, Entry, opened
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.formatting import size
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import decode_frame, encode

LOG_PART_BYTES = 1 << 20
SAID_BYTES = 20_000_000
"""Size of files above which the kernel gets a note that they are copied: a slow connection needs a while."""
AHEAD = 2
"""Number of requests for events that are pending at each node."""


@dataclass(slots=True)
class _Held:
    """A cell whose files or content are on their way, and the commands to be sent after it."""

    command: m.Execute
    files: list[FilePart]
    """The parts of the notebook's files that have not been sent yet."""
    waits_for_files: bool
    """Whether the cell is sent only when all of its files are there."""
    not_copied: list[tuple[str, str]] = field(default_factory=list)
    """Files that could not be copied, with the reasons."""
    send: Callable[[], None] | None = None
    """Sends the cell, if it waits only for its files."""
    missing: list[tuple[str, Descriptors]] = field(default_factory=list)
    """The segments that the node lacks, each with the descriptors of its content; empty for a content without an id."""
    behind: list[Callable[[], None]] = field(default_factory=list)


class Holder(Protocol):
    """The placement that has a node."""

    delivery: Delivery
    ended: bool

    def handle_event(self, node: int, event: m.Event, fds: tuple[int, ...] = ()) -> None: ...
    def send_note(self, event: m.Event) -> None: ...
    def on_node_lost(self, node: int, reason: str) -> None: ...


class RemoteNode:
    """One relay, and through it one agent.

    Args:
        number: Number of the node in its placement.
        about: The result of `Relay.describe`.
        name: The node's name for people.
        shared: Whether the node has the notebook's folder; if not, the files are brought to the node.
    """

    def __init__(
        self, holder: Holder, number: int, channel: Channel, about: Mapping[str, Any], *, name: str, shared: bool
    ) -> None:
        self._holder, self._number, self._channel = holder, number, channel
        self._delivery = holder.delivery
        self.host, self.interface = str(about["host"]), str(about["interface"])
        self.agent_folder = str(about["agent_folder"])
        self.short_name, self.name = name, f"node {name}"
        self._file_sync = None if shared else FileSync()
        self._has_files = False
        self._answers: dict[int, list[Entry]] = {}
        """Answers that arrived ahead of earlier ones, by number."""
        self._heard = 0
        """Number of answers handled so far."""
        self._held: _Held | None = None
        self._segments = HeldSegments(int(about.get("cache_bytes", 0)))

    def send(self, command: m.Command, fds: Sequence[int] = ()) -> None:
        if isinstance(command, m.Execute):
            return self._send_cell(command, fds)
        if isinstance(command, m.Stop) and self._held is not None and self._held.command.run == command.run:
            return self._cancel(self._held)
        if isinstance(command, m.CloseWorkerGroup) and self._held is not None:
            self._cancel(self._held)
        self._send_in_order(command)

    def _send_in_order(self, command: m.Command) -> None:
        frame = encode(command)
        if self._held is not None:
            self._held.behind.append(lambda: self._hand_over(command, frame))
        else:
            self._hand_over(command, frame)

    def _send_cell(self, command: m.Execute, fds: Sequence[int]) -> None:
        """Send a cell after the notebook's files, which travel separately from its content."""
        self._delivery.send_note_once(command.run, self._delivery.remark, self._holder.send_note)
        files = [] if self._file_sync is None else self._changed_files(command, self._file_sync)
        held = _Held(command, files, waits_for_files=len(files) > 1)
        if files:
            self._copy_next(held)
        if not fds and not held.waits_for_files:
            return self._send_in_order(command)
        self._held = held
        if fds and command.inputs.segments:
            return self._send_segments(held, fds)
        frame = encode(command, int(bool(fds)))  # the descriptor that shows how much has arrived does not travel
        if fds:
            self._delivery.put(f"{command.run}/{command.attempt}", fds, lambda part: self._send_part(held, frame, part))
        else:
            self._complete(held, lambda: self._hand_over(command, frame))

    def _send_segments(self, held: _Held, fds: Sequence[int]) -> None:
        """Send a cell whose inputs lie in segments: one after another the segments that the node lacks, then the
        cell."""
        names = held.command.inputs.segments
        sizes = [os.fstat(fd).st_size for fd in fds[: len(names)]]
        telling = fds[len(names) :]  # the descriptors of the first segment
        for number in reversed(range(len(names))):
            if names[number] not in self._segments:
                parts = (fds[number], *telling) if number == 0 else (fds[number],)
                held.missing.append((names[number], Descriptors.duplicates(parts)))
        self._send_next(held, encode(held.command, len(names)), sizes)

    def _send_next(self, held: _Held, frame: bytes, sizes: Sequence[int]) -> None:
        """Send the next missing segment or, when there is none, the cell."""
        command = held.command
        if not held.missing:
            return self._complete(held, lambda: self._execute(command, frame, sizes))
        name = "+".join(segment for segment, _ in held.missing)
        segment, descriptors = held.missing.pop(0)

        def send_segment_part(part: ContentPart | Exception) -> Any:
            if self._held is held and isinstance(part, ContentPart) and part.last:
                self._order("store", segment, *part.arguments)
                return self._send_next(held, frame, sizes)
            return self._send_part(held, frame, part)

        with descriptors:
            self._delivery.put(f"{command.run}/{command.attempt}/{name}", tuple(descriptors), send_segment_part)

    def _execute(self, command: m.Execute, frame: bytes, sizes: Sequence[int]) -> None:
        segments, dropped = command.inputs.segments, self._segments.use(command.inputs, sizes)
        self._call("execute", frame, segments, dropped, then=lambda future: self._handed_over(command, future))

    def _send_part(self, held: _Held, frame: bytes, part: ContentPart | Exception) -> Any:
        """Send a part of a cell's content; see `engine.Receive`."""
        if self._held is not held:
            return None  # the cell was stopped
        if isinstance(part, shared_memory.GivenUp):
            return self._cancel(held)
        if isinstance(part, Exception):
            self._order("discard")
            self._fail(held.command, str(part))
        elif part.last:
            return self._complete(held, lambda: self._hand_over(held.command, frame, *part.arguments))
        else:
            return self._order("add_part", *part.arguments)
        self._release(held)
        return None

    def _complete(self, held: _Held, send: Callable[[], None]) -> None:
        """Send a cell whose content has arrived, once its files have, too."""
        if held.waits_for_files:
            held.send = send
        else:
            send()
            self._release(held)

    def _cancel(self, held: _Held) -> None:
        """Stop a cell that is still on its way."""
        self._order("discard")
        events = endings.interrupted(held.command.run, held.command.ranks)
        self._delivery.calls.put(lambda: self._handle_events(events))  # not while the code that stops it is running
        self._release(held)

    def _release(self, held: _Held) -> None:
        self._held = None
        self._forget(held)
        for _, descriptors in held.missing:
            descriptors.close()
        for hand_over in held.behind:
            hand_over()

    def _hand_over(self, command: m.Command, frame: bytes, *part: Any) -> None:
        if isinstance(command, m.Execute):
            self._call("send", frame, *part, then=lambda future: self._handed_over(command, future))
        else:
            self._order("send", frame, *part)

    def _order(self, method: str, *arguments: Any) -> Any:
        return self._channel.order(method, *arguments)

    def _call(self, method: str, *arguments: Any, then: Callable[[Future[Any]], None]) -> None:
        """Call a method, and handle its result in the loop."""
        answer = self._channel.ask(method, *arguments)
        answer.add_done_callback(lambda future: self._delivery.calls.put(lambda: then(future)))

    def _handed_over(self, command: m.Execute, future: Future[Any]) -> None:
        error, engine = future.exception(), self._delivery.reservation
        if error is None:
            self._handle_answer(future.result())
            return
        self._segments.forget()
        if engine.was_raised_on_node(error):  # else the node is out of reach, which its listener says
            self._fail(command, f"{self.name} could not receive this cell: {engine.cause(error)}")

    def _fail(self, command: m.Execute, reason: str) -> None:
        """End a cell that did not reach the ranks, which stay for the next one."""
        failure = m.Failure(type_name="jupyter_distrib.errors.PoolError", message=reason)
        self._handle_events(endings.failed(command.run, command.ranks, failure))

    def _handle_events(self, events: Sequence[m.Event]) -> None:
        for event in events:
            self._holder.handle_event(self._number, event)

    def _changed_files(self, command: m.Execute, known: FileSync) -> list[FilePart]:
        """Return the notebook's new and changed files, in parts (one before the first cell even if there are none), and
        report what is left out and, before it begins, a copy that may take long."""
        folder = self._delivery.files_for(command)
        files, gone = known.changes(folder)
        first, self._has_files = not self._has_files, True
        if (size_bytes := sum(len(content) for *_, content in files)) > SAID_BYTES:
            text = f"{len(files)} of the notebook's files ({size(size_bytes)}) are copied to each node that lacks them."
            self._delivery.send_note_once(command.run, text, self._holder.send_note)
        self._delivery.send_note_once(command.run, folder.left_out, self._holder.send_note)
        return file_sync.parts(files, gone) if first or files or gone else []

    def _copy_next(self, held: _Held) -> None:
        """Copy the next part of the notebook's files. The following one is sent after its answer, so that Stop also
        works over a slow connection."""
        files, gone = held.files.pop(0)
        self._call("bring", files, gone, then=lambda future: self._copied(held, files, future))

    def _copied(self, held: _Held, files: Sequence[CopiedFile], future: Future[Any]) -> None:
        assert self._file_sync is not None
        engine = self._delivery.reservation
        try:
            failed = future.result()
        except Exception as error:  # noqa: BLE001 - engines raise all kinds
            failed = [(name, engine.cause(error)) for name, *_ in files]
            if not engine.was_raised_on_node(error):  # the node is out of reach, which its listener says
                held.files.insert(0, (files, ()))
                self._forget(held)
                failed = []
        self._file_sync.forget([name for name, _ in failed])
        held.not_copied += failed
        if held.files:
            return self._copy_next(held)
        if held.not_copied:
            self._report(held)
        held.waits_for_files = False
        if held.send is not None and self._held is held:
            self._complete(held, held.send)

    def _forget(self, held: _Held) -> None:
        """Leave the files that have not been sent to the next cell."""
        if self._file_sync is not None:
            self._file_sync.forget([name for files, _ in held.files for name, *_ in files])
        held.files.clear()

    def _report(self, held: _Held) -> None:
        name, reason = held.not_copied[0]
        others = len(held.not_copied) - 1
        more = f", nor could {others} other{'s' * (others > 1)}" if others else ""
        self._note(held.command.run, f"{name.partition('/')[2]} could not be copied to {self.name} ({reason}){more}.")

    def _note(self, run: str, text: str) -> None:
        self._holder.send_note(m.Noted(run=run, rank=None, text=text))

    def listen(self) -> None:
        """Request the next two answers, so that one request is always pending at the node."""
        for _ in range(AHEAD):
            self._ask()

    def _ask(self) -> None:
        self._call("receive", then=self._received)

    def _received(self, future: Any) -> None:
        if self._holder.ended:
            return
        try:
            answer = future.result()
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, the node is out of reach
            return self._holder.on_node_lost(self._number, self._delivery.reservation.cause(error))
        if self._handle_answer(answer):
            self._ask()

    def _handle_answer(self, answer: Answer | None) -> bool:
        """Handle the entries of an answer in order; return whether there were any."""
        has_entries = False
        if answer is not None:
            number, self._answers[number] = opened(answer)
            has_entries = bool(self._answers[number])
        while not self._holder.ended and (entries := self._answers.pop(self._heard, None)) is not None:
            self._heard += 1
            if not entries:
                self._holder.on_node_lost(self._number, "its agent has ended")
            for frame, content in entries:
                self._handle_frame(frame, content)
        return has_entries

    def _handle_frame(self, frame: bytes, content: Any) -> None:
        event, _ = decode_frame(frame)
        if content is None:
            return self._holder.handle_event(self._number, event)  # type: ignore[arg-type]
        fd = shared_memory.write([memoryview(content).cast("B")])
        try:
            self._holder.handle_event(self._number, event, (fd,))  # type: ignore[arg-type]
        finally:
            os.close(fd)

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        self._call("logs", run, then=lambda future: _write_logs(future, directory, done))


def _write_logs(future: Any, directory: Path, done: Callable[[], None]) -> None:
    try:
        for name, content in future.result():
            _write_log(directory / os.path.basename(name), memoryview(content))
    except Exception:  # noqa: BLE001 - engines raise all kinds: the node is gone, which its own listener says
        traceback.print_exc()  # into the coordinator's log; the run ends all the same
    done()


def _write_log(path: Path, content: memoryview) -> None:
    log = LogFile(path)
    for start in range(0, len(content), LOG_PART_BYTES):
        if problem := log.write(content[start : start + LOG_PART_BYTES].tobytes()):
            print(problem, flush=True)  # into the coordinator's log
    log.close()


class Delivery:
    """The deliveries to the nodes of one reservation.

    Args:
        calls: Calls functions of other threads in the loop.
    """

    def __init__(self, calls: CallSoon, reservation: Reservation) -> None:
        self.calls, self.reservation = calls, reservation
        self.given_back = threading.Event()
        """Set when the present worker group gives the nodes back."""
        self.remark = ""
        """Remark on the nodes that a kernel gets with its first cell."""
        self.shared_folder = ""
        """The notebook's folder, if all nodes share it."""
        self._sent_notes: set[str] = set()
        self._transfers: dict[str, Transfer] = {}
        """Transfers that began in this iteration of the loop, to which nodes can be added."""
        self._project_files = file_sync.ProjectFiles()
        self._files: tuple[str, file_sync.Found] | None = None
        """The run for which the notebook's files were last scanned, and the result."""

    def renew(self) -> None:
        """Serve the next worker group."""
        self.given_back = threading.Event()

    def put(self, run: str, fds: Sequence[int], receive: Receive) -> None:
        """Send a content (`shared_memory.Arriving`) to one more node of a run; it passes through the engine only
        once."""
        if run not in self._transfers:
            self._transfers[run] = self.reservation.transfer(run, fds, self.given_back, self.shared_folder)
            self.calls.put(self._transfers.clear)
        self._transfers[run].add(receive)

    def files_for(self, command: m.Execute) -> file_sync.Found:
        """Scan the notebook's files, once for all nodes of a run."""
        if self._files is None or self._files[0] != command.run:
            self._files = command.run, self._project_files.scan(command.setting.directory, command.setting.path)
        return self._files[1]

    def send_note_once(self, run: str, text: str, emit: Callable[[m.Event], None]) -> None:
        """Send a kernel a note, if it is not empty and was not sent for another node or run."""
        if text and text not in self._sent_notes:
            self._sent_notes.add(text)
            emit(m.Noted(run=run, rank=None, text=text))

    def reset_notes(self) -> None:
        """Reset the sent notes, because another kernel has the nodes now."""
        self._sent_notes.clear()
