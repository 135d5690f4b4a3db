"""One rank's part of a trace: the events recorded by torch's profiler, as lines that the notebook merges with those of
the other ranks. Rank's main thread; pure functions of the profiler's file.

A line is a time in microseconds since the start of this part, a space, and the rest of an event in the Trace Event
Format (the JSON that Perfetto and chrome://tracing read) without its `ts`.

Each rank has its own range of process numbers: `100 * rank` is the rank itself, with two tracks above its threads
(steps, and the phases of a step), and the following numbers are its GPUs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NUMBERS = 100
"""Number of process numbers per rank."""
FLOWS = 100_000_000
"""Number of flow ids (arrows) per rank."""
NOT_TOLD = {"External id", "Record function id", "Ev Idx", "finished"}
"""Internal ids of the profiler, of no use to a reader."""
MEMORY_EVERY_US = 20.0
"""Smallest distance of two points in a memory timeline, in microseconds."""
BUSIEST = 5
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_STEPS, _PHASES = 1, 2

Event = dict[str, Any]
Span = tuple[str, float, float]
"""A name with its start and end, by `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The events of one rank."""

    lines: list[str]
    began_s: float
    """Start time, by `time.monotonic`."""
    busiest: dict[str, float]
    """Seconds of the slowest operators (on a GPU, kernels), by name."""
    cut: bool
    """Whether later events were dropped because there were too many."""


def part_of(
    recorded: dict[str, Any],
    *,
    rank: int,
    name: str,
    pid: int,
    wall_s: float,
    steps: Iterable[Span] = (),
    phases: Iterable[Span] = (),
    most: int,
) -> Part:
    """Return the part of one rank.

    Args:
        recorded: The profiler's file, as JSON.
        rank: The rank's number.
        name: The name of its process.
        pid: The rank's process id, which distinguishes it from GPUs in the file.
        wall_s: `time.time()` minus `time.monotonic()`.
        steps: The steps of the training.
        phases: The phases of its steps.
        most: Most events to keep.
    """
    events = sorted((each for each in recorded["traceEvents"] if _is_shown(each)), key=_time)
    cut, events = len(events) > most, events[:most]
    zero_us = events[0]["ts"] if events else 0.0
    began_s = (recorded.get("baseTimeNanoseconds", 0) / 1e9 - wall_s) + zero_us / 1e6
    end_us = max((each["ts"] - zero_us + each.get("dur", 0.0) for each in events), default=0.0)
    numbers = {pid: NUMBERS * rank}
    lines = [_line(0.0, each) for each in _names(recorded["traceEvents"], numbers, rank, name)]
    for track, spans in ((_STEPS, steps), (_PHASES, phases)):
        lines += _spans(spans, track, NUMBERS * rank, began_s, end_us)
    lines += _converted(events, numbers, rank, zero_us)
    lines += [_line(0.0, each) for number in numbers.items() for each in _process(number, pid, name)]
    return Part(lines=lines, began_s=began_s, busiest=_busiest(events, pid), cut=cut)


def _is_shown(event: Event) -> bool:
    return (event["ph"] in "Xsft" and event.get("cat") != "Trace") or event.get("name") == "[memory]"


def _time(event: Event) -> float:
    return float(event["ts"])


def _line(at_us: float, event: Event) -> str:
    return f"{at_us:.3f} {json.dumps(event, separators=(',', ':'))}"


def _names(events: Iterable[Event], numbers: dict[Any, int], rank: int, name: str) -> Iterator[Event]:
    """Yield the names of the threads and of our own two tracks."""
    first = NUMBERS * rank
    for track, text in ((_STEPS, "steps"), (_PHASES, "phases of a step")):
        yield {"ph": "M", "name": "thread_name", "pid": first, "tid": track, "args": {"name": text}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": first, "tid": track, "args": {"sort_index": track - 10}}
    for event in events:
        if event["ph"] == "M" and event["name"] in ("thread_name", "thread_sort_index") and _is_number(event["pid"]):
            number = _number(numbers, event["pid"], rank)
            yield {**{key: event[key] for key in ("ph", "name", "tid", "args")}, "pid": number}


def _is_number(pid: object) -> bool:
    return isinstance(pid, int)


def _number(numbers: dict[Any, int], pid: Any, rank: int) -> int:
    if pid not in numbers:
        numbers[pid] = NUMBERS * rank + min(len(numbers), NUMBERS - 1)
    return numbers[pid]


def _process(number: tuple[Any, int], pid: int, name: str) -> Iterator[Event]:
    own, mine = number
    text = name if own == pid else f"{name}, GPU {own}"
    yield {"ph": "M", "name": "process_name", "pid": mine, "tid": 0, "args": {"name": text}}
    yield {"ph": "M", "name": "process_sort_index", "pid": mine, "tid": 0, "args": {"sort_index": mine}}


def _spans(spans: Iterable[Span], track: int, pid: int, began_s: float, end_us: float) -> Iterator[str]:
    for name, start_s, stop_s in spans:
        start_us, stop_us = (min(max(0.0, 1e6 * (each - began_s)), end_us) for each in (start_s, stop_s))
        if stop_us > start_us:
            yield _line(start_us, {"ph": "X", "cat": "step", "name": name, "pid": pid, "tid": track,
                                   "dur": round(stop_us - start_us, 3)})  # fmt: skip


def _converted(events: Sequence[Event], numbers: dict[Any, int], rank: int, zero_us: float) -> Iterator[str]:
    drawn_us: dict[str, float] = {}
    for event in events:
        at_us = event["ts"] - zero_us
        pid = _number(numbers, event["pid"], rank)
        if event["name"] == "[memory]":
            args = event["args"]
            kind = "memory of tensors" if args.get("Device Type") == 0 else f"memory of GPU {args.get('Device Id')}"
            if at_us - drawn_us.get(kind, -MEMORY_EVERY_US) >= MEMORY_EVERY_US:
                drawn_us[kind] = at_us
                sizes = {"allocated": args.get("Total Allocated", 0), "reserved": args.get("Total Reserved", 0)}
                sizes = {name: size for name, size in sizes.items() if size or name == "allocated"}
                yield _line(at_us, {"ph": "C", "name": kind, "pid": NUMBERS * rank, "args": sizes})
            continue
        copied: Event = {key: each for key, each in event.items() if key not in ("ts", "args", "pid", "id")}
        copied["pid"] = pid
        if "id" in event:
            copied["id"] = rank * FLOWS + int(event["id"]) % FLOWS
        if args := {key: each for key, each in event.get("args", {}).items() if key not in NOT_TOLD}:
            copied["args"] = args
        yield _line(at_us, copied)


def _busiest(events: Sequence[Event], pid: int) -> dict[str, float]:
    """Return the slowest kernels of a GPU, else the operators of the main thread with the longest self time."""
    kernels: Counter[str] = Counter()
    own: Counter[str] = Counter()
    open_spans: list[Event] = []
    for event in events:
        if event["ph"] != "X":
            continue
        if event.get("cat") in KERNELS:
            kernels[event["name"]] += event["dur"]
        elif event["pid"] == event["tid"] == pid and event.get("cat") in ("cpu_op", "user_annotation"):
            while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= event["ts"]:
                open_spans.pop()
            own[event["name"]] += event["dur"]
            if open_spans:
                own[open_spans[-1]["name"]] -= event["dur"]
            open_spans.append(event)
    return {name: seconds / 1e6 for name, seconds in (kernels or own).most_common(BUSIEST)}
