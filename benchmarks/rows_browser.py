"""What somebody sees who clicks and looks in a browser. Needs the environment of the browser tests."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

from driver import ROOT
from plan import Plan
from report import Figure, spread

PYTHON = ROOT / ".venv-browser" / "bin" / "python"
NOT_MEASURED = "not measured: `sh .ci/browser` makes the environment"


def stop(plan: Plan) -> Iterator[Figure]:
    """From a click on Stop until the last rank has left its collective or loop, with each ipykernel."""
    if not PYTHON.exists():
        yield Figure(what="Stop in JupyterLab", measured=NOT_MEASURED)
        return
    for found in _told_by("clicks.py", len(plan.times(20, 3))):
        yield Figure(
            what=f"Stop in JupyterLab, ipykernel {found['ipykernel']}: from the click until the last rank has reacted",
            measured=spread(found["times_s"]),
            target="median <= 0.3 s",
            ok=statistics.median(found["times_s"]) <= 0.3,
            numbers=found,
        )


def frames(plan: Plan) -> Iterator[Figure]:
    """Whether the live view of many ranks stays smooth: how long each frame takes, of 16.7 ms."""
    what = "live view of 64 ranks that all move, 10 updates a second, painted without a GPU"
    if not PYTHON.exists():
        yield Figure(what=what, measured=NOT_MEASURED)
        return
    frames_ms = _told_by("frames.py", 3 if plan.quick else 20)["frames_ms"]
    rate = 1000 * len(frames_ms) / sum(frames_ms)
    yield Figure(
        what=what,
        measured=f"{rate:.0f} frames/s (the longest {max(frames_ms):.0f} ms)",
        target=">= 58 of 60 frames/s",
        ok=rate >= 58,
        numbers={"frames_ms": frames_ms},
    )


def _told_by(program: str, argument: int) -> Any:
    """The last line that one of the programs beside this file prints, which is JSON."""
    command = [str(PYTHON), str(ROOT / "benchmarks" / program), str(argument)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
