"""The part of a rank in a trace, and the clocks of ranks on several nodes."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from jupyter_distrib.worker.pytorch import rank_store, trace_events

PID = 4242


def operator(name: str, at_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    common = {"ph": "X", "cat": "cpu_op", "pid": PID, "tid": PID, "args": {"External id": 3, "Ev Idx": 1}}
    return {**common, "name": name, "ts": at_us, "dur": length_us, **more}


def part_of(*events: dict[str, Any], most: int = 100, **more: Any) -> trace_events.Part:
    recorded = {"baseTimeNanoseconds": 50_000_000_000, "traceEvents": list(events)}
    return trace_events.part_of(recorded, rank=2, name="rank 2", pid=PID, wall_s=40.0, most=most, **more)


def shown(part: trace_events.Part) -> list[tuple[float, dict[str, Any]]]:
    return [(float(line.partition(" ")[0]), json.loads(line.partition(" ")[2])) for line in part.lines]


def test_events_have_the_numbers_of_their_rank_and_times_from_the_first_one() -> None:
    kernel = operator("gemm", 1_000_300.0, 50.0, cat="kernel", pid=0, tid=7)
    part = part_of(operator("aten::mm", 1_000_100.0, 80.0), kernel)

    assert part.began_s == pytest.approx(50 - 40 + 1.0001)
    events = [(at_us, event["name"], event["pid"]) for at_us, event in shown(part) if event["ph"] == "X"]
    assert events == [(0.0, "aten::mm", 200), (200.0, "gemm", 201)]
    names = {event["pid"]: event["args"]["name"] for _, event in shown(part) if event["name"] == "process_name"}
    assert names == {200: "rank 2", 201: "rank 2, GPU 0"}
    assert part.busiest == {"gemm": 50e-6}


def test_the_time_of_an_operator_is_without_that_of_the_operators_in_it() -> None:
    part = part_of(operator("outer", 0.0, 100.0), operator("inner", 10.0, 60.0), operator("next", 100.0, 30.0))

    assert part.busiest == pytest.approx({"inner": 60e-6, "outer": 40e-6, "next": 30e-6})


def test_steps_are_a_track_of_their_own() -> None:
    part = part_of(operator("a", 0.0, 1000.0), steps=[("step 4", 10.0002, 10.0007), ("step 5", 10.0007, 12.0)])

    steps = [(at_us, event) for at_us, event in shown(part) if event.get("cat") == "step"]
    assert [(event["name"], round(at_us), round(event["dur"])) for at_us, event in steps] == [
        ("step 4", 200, 500),
        ("step 5", 700, 300),
    ]


def test_memory_becomes_a_timeline_and_too_many_events_are_cut_at_the_end() -> None:
    sizes = {"Total Allocated": 4096, "Total Reserved": 8192, "Device Type": 1, "Device Id": 0}
    memory = {"ph": "i", "name": "[memory]", "pid": PID, "tid": PID, "ts": 5.0, "args": sizes}
    part = part_of(operator("a", 0.0, 1.0), memory, operator("b", 6.0, 1.0), most=2)

    (counter,) = (event for _, event in shown(part) if event["ph"] == "C")
    assert (counter["name"], counter["args"]) == ("memory of GPU 0", {"allocated": 4096, "reserved": 8192})
    assert part.cut
    assert "b" not in [event["name"] for _, event in shown(part)]


def test_the_offset_of_a_clock_is_measured_by_a_round_trip() -> None:
    store = dist.HashStore()
    answering = threading.Thread(target=rank_store.clock_offset_s, args=(store, 0, 2))
    answering.start()
    offset_s = rank_store.clock_offset_s(store, 1, 2, now_s=lambda: time.monotonic() - 5000.0)
    answering.join()

    assert offset_s == pytest.approx(5000.0, abs=0.05)
