"""Explains why a run makes no progress: which ranks wait for which, by the last sighting of each rank. Runs in the
agent, or for ranks of several nodes in the coordinator; pure.

    looks, one per rank --> diagnose()  -->  Diagnosis: a few sentences, and a place for each rank

A rank that waits for others is never to blame; ranks that have not arrived are. Waiting is not an error either: the
text describes the state, and leaves its duration to the caller.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

STALL_S = 5.0
"""Seconds of waiting in one place after which a stall is reported."""
ALL_THERE_S = 30.0
"""The same if every rank has arrived and only the data is on its way."""
LOCKED_S = 10.0
"""Seconds after which a silent and idle rank is reported though nobody waits for it."""
_LOADER = "(dataloader.py)"
"""The end of the name of a function of torch's data loader."""
_IDLE_S = 3.0
_SAME_TENSORS = ("all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter")
"""Collectives to which every rank must give tensors of one shape and type."""
_PAIRWISE = ("recv", "send", "recv_object_list", "send_object_list", "wait")
"""Operations between some of the ranks, where it is unknown which other rank takes part."""
_RENDEZVOUS = ("init_process_group", "new_group", "init_device_mesh", "barrier", "monitored_barrier")
"""Operations without a number in which every rank takes part."""
_RANK_WORDS = ("rank", "main_process", "is_master", "is_zero", "is_primary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    text: str
    places: tuple[m.RankPlace, ...]
    waited_s: float
    """Duration in seconds of the longest wait; 0 if no rank waits."""
    hopeless_s: float = 0.0
    """Duration in seconds of the longest wait that cannot end, because a rank it needs has left the cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """The operation in which one rank waits."""

    op: str
    group: str = ""
    number: int = 0
    """Number of the collective; 0: not counted, because torch does not record it (a rendezvous, `recv`, a store)."""
    ranks: tuple[int, ...] = ()
    tensors: str = ""

    @property
    def meeting(self) -> tuple[str, tuple[int, ...], int, str]:
        """Return a key that is equal for all ranks that will meet in this operation."""
        return self.group, self.ranks, self.number, "" if self.number else self.op

    def __str__(self) -> str:
        return f"{self.op} #{self.number}" if self.number else self.op


def diagnose(looks: Sequence[m.RankSighting], *, source: str = "") -> Diagnosis | None:
    """Return the diagnosis; None if nothing is wrong, or has not lasted long enough yet.

    Args:
        looks: A sighting for each rank of the run.
        source: The cell's source, with the ranks' line numbers.
    """
    scene = _Scene(looks=looks, source=source)
    sentences = [_stopped(look) for look in looks if _is_held(look)]
    sentences += [sentence for ranks in scene.consensus() for sentence in scene.describe(ranks)]
    if not scene.waits:  # else it is mentioned with the ranks that wait for it
        sentences += [_locked(look) for look in looks if look.silent_s >= LOCKED_S]
        sentences += [_loading(look) for look in looks if _waits_for_loader(look)]
    if not sentences:
        return None
    if scene.is_circle():
        sentences.append("They wait for one another: collectives match by order, not by name.")
    return Diagnosis(
        text=" ".join(dict.fromkeys(sentences)),
        places=tuple(scene.place(look) for look in looks),
        waited_s=max(
            [*(_unmoved_s(scene.by_rank[rank]) for rank in scene.waits), *(look.silent_s for look in looks)],
            default=0.0,
        ),
        hopeless_s=max([0.0, *(_unmoved_s(scene.by_rank[rank]) for rank in scene.waits if scene.is_hopeless(rank))]),
    )


def is_suspicious(looks: Iterable[m.RankSighting]) -> bool:
    """Return whether any rank seems to wait for others, so that a deep probe of all of them is worth its cost."""
    return any(_wait(look) is not None and _unmoved_s(look) >= STALL_S - 1.5 for look in looks)


# ---------------------------------------------------------------------------------------------------- who waits


def _wait(look: m.RankSighting) -> _Wait | None:
    seen = look.seen
    if look.state != "running" or seen is None or seen.in_debugger or seen.unmoved_s < _IDLE_S:
        return None
    idle = seen.idle_s >= _IDLE_S
    for group in seen.groups or ():
        if group.number and (idle or group.spins):
            return _in_group(group, seen.call)
    return _Wait(op=seen.call) if seen.call and idle else None


def _in_group(group: m.GroupSighting, call: str) -> _Wait:
    return _Wait(op=call or group.op, group=group.name, number=group.number, ranks=group.ranks, tensors=group.tensors)


def _unmoved_s(look: m.RankSighting) -> float:
    return look.seen.unmoved_s if look.seen else 0.0


def _at(look: m.RankSighting) -> int | None:
    """Return the line of the cell that the rank is in."""
    match look.state:
        case "left":
            return None
        case "silent" if look.line is not None:
            return look.line
        case _:
            return look.seen.line if look.seen else None


def _place(look: m.RankSighting) -> str:
    """Return the rank's line in words: `line 12` of the cell, or a line of the program that the cell runs; empty if
    unknown."""
    if look.state == "running" and look.seen is not None and look.seen.program:
        return look.seen.program
    line = _at(look)
    return f"line {line}" if line else ""


# ---------------------------------------------------------------------------------------------------- sentences


class _Scene:
    """All ranks at one moment, and the sentences about them."""

    def __init__(self, *, looks: Sequence[m.RankSighting], source: str) -> None:
        self.by_rank = {look.rank: look for look in looks}
        self.waits = {look.rank: wait for look in looks if (wait := _wait(look)) is not None}
        self._source = source

    def consensus(self) -> list[list[int]]:
        """Return groups of ranks that wait in the same place, the earliest place first."""
        by_place: dict[tuple[str, tuple[int, ...], int, str], list[int]] = {}
        for rank, wait in self.waits.items():
            by_place.setdefault(wait.meeting, []).append(rank)
        return sorted(by_place.values(), key=lambda ranks: self.waits[ranks[0]].number)

    def is_circle(self) -> bool:
        """Return whether ranks wait in different places and no rank is left that could arrive."""
        waiting = all(rank in self.waits or look.state == "left" for rank, look in self.by_rank.items())
        return waiting and len({wait.meeting for wait in self.waits.values()}) > 1

    def is_hopeless(self, rank: int) -> bool:
        """Return whether a rank waits in vain because other ranks have left the cell: one is enough in a collective or
        a rendezvous; in an operation between two ranks, or on the store, it takes all of the others."""
        wait = self.waits[rank]
        others = [self.by_rank[each] for each in wait.ranks or self.by_rank if each != rank and each in self.by_rank]
        left = [other.state == "left" for other in others]
        needs_all = (bool(wait.number) and wait.op not in _PAIRWISE) or wait.op in _RENDEZVOUS
        return any(left) if needs_all else bool(left) and all(left)

    def describe(self, ranks: Sequence[int]) -> list[str]:
        """Return a sentence on the ranks that have not arrived where these ranks wait; empty if this is not worth a
        report yet."""
        wait = self.waits[ranks[0]]
        waited_s = max(_unmoved_s(self.by_rank[rank]) for rank in ranks)
        if waited_s < STALL_S:
            return []
        members = [rank for rank in wait.ranks or self.by_rank if rank in self.by_rank]
        missing = [rank for rank in members if rank not in ranks and not _has_been(self.by_rank[rank], wait)]
        name, where = self._name(wait), self._where(ranks)
        if wait.op in _PAIRWISE and not wait.number:
            text = f"{rank_list(ranks, sentence=True)} {_verb('waits', ranks)} in {name}{where} for another rank."
        elif not missing:
            return self._all_there(ranks, waited_s)
        elif self._is_alone(ranks, missing):
            text = f"Only {rank_list(ranks)} called {name}{where}."
        else:
            text = (
                f"{rank_list(missing, sentence=True)} {_verb('has', missing)} not reached {name}; "
                f"{rank_list(ranks)} {_verb('waits', ranks)} there{where}."
            )
        return [text, *self._elsewhere(missing)]

    def place(self, look: m.RankSighting) -> m.RankPlace:
        return m.RankPlace(rank=look.rank, where=self._doing(look), line=_at(look), waiting=look.rank in self.waits)

    def _is_alone(self, ranks: Sequence[int], missing: Sequence[int]) -> bool:
        """Return whether these few ranks reached their line through an `if` on the rank."""
        few = len(ranks) < len(missing) and not any(rank in self.waits for rank in missing)
        return few and bool(_condition(_at(self.by_rank[ranks[0]]), self._source))

    def _all_there(self, ranks: Sequence[int], waited_s: float) -> list[str]:
        wait = self.waits[ranks[0]]
        if len(calls := self._calls(ranks)) > 1:
            different_calls = " and ".join(
                f"{rank_list(callers)} {_verb('calls', callers)} {call}{self._where(callers)}"
                for call, callers in calls.items()
            )
            return [f"As collective #{wait.number} {different_calls}: collectives match by order, not by name."]
        if waited_s < ALL_THERE_S or not wait.number:
            return []
        return [f"All of its ranks are in {self._name(wait)}{self._where(ranks)}, and it does not end."]

    def _calls(self, ranks: Sequence[int]) -> dict[str, list[int]]:
        """Group meeting ranks by the call that they make: one entry if all make the same call."""
        calls: dict[str, list[int]] = {}
        for rank in ranks:
            wait = self.waits[rank]
            same = wait.op in _SAME_TENSORS and wait.tensors
            calls.setdefault(f"{wait.op} of {wait.tensors}" if same else wait.op, []).append(rank)
        kinds = {call.partition(" ")[0]: callers for call, callers in calls.items()}
        return kinds if len(kinds) == len(calls) else calls  # shapes only where they differ

    def _elsewhere(self, missing: Sequence[int]) -> list[str]:
        """Describe what the missing ranks are doing: one sentence for all that do the same."""
        alike: dict[tuple[str, str], list[int]] = {}
        for rank in missing:
            look = self.by_rank[rank]
            if not _is_held(look):  # already mentioned
                alike.setdefault((self._doing(look), _place(look)), []).append(rank)
        return [
            f"{rank_list(ranks, sentence=True)} {_verb(doing, ranks)}"
            + (f" ({place})." if place and place not in doing else ".")
            for (doing, place), ranks in alike.items()
        ]

    def _doing(self, look: m.RankSighting) -> str:
        match look.state:
            case "left":
                return "has left the cell"
            case "silent":
                return "is in C code that does not release Python's lock"
            case "starved":
                return "waits for a processor: its machine is overloaded"
            case "stopped":
                return "is stopped (SIGSTOP)"
            case "traced":
                return "is held by a debugger"
            case "running" if _is_debugged(look):
                return "is stopped in the debugger"
            case _:
                if (wait := self.waits.get(look.rank)) is not None:
                    return f"waits in {self._name(wait)}"
                return f"runs {look.seen.function}" if look.seen and look.seen.function else "runs the cell"

    def _name(self, wait: _Wait) -> str:
        """Name an operation: `all_reduce #2`, with its ranks if they are fewer than all."""
        subgroup = wait.ranks and not self.by_rank.keys() <= set(wait.ranks)
        return f"{wait} of {rank_list(wait.ranks)}" if subgroup else str(wait)

    def _where(self, ranks: Sequence[int]) -> str:
        looks = [self.by_rank[rank] for rank in ranks]
        if programs := sorted({look.seen.program for look in looks if look.seen is not None and look.seen.program}):
            return f" ({'; '.join(programs)})"
        lines = sorted({line for look in looks if (line := _at(look))})
        if len(lines) != 1:
            return f" (lines {', '.join(map(str, lines))})" if lines else ""
        condition = _condition(lines[0], self._source)
        return f" (line {lines[0]}, inside `{condition}`)" if condition else f" (line {lines[0]})"


def _is_debugged(look: m.RankSighting) -> bool:
    """Return whether the rank is stopped at a breakpoint and waits for the user."""
    return look.state == "running" and look.seen is not None and look.seen.in_debugger


def _is_held(look: m.RankSighting) -> bool:
    return look.state in ("stopped", "traced") or _is_debugged(look)


def _stopped(look: m.RankSighting) -> str:
    if _is_debugged(look):
        place = _place(look)
        return f"Rank {look.rank} is stopped in the debugger{f' at {place}' if place else ''}."
    if look.state == "traced":
        return f"Rank {look.rank} (pid {look.pid}) is held by a debugger."
    return f"Rank {look.rank} is stopped (SIGSTOP); `kill -CONT {look.pid}` resumes it."


def _locked(look: m.RankSighting) -> str:
    line = _at(look)
    seen = "" if line is None else f" (seen last at line {line})"
    return f"Rank {look.rank} does nothing, in C code that does not release Python's lock{seen}."


def _waits_for_loader(look: m.RankSighting) -> bool:
    """Return whether a rank has stood still for long in torch's data loader, which waits for its workers."""
    seen = look.seen
    return look.state == "running" and seen is not None and seen.idle_s >= LOCKED_S and _LOADER in seen.function


def _loading(look: m.RankSighting) -> str:
    place = _place(look)
    return (
        f"Rank {look.rank} waits for a worker of its DataLoader{f' ({place})' if place else ''}. A worker that was "
        "forked hangs if a library with threads, such as polars, was used before: use "
        'multiprocessing_context="spawn".'
    )


def _has_been(look: m.RankSighting, wait: _Wait) -> bool:
    """Return whether the rank has called this collective and is not waiting in it (any more)."""
    if look.state == "left" or look.seen is None or not wait.number:
        return False
    return any(
        group.name == wait.group and group.ranks == wait.ranks and group.entered >= wait.number
        for group in look.seen.groups or ()
    )


def _condition(line: int | None, source: str) -> str:
    """Return the innermost `if` around this line that tests the rank: `if rank == 0`."""
    if line is None or not source:
        return ""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    innermost = ""
    for node in ast.walk(tree):  # outer nodes before those inside them
        if isinstance(node, ast.If) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            test = ast.unparse(node.test)
            if len(test) <= 60 and any(word in test.lower() for word in _RANK_WORDS):
                innermost = f"if {test}"
    return innermost


def _verb(phrase: str, ranks: Sequence[int]) -> str:
    """Inflect a verb: `has left the cell` of one rank, `have left the cell` of several."""
    if len(ranks) == 1:
        return phrase
    verb, space, rest = phrase.partition(" ")
    return {"has": "have", "is": "are"}.get(verb, verb.removesuffix("s")) + space + rest
