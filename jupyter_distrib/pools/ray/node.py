"""One node of a Ray cluster, as the coordinator holds it: an actor, and through it one agent. Passes frames to and from
it.

Used in the coordinator's loop; what Ray reports arrives in threads of Ray's and comes back to the loop through `Calls`.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_distrib.coordinator.file_sync import FileSync
from jupyter_distrib.coordinator.relay import Answer, Entry, opened
from jupyter_distrib.coordinator.worker_group import SpreadWorkerGroup
from jupyter_distrib.pools.ray.object_store import ContentPart
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.server.pending_cell import PendingCell
from jupyter_distrib.wire.link import decode_frame, encode
from jupyter_distrib.wire.messages import CloseWorkerGroup, Command, Ended, Execute, Failed, Failure, Noted, Stop

if TYPE_CHECKING:
    from jupyter_distrib.pools.ray.placement import RayPlacement

AHEAD = 2
"""Questions for events that each node has at a time."""


@dataclass(slots=True)
class _Held:
    """A cell whose content is on its way, and what is to be sent behind it."""

    command: Execute
    behind: list[Callable[[], None]] = field(default_factory=list)


class RayNode:
    """One actor, and through it one agent.

    Args:
        about: What `Relay.describe` says.
        shared: The node has the notebook's folder; if not, its files are brought there.
    """

    def __init__(self, place: RayPlacement, number: int, actor: Any, about: Mapping[str, Any], *, shared: bool) -> None:
        self._place, self._number, self.actor = place, number, actor
        self.host, self.interface = str(about["host"]), str(about["interface"])
        self.name = f"node {self.host}"
        self._project = None if shared else FileSync()
        self._has_files = False
        self._answers: dict[int, list[Entry]] = {}
        """Told of by Ray before earlier ones, by their number."""
        self._heard = 0
        """Answers."""
        self._held: _Held | None = None

    def send(self, command: Command, fds: Sequence[int] = ()) -> None:
        if isinstance(command, Execute):
            self._tell_once(command.run, self._place.remark)
            if self._project is not None:
                self._bring(command, self._project)
        if isinstance(command, Stop) and self._held is not None and self._held.command.run == command.run:
            return self._cancel(self._held)
        if isinstance(command, CloseWorkerGroup) and self._held is not None:
            self._cancel(self._held)
        frame = encode(command, int(bool(fds)))  # what tells how much is there does not travel
        if fds:
            assert isinstance(command, Execute)
            self._held = held = _Held(command)
            self._place.put(command.run, fds, lambda part: self._take_over(held, frame, part))
        elif self._held is not None:
            self._held.behind.append(lambda: self._hand_over(command, frame))
        else:
            self._hand_over(command, frame)

    def _take_over(self, held: _Held, frame: bytes, part: ContentPart | Exception) -> Any:
        """A part of the content of a cell, see `transfer.Receive`."""
        if self._held is not held:
            return None  # it was stopped
        if isinstance(part, shared_memory.GivenUp):
            return self._cancel(held)
        if isinstance(part, Exception):
            self._order("discard")
            self._fail(
                held.command, f"the values for this cell could not be put into Ray's object store: {cause(part)}"
            )
        elif part.last:
            self._hand_over(held.command, frame, *part)
        else:
            return self._order("take", *part)
        self._release(held)
        return None

    def _cancel(self, held: _Held) -> None:
        """Stop a cell that is still on its way."""
        self._order("discard")
        group = self._place.group
        queued = PendingCell(command=held.command, fds=[], tell=lambda event, fds: group.heard(self._number, event))
        self._place.calls.put(queued.cancel)  # not in the midst of what stops it
        self._release(held)

    def _release(self, held: _Held) -> None:
        self._held = None
        for hand_over in held.behind:
            hand_over()

    def _hand_over(self, command: Command, frame: bytes, *part: Any) -> None:
        if isinstance(command, Execute):
            self._call("send", frame, *part, then=lambda future: self._handed_over(command, future))
        else:
            self._order("send", frame, *part)

    def _order(self, method: str, *arguments: Any) -> Any:
        """Have the actor do something. None if the cluster has gone: Ray Client raises at once."""
        try:
            return getattr(self.actor, method).remote(*arguments)
        except Exception:  # noqa: BLE001 - Ray raises all kinds; who listens to the actor is told too
            traceback.print_exc()  # into the coordinator's log
            return None

    def _call(self, method: str, *arguments: Any, then: Callable[[Future[Any]], None]) -> None:
        """The same, and hear in the loop what came of it."""
        try:
            answer: Future[Any] = getattr(self.actor, method).remote(*arguments).future()
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds, in either call
            answer = Future()
            answer.set_exception(error)
        answer.add_done_callback(lambda future: self._place.calls.put(lambda: then(future)))

    def _handed_over(self, command: Execute, future: Any) -> None:
        error = future.exception()
        if error is None:
            self._take(future.result())
            return

        from ray.exceptions import RayTaskError

        if isinstance(error, RayTaskError):  # else the node is out of reach, which its listener says
            self._fail(command, f"{self.name} could not take this cell: {cause(error)}")

    def _fail(self, command: Execute, reason: str) -> None:
        """The cell has not come to the ranks, which are there for the next."""
        now, failure = time.monotonic(), Failure(type_name="jupyter_distrib.errors.PoolError", message=reason)
        for rank in command.ranks:
            failed = Failed(run=command.run, rank=rank, failure=failure, at_s=now)
            self._place.group.heard(self._number, failed)
        self._place.group.heard(self._number, Ended(run=command.run, at_s=now))

    def _bring(self, command: Execute, project: FileSync) -> None:
        """The notebook's files that are new or changed, before the first cell also if there are none; says what is not
        there then."""
        found = self._place.found_for(command)
        files, gone = project.changes(found)
        first, self._has_files = not self._has_files, True
        if first or files or gone:
            self._call("bring", files, gone, then=lambda future: self._brought(command.run, project, files, future))
        self._tell_once(command.run, found.left_out)

    def _brought(self, run: str, project: FileSync, files: Sequence[tuple[str, int, bytes]], future: Any) -> None:
        try:
            failed = future.result()
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds
            failed = [(name, cause(error)) for name, _, _ in files]
        if not failed:
            return
        project.forget([name for name, _ in failed])
        name, reason = failed[0]
        more = f", nor could {len(failed) - 1} others" if len(failed) > 1 else ""
        self._note(run, f"{name.partition('/')[2]} could not be brought to {self.name} ({reason}){more}.")

    def _tell_once(self, run: str, text: str) -> None:
        """For all nodes, if there is anything to tell."""
        if text and text not in self._place.told:
            self._place.told.add(text)
            self._note(run, text)

    def _note(self, run: str, text: str) -> None:
        self._place.group.tell(Noted(run=run, rank=None, text=text), ())

    def listen(self) -> None:
        """Ask for what comes next, and for what comes after that, so that a question is always there already."""
        for _ in range(AHEAD):
            self._ask()

    def _ask(self) -> None:
        self._call("receive", then=self._received)

    def _received(self, future: Any) -> None:
        if self._place.over:
            return
        try:
            answer = future.result()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the node is out of reach
            return self._place.lost(self._number, cause(error))
        if self._take(answer):
            self._ask()

    def _take(self, answer: Answer | None) -> bool:
        """Hear what has come, in its order. Whether there was anything."""
        group, there = self._place.group, False
        if answer is not None:
            number, self._answers[number] = opened(answer)
            there = bool(self._answers[number])
        while not self._place.over and (entries := self._answers.pop(self._heard, None)) is not None:
            self._heard += 1
            if not entries:
                self._place.lost(self._number, "its agent has ended")
            for frame, content in entries:
                self._hear(group, frame, content)
        return there

    def _hear(self, group: SpreadWorkerGroup, frame: bytes, content: Any) -> None:
        event, _ = decode_frame(frame)
        if content is None:
            return group.heard(self._number, event)  # type: ignore[arg-type]
        fd = shared_memory.write([memoryview(content).cast("B")])
        try:
            group.heard(self._number, event, (fd,))  # type: ignore[arg-type]
        finally:
            os.close(fd)

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        self._call("logs", run, then=lambda future: _write_logs(future, directory, done))


def _write_logs(future: Any, directory: Path, done: Callable[[], None]) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in future.result():
            fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(memoryview(content))
    except Exception:  # noqa: BLE001 - Ray raises all kinds: the node is gone, which its own listener says
        traceback.print_exc()  # into the coordinator's log; the run ends all the same
    done()


def cause(error: BaseException) -> str:
    """Ray's own words, without its frames; or ours, from a node."""
    if ours := str(error).rpartition("PoolError: ")[2].strip() if "PoolError: " in str(error) else "":
        return ours.splitlines()[0]
    if isinstance(raised := getattr(error, "cause", None), BaseException):  # what a node has raised
        return f"{type(raised).__name__}: {raised}"[:500]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else lines[0] if lines else type(error).__name__)[:500]
