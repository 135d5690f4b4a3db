"""The observer that writes the trace of a run (`--profile`) into a file beside the notebook, in a thread of its own.

runs/4f2a-7/trace.json.gz                  all ranks, as soon as each has sent its part
runs/4f2a-7/memory-rank0.pickle            the history of a GPU's memory, for pytorch.org/memory_viz

Files of an earlier run with this id are replaced; an attached run sends its parts again. A part is the lines of
`worker/pytorch/trace_events.py`, with the time of its first event on a clock that all ranks share.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from jupyter_distrib.kernel.analysis.shares import PARTS
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system.formatting import rank_list, size
from jupyter_distrib.wire import messages as m

FOLDER = "runs"
TRACE = "trace.json.gz"
_LEAST_SHARE = 0.05
"""Minimum share of the time for a phase or an operator to be named."""
_SLOWER = 1.2
"""Minimum ratio to the fastest rank's work for a rank to be named as slow."""
_NAMES = {**PARTS, "collective": "collectives", "other": "code between its steps"}
_GZIP = 16 + zlib.MAX_WBITS
TRACE_BYTES, MEMORY_BYTES = 1 << 29, 64_000_000
"""Sizes of the largest trace and history of one rank that are unpacked: a few KB may hold gigabytes."""


def follow(run: ObservedRun) -> Observer | None:
    """Return an observer of a run that is profiled, or may be: the options of an attached run are unknown."""
    return TraceWriter(run, Path.cwd()) if "profile" in run.options or run.attached else None


class TraceWriter(Observer):
    """The writer of one run's trace."""

    ends_in_background = True

    def __init__(self, run: ObservedRun, directory: Path) -> None:
        self._run, self._directory = run, directory
        self._parts: dict[int, m.Profiled] = {}
        self._written = False

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        match event:
            case m.Profiled():
                self._parts[event.rank] = event
            case m.Restarted():
                self._parts, self._written = {}, False
            case _:
                pass
        over = isinstance(event, m.Ended) or self._parts.keys() == record.ranks.keys()
        if over and self._parts and not self._written:
            self._written = True
            self._write(tuple(record.ranks))

    def _write(self, ranks: tuple[int, ...]) -> None:
        """Write the files, after a note that they will come, since a program may not wait until the end."""
        folder = f"{FOLDER}/{self._run.id}"
        try:
            if not any(part.trace for part in self._parts.values()):
                self._run.note(sentence(self._parts, ranks, ""))
                return
            (self._directory / folder).mkdir(parents=True, exist_ok=True)
            with (
                _new(self._directory / folder / TRACE) as new,
                gzip.open(new, "wt", compresslevel=4, encoding="utf-8") as file,
            ):
                self._run.note(sentence(self._parts, ranks, f"{folder}/{TRACE}"))
                file.writelines(merged(self._parts))
            self._write_memory(folder)
        except (OSError, ValueError) as error:  # ValueError: no rank of this version has written such a part
            self._run.note(f"The trace could not be written into {folder}: {error}")

    def _write_memory(self, folder: str) -> None:
        for rank, part in self._parts.items():
            if part.memory:
                path = f"{folder}/memory-rank{rank}.pickle"
                content = _unpacked(part.memory, zlib.MAX_WBITS, MEMORY_BYTES)
                with _new(self._directory / path) as file:
                    file.write(content)
                if rank == min(self._parts):
                    self._run.note(f"{path} is the history of its GPU's memory, for https://pytorch.org/memory_viz")


def _new(path: Path) -> IO[bytes]:
    """Return a new file in place of an earlier one. The notebook's folder may be a team's, and the run's folder was
    there before it: a link that a colleague has put there is not written through. Raises `OSError`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(path.name, flags, 0o666, dir_fd=folder), "wb")
    finally:
        os.close(folder)


def merged(parts: Mapping[int, m.Profiled]) -> Iterator[str]:
    """Yield the text of the trace, a JSON object in the Trace Event Format; time 0 is the first event of any rank."""
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
    return iter(_unpacked(trace, _GZIP, TRACE_BYTES).decode().splitlines())


def _unpacked(packed: bytes, kind: int, most_bytes: int) -> bytes:
    """Return what a rank has compressed. Raises `ValueError` if it is damaged, or larger than ranks write it."""
    unpacker = zlib.decompressobj(kind)
    try:
        content = unpacker.decompress(packed, most_bytes)
    except zlib.error as error:
        raise ValueError(f"a rank's part is damaged ({error})") from None
    if not unpacker.eof:
        raise ValueError(f"a rank's part is larger than {size(most_bytes)}, or has no end")
    return content


def sentence(parts: Mapping[int, m.Profiled], ranks: Sequence[int], path: str) -> str:
    """Return a sentence on the trace in this file, and on ranks without a part in it."""
    recorded = {rank: part for rank, part in sorted(parts.items()) if part.trace}
    missing = [rank for rank in ranks if rank not in recorded]
    notes: dict[str, list[int]] = {}
    for rank in ranks:
        note = parts[rank].note if rank in parts else "it ended before it could send its part"
        if note:
            notes.setdefault(note, []).append(rank)
    texts = [f"{rank_list(which)}: {note}" for note, which in notes.items()]
    if not recorded:
        return f"--profile has recorded nothing ({'; '.join(texts)})"
    of = rank_list([rank for rank in ranks if rank not in missing])
    first = next(iter(recorded.values()))
    what = _steps(first) if first.steps else f"{_duration(first.seconds)} of the cell"
    text = f"{path} shows {what} on {of}; open it at https://ui.perfetto.dev or in chrome://tracing."
    return " ".join([text, *(f"{each[0].upper()}{each[1:]}." for each in (*_time(recorded), *texts))])


def _steps(part: m.Profiled) -> str:
    last = part.first_step + part.steps - 1
    return f"step {last}" if part.steps == 1 else f"steps {part.first_step}-{last}"


def _time(recorded: Mapping[int, m.Profiled]) -> list[str]:
    """Return sentences on the time of a step and its phases, on the slowest operator, and on the slowest rank."""
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
        if busy[fast] > 0 and busy[slow] / busy[fast] >= _SLOWER:
            sentences.append(f"rank {slow} works {busy[slow] / busy[fast]:.1f} times as long on a step as rank {fast}")
    return sentences


def _shares(recorded: Mapping[int, m.Profiled], seconds: float) -> str:
    phases = sorted(_summed(part.phases for part in recorded.values()).items(), key=lambda each: -each[1])
    named = [f"{_NAMES.get(name, name)} {each_s / seconds:.0%}" for name, each_s in phases]
    return ", ".join(text for text, (_, each_s) in zip(named, phases, strict=True) if each_s >= _LEAST_SHARE * seconds)


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
