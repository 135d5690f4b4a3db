"""Collectives and messages among inline ranks, each shown as a step. Called in the threads of the ranks, one at a time;
`torch_functions.py` calls them for those of `torch.distributed`.

    all_reduce(x)   -->  the ranks of the group meet on the stage  -->  values move  -->  Step
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.interfaces import identity
from jupyter_distrib.pools.inline.stage import Stage
from jupyter_distrib.pools.inline.steps import MOST_STEPS, Arrow, Step, value_of, values_of


@dataclass(slots=True, kw_only=True)
class Call:
    """The call of a collective on one rank."""

    gives: list[Any]
    """Copies of the values that this rank sends: one for all, or one for each member of the group."""
    takes: list[Any]
    """Places for the results: tensors, or a list."""
    line: int


@dataclass(slots=True)
class Meeting:
    """A collective on which the members of a group meet."""

    name: str
    detail: str
    calls: dict[int, Call] = field(default_factory=dict)
    done: bool = False
    trouble: str = ""


@dataclass(slots=True, eq=False)
class Message:
    """A message from one rank to another, sent or awaited by one side."""

    source: int
    target: int
    tag: int
    thing: Any
    line: int
    done: bool = False


class Group:
    """A group of inline ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.counts = dict.fromkeys(ranks, 0)
        """The number of collectives that each member has called."""

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(identity.rank())


class Work:
    """Handle of a call that is in progress: of `async_op=True`, `isend` and `irecv`."""

    def __init__(self, wait: Callable[[], None], done: Callable[[], bool]) -> None:
        self._wait, self.is_completed = wait, done

    def wait(self, timeout: object = None) -> bool:
        self._wait()
        return True


