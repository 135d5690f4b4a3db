"""Where the main thread of this rank is, and how far its process groups are: the answers to `Probe`.

Runs in the rank's control thread, about once a second while a cell runs, in well under a millisecond: it looks at the
frames of the main thread and at its clock. Only when that thread has not moved for a while, or when another rank waits,
it reads torch's flight recorder, which takes tens of milliseconds.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from jupyter_distrib.system import process_environment
from jupyter_distrib.wire.messages import GroupSighting, ProbeAnswer

DEEP_AFTER_S = 2.5
BUSY_S = 0.01
"""Less processor time than this between two probes is no work."""
_COMMUNICATION = tuple(
    os.path.join("torch", "distributed", name)
    for name in ("distributed_c10d.py", "c10d_logger.py", "rendezvous.py", "_functional_collectives.py")
)
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Torch's recorders of the collectives of CPU and of NVIDIA groups."""


class Prober:
    """Remembers what it saw last, to tell since when nothing has changed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._main = threading.main_thread().ident or 0
        self._begin("", "")

    def _begin(self, run: str, filename: str) -> None:
        self._run, self._filename = run, filename
        self._began_ns = time.time_ns()
        self._mark: object = None
        self._moved_s = self._busy_s = time.monotonic()
        self._cpu_s = 0.0
        self._groups: tuple[GroupSighting, ...] | None = None
        self._bases: dict[str, tuple[int, int]] = {}

    def begin(self, run: str, filename: str) -> None:
        """Called in the main thread before each cell: collectives are counted from here."""
        self._begin(run, filename)
        self._bases = {name: (id(group), _sequence(group)) for name, group, _ in _process_groups()}

    def look(self, *, deep: bool) -> ProbeAnswer:
        frames = list(_frames(sys._current_frames().get(self._main)))  # noqa: SLF001 - the only way to see a thread
        now_s = time.monotonic()
        self._compare(frames, now_s)
        unmoved_s = now_s - self._moved_s
        if deep or (unmoved_s >= DEEP_AFTER_S and self._groups is None):
            self._groups = self._look_into_groups()
        return ProbeAnswer(
            run=self._run,
            rank=self._rank,
            line=next((frame.f_lineno for frame in frames if frame.f_code.co_filename == self._filename), None),
            function=_function(frames, self._filename),
            call=_call(frames),
            unmoved_s=unmoved_s,
            idle_s=now_s - self._busy_s,
            groups=self._groups,
        )

    def _compare(self, frames: list[types.FrameType], now_s: float) -> None:
        cpu_s = _cpu_s(self._main)
        if cpu_s - self._cpu_s > BUSY_S:
            self._busy_s = now_s
        self._cpu_s = cpu_s
        sequences = [_sequence(group) for _, group, _ in _process_groups()]
        mark = ([(id(frame.f_code), frame.f_lasti) for frame in frames], sequences)
        if mark != self._mark:
            self._mark, self._moved_s, self._groups = mark, now_s, None

    def _look_into_groups(self) -> tuple[GroupSighting, ...]:
        entries = [entry for entry in _recorded() if not entry["is_p2p"]]
        return tuple(self._look_into(name, group, ranks, entries) for name, group, ranks in _process_groups())

    def _look_into(self, name: str, group: Any, ranks: tuple[int, ...], entries: list[dict[str, Any]]) -> GroupSighting:
        kept, base = self._bases.get(name, (0, 0))
        if kept != id(group):
            base = 0
        mine = [entry for entry in entries if entry["process_group"][0] == name]
        newest = max((entry["pg_id"] for entry in mine), default=0)  # an earlier group may have had this name
        mine = [entry for entry in mine if entry["pg_id"] == newest and (base or self._is_of_this_run(entry))]
        waiting = next((entry for entry in mine if not entry["retired"]), None)
        entered = max((int(entry["collective_seq_id"]) for entry in mine), default=0)
        if waiting is None:
            return GroupSighting(name=name, ranks=ranks, entered=max(0, entered - base))
        library, _, op = waiting["profiling_name"].partition(":")
        return GroupSighting(
            name=name,
            ranks=ranks,
            entered=max(0, entered - base),
            number=max(1, int(waiting["collective_seq_id"]) - base),
            op=op,
            tensors=_tensors(waiting),
            spins=library == "nccl",
        )

    def _is_of_this_run(self, entry: dict[str, Any]) -> bool:
        return int(entry["time_created_ns"]) >= self._began_ns


def _cpu_s(thread: int) -> float:
    """Processor time of a thread; 0 where the system does not tell (macOS)."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if hasattr(time, "pthread_getcpuclockid") else 0.0


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _function(frames: list[types.FrameType], filename: str) -> str:
    """The cell's own function that is running, or the library's that the cell has called."""
    called = ""
    for frame in frames:
        code = frame.f_code
        if code.co_filename == filename:
            return called or ("" if code.co_name == "<module>" else f"{code.co_name}()")
        if not code.co_filename.endswith(_COMMUNICATION) and not code.co_filename.startswith(process_environment.OWN):
            called = f"{code.co_name}() ({os.path.basename(code.co_filename)})"
    return called


def _call(frames: list[types.FrameType]) -> str:
    """Return those of the innermost calls inside torch's communication: the outermost, which is the one that was
    called."""
    called = ""
    for frame in frames:
        code = frame.f_code
        if code.co_filename.endswith(_COMMUNICATION):
            called = called if code.co_name.startswith("_") or code.co_name == "wrapper" else code.co_name
        elif not code.co_filename.startswith(process_environment.OWN):
            break
    return called


def _process_groups() -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Name, group, and its members' numbers in the world."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    world = c10d._world  # noqa: SLF001
    for group, name in list(world.pg_names.items()):
        yield name, group, tuple(world.pg_group_ranks.get(group, ()))


def _sequence(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # noqa: SLF001
    except RuntimeError:  # a backend that does not count, or a group that is going away
        return 0


def _recorded() -> list[dict[str, Any]]:
    """The last collectives of this process, oldest first; empty if this torch records none."""
    from torch._C import _distributed_c10d

    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            # Our own process's words. Without stack traces: the first one would take a second.
            entries += pickle.loads(dump(True, False, False)).get("entries", ())
    return entries


def _tensors(entry: dict[str, Any]) -> str:
    sizes, types_ = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    return ", ".join(f"{list(size)} {kind}" for size, kind in zip(sizes, types_, strict=False))
