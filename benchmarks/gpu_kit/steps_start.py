"""Starting: what touches the GPU and when, leases, variables that CUDA reads once, drivers that do not tell all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.gpu_kit.place import PID, Book, Place, is_alive, running
from benchmarks.gpu_kit.step import Findings, step, until

SEES = """
import os, torch
(torch.cuda.is_initialized(), torch._C._cuda_isInBadFork(), torch.cuda.current_device(),
 os.environ["CUDA_VISIBLE_DEVICES"])
"""


@step(
    "K1",
    "agent and forkserver have begun no CUDA, and use no GPU memory",
    limit_s=30,
    without_gpu="bed",
)
def untouched(place: Place, find: Findings) -> None:
    before = place.used_bytes()
    with place.notebook():
        time.sleep(3)  # what is imported beside the first cell is
        for name, module in (("agent", "agent"), ("forkserver", "worker.process.forkserver")):
            pids = running(f"jupyter_distrib.{module}")
            find.that(f"the {name} is there", bool(pids), pids)
            # Loading libcuda.so says nothing: libcublasLt does it when torch is imported.
            opened = sorted({link for pid in pids for link in _open_files(pid) if link.startswith("/dev/nvidia")})
            if name == "forkserver":
                find.that("the forkserver has no /dev/nvidia* open", not opened, " ".join(opened))
            elif opened:
                find.figure("the agent, which asks NVML, has open", " ".join(opened))
        grown = place.used_bytes() - before
        find.that("they take no GPU memory", grown < 20 << 20, f"{grown / 2**20:.0f} MB")


def _open_files(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue
    return found


@step(
    "K2",
    "a rank has its GPU at once, and the second cell does not wait for a second context",
    limit_s=40,
    without_gpu="bed",
)
def first_cells(place: Place, find: Findings) -> None:
    before = place.used_bytes()
    if place.bed is not None:
        place.bed.state["set_device"] = {"error": "", "seconds": 0.5}
        place.bed.write()
    with place.notebook() as book:
        took_s = [_timed(book, place), _slept(1.0) or _timed(book, place), _slept(3.0) or _timed(book, place)]
        find.within("cell 1", took_s[0], 4.0 if place.on_gpu else 30.0)
        find.within("cell 2, a second later,", took_s[1], 0.1)
        find.within("cell 3, when all is imported,", took_s[2], 0.1)
        if place.on_gpu:
            (seen,) = book.values(place.ranks(), SEES)
            find.that("CUDA is up, not in a bad fork, on device 0", seen[:3] == (True, False, 0), seen)
            find.that("the rank sees one GPU", bool(seen[3]) and "," not in seen[3], seen[3])
        held = place.used_bytes() - before
        find.that("a bare rank takes less than 700 MB", held < 700 << 20, f"{held / 2**20:.0f} MB")


def _timed(book: Book, place: Place) -> float:
    outcome = book.ok(f"%%distributed {place.ranks()}\nNone")
    return outcome.wall_s


def _slept(seconds: float) -> None:
    time.sleep(seconds)


@step(
    "K3",
    "ranks that idle make room: for --fresh, and for another notebook, unless they keep something",
    limit_s=60,
    without_gpu="bed",
)
def making_room(place: Place, find: Findings) -> None:
    one = place.ranks()
    with place.notebook() as first, place.notebook() as second:
        (pid,) = first.settled(one)
        with find.going_on("--gpus 1 --fresh"):
            outcome = first.cell(f"%%distributed {one} --fresh --out fresh\n{PID}")
            fresh = first.ok("print(fresh[0])").stdout.strip() if outcome.status == "ok" else outcome.evalue
            find.that("--fresh gives another process", fresh.isdigit() and int(fresh) != pid, fresh)
            find.within("--fresh", outcome.wall_s, 3.0)
        with find.going_on("the GPU of an idle notebook"):
            outcome = second.cell(f"%%distributed {one}\n1")
            find.that("another notebook gets the GPU of an idle one", outcome.status == "ok", outcome.evalue)
            find.within("... and", outcome.wall_s, 3.0)
            status = first.cell("%distributed_status").text
            find.that("the first sees who has it", f"kernel {second.pid}" in status, status[-300:])
        with find.going_on("a GPU with a kept value"):
            kept = first.cell(f"%%distributed {one} --keep w\nw = 1")
            find.that("the first gets it back", kept.status == "ok", kept.evalue)
            refused = second.cell(f"%%distributed {one}\n1")
            find.that("a kept value holds the GPU", "keeps w" in refused.text, refused.text[-300:])


@step(
    "K12",
    "variables that CUDA reads once start new ranks, or it is said that they are not in force",
    limit_s=45,
    without_gpu="bed",
)
def read_once(place: Place, find: Findings) -> None:
    one = place.ranks()
    with place.notebook() as book:
        (pid,) = book.values(one, PID)
        with find.going_on("--env PYTORCH_CUDA_ALLOC_CONF"):
            option = f"{one} --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            (other,) = book.values(option, PID)
            find.that("--env PYTORCH_CUDA_ALLOC_CONF starts a new process", other != pid, f"{pid}, {other}")
            if place.on_gpu:
                code = 'import torch\ntorch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]'
                (set_,) = book.values(option, code)
                find.that("segments are expandable", set_ is True, set_)
    with place.notebook() as book:
        (pid,) = book.values(one, PID)
        book.ok("import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'")
        outcome = book.ok(f"%%distributed {one} --out after\n{PID}")
        (after,) = book.values(one, PID)
        said = "CUDA_LAUNCH_BLOCKING" in outcome.text
        find.that("CUDA_LAUNCH_BLOCKING set later: new ranks, or a sentence", after != pid or said, outcome.text[-200:])
        if place.on_gpu and after != pid:
            (share,) = book.values(one, LAUNCHES)
            find.that("launches block", share > 0.5, f"{share:.0%} of the time passes in launches")


LAUNCHES = """
import time, torch
a = torch.randn(2048, 2048, device=device)
a @ a
torch.cuda.synchronize()
begun = time.monotonic()
for _ in range(200):
    a @ a
