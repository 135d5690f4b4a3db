"""What somebody waits for who clicks in JupyterLab. Needs the environment of the browser tests."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator

from driver import ROOT
from plan import Plan
from report import Figure, spread

PYTHON = ROOT / ".venv-browser" / "bin" / "python"


def stop(plan: Plan) -> Iterator[Figure]:
    """From a click on Stop until the last rank has left its collective or loop, with each ipykernel."""
    if not PYTHON.exists():
        yield Figure(what="Stop in JupyterLab", measured="not measured: `sh .ci/browser` makes the environment")
        return
    repetitions = len(plan.times(20, 3))
    command = [str(PYTHON), str(ROOT / "benchmarks" / "clicks.py"), str(repetitions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for found in json.loads(done.stdout.splitlines()[-1]):
        yield Figure(
            what=f"Stop in JupyterLab, ipykernel {found['ipykernel']}: from the click until the last rank has reacted",
            measured=spread(found["times_s"]),
            target="median <= 0.3 s",
            ok=statistics.median(found["times_s"]) <= 0.3,
            numbers=found,
        )
