"""One run of four ranks in which everything happens that a view can show, and its state as JavaScript gets it; and one
in which ranks raise the same in different ways, in the pieces that cross.

`golden_run_state.json` and `golden_failures.json` are compared from Python and from JavaScript. After a change of the
state on purpose: `python -m tests.kernel.record.golden_run` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.state import StateDelta, state_of
from jupyter_distrib.wire import messages as m

FILE = Path(__file__).with_name("golden_run_state.json")
FAILURES_FILE = Path(__file__).with_name("golden_failures.json")
RUN = "a1b2c3-7"
GIB = 1 << 30
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def golden_record() -> RunRecord:
    """A GPU run in mid-air: rank 0 went on alone, rank 2 raised, rank 3 was killed, rank 1 waits."""
    workers = [
        m.WorkerInfo(rank=n, pid=4000 + n, device=f"cuda:{n}", device_name=f"NVIDIA A100-SXM4-80GB (GPU {n})")
        for n in range(4)
    ]
    record = RunRecord(
        run=RUN,
        label="Cell In[5]",
        ranks=range(4),
        world_size=4,
        gpus=True,
        strategy="ddp",
        workers=workers,
        remark="4 ranks, one for each GPU",
    )
    for event in events():
        record.apply(event)
    return record


def events() -> Iterator[m.RunEvent]:
    for rank in range(4):
        yield m.Started(run=RUN, rank=rank, pid=4000 + rank, device=f"cuda:{rank}", at_s=100 + rank / 8)
    yield m.Noted(run=RUN, rank=None, text="utils.py has changed and is imported again")
    yield m.Noted(run=RUN, rank=2, text="`loader` is a copy: what the cell changes in it stays on the rank")
    yield from training()
    yield from output()
    yield from displays()
    for rank in range(4):
        yield sampled(rank, at_s=106, rss_bytes=3 * GIB, gpu_memory_bytes=8 * GIB)
        yield sampled(rank, at_s=107, rss_bytes=2 * GIB + rank, gpu_memory_bytes=6 * GIB)
    yield from the_end()


def training() -> Iterator[m.RunEvent]:
    for step in range(1, 4):
        for rank in range(4):
            at_s = 100 + step + rank / 16
            yield m.Progressed(run=RUN, rank=rank, label="epoch", step=1, total=3, at_s=at_s)
            yield m.Progressed(run=RUN, rank=rank, label="batch", step=step, total=50, at_s=at_s)
            yield m.Measured(
                run=RUN, rank=rank, step=step, values={"loss": 2 / step + rank / 100, "lr": 1e-3}, at_s=at_s
            )
    yield m.Measured(run=RUN, rank=3, step=4, values={"loss": float("nan"), "grad_norm": float("inf")}, at_s=104)


def output() -> Iterator[m.RunEvent]:
    for rank in range(4):
        yield m.Wrote(run=RUN, rank=rank, stream="stdout", text="loading data\n", at_s=104)
    yield m.Wrote(run=RUN, rank=1, stream="stderr", text="<img src=x onerror=alert(1)> \x1b[31mred\x1b[0m\n", at_s=104)
    yield m.Wrote(run=RUN, rank=2, stream="stdout", text="step 9000\n", skipped_lines=8999, at_s=104.25)
    bar = "train:  25%|##5       | 25/100 [00:05<00:15,  5.00it/s, loss=0.31]"
    yield m.Wrote(run=RUN, rank=0, stream="stderr", text=f"\r{bar}", at_s=104.5)


def displays() -> Iterator[m.RunEvent]:
    gone = {"text/plain": "cleared again"}
    yield m.Displayed(run=RUN, rank=0, data=gone, metadata={}, at_s=105)
    yield m.Cleared(run=RUN, rank=0, at_s=105)
    figure = {"image/png": PIXEL, "text/plain": "<Figure size 640x480 with 1 Axes>"}
    size: dict[str, object] = {"image/png": {"width": 640, "height": 480}}
    yield m.Displayed(run=RUN, rank=0, data=figure, metadata=size, at_s=105)
    for update, percent in ((False, 10), (True, 80)):
        data = {"text/html": f"<b>{percent} %</b>", "text/plain": f"{percent} %"}
        yield m.Displayed(run=RUN, rank=1, data=data, metadata={}, display_id="bar", update=update, at_s=105.5)


def sampled(rank: int, *, at_s: float, rss_bytes: int, gpu_memory_bytes: int) -> m.Sampled:
    return m.Sampled(
        run=RUN,
        rank=rank,
        rss_bytes=rss_bytes,
        cpu_percent=98.5,
        gpu_memory_bytes=gpu_memory_bytes,
        gpu_memory_total_bytes=80 * GIB,
        gpu_percent=None if rank == 3 else 75.0,
        gpu_tensor_bytes=gpu_memory_bytes - GIB // 2,
        gpu_reserved_bytes=gpu_memory_bytes - GIB // 4,
        at_s=at_s,
    )


def the_end() -> Iterator[m.RunEvent]:
    where = m.RankPlace(rank=0, where="waits in all_reduce #2", line=14, waiting=True)
    yield m.Stalled(run=RUN, text="rank 1 has not reached all_reduce #2", places=(where,), at_s=108)
    yield m.Moved(run=RUN, at_s=109)
    at = m.Frame(filename="Cell In[5]", line=14, function="train", text="dist.all_reduce(total)")
    yield m.StackSeen(run=RUN, rank=1, frames=(at,), at_s=109.5)
    frame = m.Frame(filename="Cell In[5]", line=9, function="<module>", text="config['lr']")
    failure = m.Failure(type_name="KeyError", message="'lr'", frames=(frame,))
    yield m.Failed(run=RUN, rank=2, failure=failure, at_s=110)
    yield m.Exited(
        run=RUN, rank=3, pid=4003, exit_code=-9, asked=False, out_of_memory=True, peak_rss_bytes=31 * GIB, at_s=110.5
    )
    yield m.Returned(run=RUN, rank=0, value=None, kept=m.KeptNames(types={"model": "Net"}), at_s=111)
    places = (
        m.RankPlace(rank=0, where="has left the cell", line=None, waiting=False),
        m.RankPlace(rank=1, where="waits in all_reduce #3", line=14, waiting=True),
    )
    text = "rank 0 has left the cell without all_reduce #3; rank 1 waits there (line 14)."
    yield m.Stalled(run=RUN, text=text, places=places, at_s=117)


def failing_record() -> RunRecord:
    """Ranks 0 and 2 have the same traceback; rank 1 raised the same at the same line, but was called from another; rank 3
    lost its peers."""
    record = RunRecord(run=RUN, label="Cell In[5]", ranks=range(4), world_size=4, strategy="ddp")
    message = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    for rank, failure in enumerate(
        (a_failure(12), a_failure(14), a_failure(12), m.Failure(type_name="RuntimeError", message=message))
    ):
        record.apply(m.Started(run=RUN, rank=rank, pid=4000 + rank, device="cpu", at_s=100))
        record.apply(m.Failed(run=RUN, rank=rank, failure=failure, at_s=110 + rank))
    return record


def a_failure(called_at: int) -> m.Failure:
    frames = (
        m.Frame(filename="Cell In[5]", line=called_at, function="<module>", text="train()"),
        m.Frame(filename="Cell In[5]", line=9, function="train", text="config['lr']"),
    )
    return m.Failure(type_name="KeyError", message="'lr'", frames=frames)


def golden_text() -> str:
    return _json(state_of(golden_record()))


def failures_text() -> str:
    return _json(StateDelta("local").changed(failing_record(), 0.0))


def _json(state: dict[str, Any]) -> str:
    return json.dumps(state, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(golden_text(), encoding="utf-8")
    FAILURES_FILE.write_text(failures_text(), encoding="utf-8")
