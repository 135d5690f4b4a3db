"""Steps for the test of the kit itself, which end in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

from benchmarks.gpu_kit.place import Place
from benchmarks.gpu_kit.step import Findings, Skipped, step


@step("raises", "raises behind a check that holds", limit_s=20, without_gpu="cpu")
def raises(place: Place, find: Findings) -> None:
    find.that("this holds", True, 1)
    raise ValueError("what it raised")


@step("hangs", "hangs behind a check, and so does what it has started", limit_s=2, without_gpu="cpu")
def hangs(place: Place, find: Findings) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    find.figure("child", child.pid)
    threading.Event().wait()


@step("dies", "is killed", limit_s=20, without_gpu="cpu")
def dies(place: Place, find: Findings) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@step("skips", "has nothing to say", limit_s=20, without_gpu="cpu")
def skips(place: Place, find: Findings) -> None:
    raise Skipped("there is no such thing here")


@step("needs", "needs a GPU", limit_s=20, without_gpu=None)
def needs(place: Place, find: Findings) -> None:
    find.that("it is there", True)


@step("goes on", "goes on behind a part that raises", limit_s=20, without_gpu="cpu")
def goes_on(place: Place, find: Findings) -> None:
    with find.going_on("first"):
        raise KeyError("part")
    find.that("second", True)