launched = time.monotonic()
torch.cuda.synchronize()
(launched - begun) / (time.monotonic() - begun)
"""


@step(
    "K16",
    "a rank that cannot start again fails the next cell, with the cause",
    limit_s=60,
    without_gpu="bed",
)
def broken_start(place: Place, find: Findings) -> None:
    flag, one = place.folder / "broken", place.ranks()
    with place.notebook(GPU_KIT_BROKEN=str(flag)) as book:
        for gap_s in (0.0, 2.0):
            with find.going_on(f"{gap_s:g} s later"):
                (pid,) = book.settled(one)
                flag.touch()
                os.kill(pid, signal.SIGKILL)
                until(lambda: not is_alive(pid), 5.0)  # noqa: B023 - called here
                time.sleep(gap_s)
                # At once, the cell may be given to the rank before its end is noticed.
                causes = ("off the bus",) if gap_s else ("off the bus", "killed by SIGKILL")
                _fails(book, one, find, f"{gap_s:g} s later", causes)
            flag.unlink(missing_ok=True)
            again = book.cell(f"%%distributed {one}\n1", 12.0)
            find.that("once the GPU is back, a cell runs", again.status == "ok", again.text[-300:])


def _fails(book: Book, options: str, find: Findings, when: str, causes: tuple[str, ...]) -> None:
    """A cell that finds no rank must fail soon, and say why."""
    book.start(f"%%distributed {options}\n1")
    try:
        outcome = book.finish(10.0)
    except AssertionError:
        find.that(f"{when} the cell ends", False, "it waits for ranks that never come")
        book.interrupt()
        outcome = book.finish(20.0)
    find.that(f"{when} the cell fails", outcome.status == "error", outcome.status)
    find.within(f"{when} it fails", outcome.wall_s, 6.0)
    find.that(f"{when} with the cause", any(each in outcome.text for each in causes), outcome.text[-400:])


@step(
    "K17",
    "a driver that does not tell the memory, or has lost a GPU, keeps no cell from running",
    limit_s=60,
    without_gpu="bed",
)
def reticent_driver(place: Place, find: Findings) -> None:
    for told, what in (("memory", "memory not supported"), ("lost", "one GPU lost")):
        with find.going_on(what):
            folder = place.folder / told
            more = {"JUPYTER_DISTRIB_RUNTIME_DIR": str(folder / "run"), "GPU_KIT_NVML": told}
            with place.notebook(all_gpus=True, **more) as book:
                for option in ("--ranks 2", "--gpus 1"):
                    outcome = book.cell(f"%%distributed {option}\nrank")
                    find.that(f"{what}: {option} runs", outcome.status == "ok", outcome.evalue or outcome.text[-200:])
                status = book.cell("%distributed_status")
                find.that(f"{what}: the status answers", status.status == "ok", status.evalue)
                find.within(f"{what}: the status", status.wall_s, 2.0)