class Collectives:
    """The collectives of one run."""

    def __init__(self, stage: Stage, filename: str) -> None:
        self._stage, self._filename = stage, filename
        self.steps: list[Step] = []
        self.left_out = 0
        """Number of further steps that were not kept."""
        self._world = Group(stage.ranks)
        self._groups: dict[tuple[int, ...], Group] = {self._world.ranks: self._world}
        self._meetings: dict[tuple[Group, int], Meeting] = {}
        self._sent: list[Message] = []
        self._wanted: list[Message] = []

    # ------------------------------------------------------------------------------------------------ meeting

    def meet(
        self, name: str, group: Group | None, *, gives: Sequence[Any] = (), takes: Sequence[Any] = (),
        detail: str = "", later: bool = False, move: Callable[[list[Call]], list[tuple[int, int, Any]]],
    ) -> Work | None:  # fmt: skip
        """Meet the other members of the group; the last one moves the values.

        `move` fills `takes` of all calls, in the order of the group, and returns the values that went from each
        place to another.
        """
        group, rank = group or self._world, identity.rank()
        if rank not in group.ranks:
            return None
        key = group, group.counts[rank]
        group.counts[rank] += 1
        meeting = self._meetings.setdefault(key, Meeting(name, detail))
        line = self._line()
        meeting.calls[rank] = Call(gives=[_copied(each) for each in gives], takes=list(takes), line=line)
        if (name, detail) != (meeting.name, meeting.detail):
            first = next(iter(meeting.calls))
            meeting.trouble = (
                f"ranks call different collectives: rank {first} {_titled(meeting.name, meeting.detail)} in line "
                f"{meeting.calls[first].line}, rank {rank} {_titled(name, detail)} in line {line}."
            )
        elif len(meeting.calls) == len(group.ranks):
            del self._meetings[key]
            self._move(meeting, group, move)

        def wait() -> None:
            others = [each for each in group.ranks if each not in meeting.calls]
            what = f"waits in {_titled(name, detail)} (line {line}) for {', '.join(map(str, others))}"
            self._stage.wait(rank, lambda: meeting.done or bool(meeting.trouble), what)
            if meeting.trouble:
                raise RuntimeError(meeting.trouble)

        if later:
            return Work(wait, lambda: meeting.done)
        wait()
        return None

    def _move(self, meeting: Meeting, group: Group, move: Callable[[list[Call]], list[tuple[int, int, Any]]]) -> None:
        calls = {rank: meeting.calls[rank] for rank in group.ranks}
        before = {rank: values_of(call.gives or call.takes) for rank, call in calls.items()}
        try:
            moved = move(list(calls.values()))
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = "; ".join(f"rank {rank} {_shapes(call)}" for rank, call in calls.items())
            meeting.trouble = f"{_titled(meeting.name, meeting.detail)} does not fit together ({shapes}): {error}"
            return
        meeting.done = True
        self._note(
            Step(
                name=meeting.name,
                detail=meeting.detail,
                lines={rank: call.line for rank, call in calls.items()},
                before=before,
                after={rank: values_of(call.takes or call.gives) for rank, call in calls.items()},
                arrows=[
                    Arrow(group.ranks[source], group.ranks[target], value_of(thing))
                    for source, target, thing in moved
                    if source != target
                ],
            )
        )

    def _note(self, step: Step) -> None:
        if len(self.steps) < MOST_STEPS:
            self.steps.append(step)
        else:
            self.left_out += 1

    def _line(self) -> int:
        """Return the line of the cell that called, or 0."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self._filename:
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno

    # ------------------------------------------------------------------------------------------------ messages

    def send(self, tensor: Any, target: int, tag: int) -> Work:
        message = Message(identity.rank(), target, tag, _copied(tensor), self._line())
        self._sent.append(message)
        return self._match(message, f"waits in send to rank {target} (line {message.line})")

    def receive(self, tensor: Any, source: int, tag: int) -> Work:
        message = Message(source, identity.rank(), tag, tensor, self._line())
        self._wanted.append(message)
        who = f"rank {source}" if source >= 0 else "any rank"
        return self._match(message, f"waits in recv from {who} (line {message.line})")

    def _match(self, message: Message, what: str) -> Work:
        for wanted in list(self._wanted):
            fits = (each for each in self._sent if _fits(each, wanted))
            if (sent := next(fits, None)) is not None:
                self._sent.remove(sent)
                self._wanted.remove(wanted)
                self._deliver(sent, wanted)
        rank = identity.rank()
        return Work(lambda: self._stage.wait(rank, lambda: message.done, what), lambda: message.done)

    def _deliver(self, sent: Message, wanted: Message) -> None:
        before = {sent.source: values_of([sent.thing]), sent.target: values_of([wanted.thing])}
        fill(wanted.thing, sent.thing)
        sent.done = wanted.done = True
        wanted.source = sent.source
        self._note(
            Step(
                name="send and recv",
                detail=f"tag {sent.tag}" if sent.tag else "",
                lines={sent.source: sent.line, sent.target: wanted.line},
                before=before,
                after={sent.source: before[sent.source], sent.target: values_of([wanted.thing])},
                arrows=[Arrow(sent.source, sent.target, value_of(sent.thing))],
            )
        )

    # ------------------------------------------------------------------------------------------------ groups

    def group(self, ranks: Sequence[int] | None) -> Group:
        members = tuple(sorted(ranks)) if ranks is not None else self._world.ranks
        return self._groups.setdefault(members, Group(members))


def fill(place: Any, thing: Any) -> None:
    """Copy a tensor into another one. Raises `ValueError` if their shapes differ."""
    if tuple(place.shape) != tuple(thing.shape):
        raise ValueError(f"a tensor of shape {list(thing.shape)} does not fit into one of shape {list(place.shape)}")
    place.detach().copy_(thing)


def _fits(sent: Message, wanted: Message) -> bool:
    return sent.target == wanted.target and wanted.source in (sent.source, -1) and sent.tag == wanted.tag


def _titled(name: str, detail: str) -> str:
    return f"{name} ({detail})" if detail else name


def _shapes(call: Call) -> str:
    return ", ".join(str(list(each.shape)) if hasattr(each, "shape") else type(each).__name__ for each in call.gives)


def _copied(thing: Any) -> Any:
    return thing.detach().clone() if hasattr(thing, "detach") else copy.deepcopy(thing)
