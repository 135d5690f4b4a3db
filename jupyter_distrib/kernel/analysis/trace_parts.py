"""The trace of a run, put together from the parts of its ranks (`--profile`). Kernel side; pure functions.

A part is the lines of `worker/pytorch/trace_events.py`, with the time of its first event on a clock
that all ranks share.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jupyter_distrib.kernel.analysis.shares import PARTS
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

LEAST_SHARE = 0.05
"""The share of the time from which a phase or an operator is named."""
SLOWER = 1.2
"""The factor by which a rank works longer than the fastest one, from which it is named."""
NAMES = {**PARTS, "collective": "collectives", "other": "code between its steps"}
GZIP = 16 + zlib.MAX_WBITS


def merged(parts: Mapping[int, m.Profiled]) -> Iterator[str]:
    """Yield the text of the trace, a JSON object in the Trace Event Format, whose time 0 is the first event of all."""
    recorded = {rank: part for rank, part in sorted(parts.items()) if part.trace}
    zero_s = min((part.began_s for part in recorded.values()), default=0.0)
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    before = ""
    for part in recorded.values():
        for line in _lines(part.trace):
            at_us, _, rest = line.partition(" ")
            shifted_us = float(at_us) + 1e6 * (part.began_s - zero_s)
            yield f'{before}{{"ts":{shifted_us:.3f},{rest[1:]}'
            before = ",\n"
    yield "\n]}\n"


def _lines(trace: bytes) -> Iterator[str]:
    return iter(zlib.decompress(trace, GZIP).decode().splitlines())


def sentence(parts: Mapping[int, m.Profiled], ranks: Sequence[int], path: str) -> str:
    """Return what the trace in this file shows, and where ranks have no part in it."""
    recorded = {rank: part for rank, part in sorted(parts.items()) if part.trace}
    missing = [rank for rank in ranks if rank not in recorded]
    notes: dict[str, list[int]] = {}
    for rank in ranks:
        note = parts[rank].note if rank in parts else "it has ended before it could send its part"
        if note:
            notes.setdefault(note, []).append(rank)
    told = [f"{rank_list(which)}: {note}" for note, which in notes.items()]
    if not recorded:
        return f"--profile has recorded nothing ({'; '.join(told)})"
    of = rank_list([rank for rank in ranks if rank not in missing])
    first = next(iter(recorded.values()))
    what = _steps(first) if first.steps else f"{_duration(first.seconds)} of the cell"
    text = f"{path} shows {what} on {of}; open it at https://ui.perfetto.dev or in chrome://tracing."
    return " ".join([text, *(f"{each[0].upper()}{each[1:]}." for each in (*_time(recorded), *told))])


def _steps(part: m.Profiled) -> str:
    last = part.first_step + part.steps - 1
    return f"step {last}" if part.steps == 1 else f"steps {part.first_step}-{last}"


def _time(recorded: Mapping[int, m.Profiled]) -> list[str]:
    """Return the sentences on the time: of a step and its phases, of what took longest, and of the slowest rank."""
    seconds = sum(part.seconds for part in recorded.values()) or 1.0
    steps = min(part.steps for part in recorded.values())
    sentences = []
    if steps:
        per_step_s = seconds / sum(part.steps for part in recorded.values())
        sentences.append(f"a step takes {_duration(per_step_s)}: {_shares(recorded, seconds)}")
    operators = _summed(part.busiest for part in recorded.values())
    if operators:
        name, longest_s = max(operators.items(), key=lambda each: each[1])
        sentences.append(f"most time in one operator by itself: {name}, {longest_s / seconds:.0%}")
    if steps and len(recorded) > 1:
        busy = {rank: _busy_s(part) / part.steps for rank, part in recorded.items()}
        slow, fast = max(busy, key=lambda rank: busy[rank]), min(busy, key=lambda rank: busy[rank])
        if busy[fast] > 0 and busy[slow] / busy[fast] >= SLOWER:
            sentences.append(f"rank {slow} works {busy[slow] / busy[fast]:.1f} times as long on a step as rank {fast}")
    return sentences


def _shares(recorded: Mapping[int, m.Profiled], seconds: float) -> str:
    phases = sorted(_summed(part.phases for part in recorded.values()).items(), key=lambda each: -each[1])
    named = [f"{NAMES.get(name, name)} {each_s / seconds:.0%}" for name, each_s in phases]
    return ", ".join(text for text, (_, each_s) in zip(named, phases, strict=True) if each_s >= LEAST_SHARE * seconds)


def _busy_s(part: m.Profiled) -> float:
    """Return the time in which a rank did not wait for others."""
    return sum(seconds for name, seconds in part.phases.items() if name != "collective")


def _summed(each: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for numbers in each:
        for name, number in numbers.items():
            found[name] = found.get(name, 0.0) + number
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
