"""The example notebooks with their outputs, for the site. Standard library only.

Each is run in a real kernel, in a folder of its own, and kept in `artifacts/executed/` until the notebook or the views
change. Some need a framework: they run if the environment of its job is there (`.ci/frameworks` makes it),
else the site shows them without outputs, and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOP = Path(__file__).parent.parent
KEPT = TOP / "artifacts" / "executed"
TIMEOUT_S = 600
AT_ONCE = 2
ENVIRONMENTS = {
    ".venv-frameworks": ("accelerate", "lightning", "transformers_trainer", "trl_sft"),
    ".venv-deepspeed": ("deepspeed",),
    ".venv-tensorflow": ("tensorflow",),
    "": ("ray_pool", "ray_train"),
}
"""The environments of notebooks that need more than the site; the last need a cluster, and are not run."""
TURN = "NOTEBOOKS_TURN"
"""The variable with a number by which a third of the notebooks is run (`.ci/run`); without it all are."""
NOT_RUN = "*This page has no outputs: the notebook was not run when the site was built.*"


def interpreter(name: str) -> str | None:
    """Return the Python that can run this notebook, or None if it is not here."""
    folder = next((folder for folder, names in ENVIRONMENTS.items() if name in names), None)
    if folder is None:
        return sys.executable
    python = TOP / folder / "bin" / "python"
    return str(python) if folder and python.is_file() else None


def digest(notebook: Path) -> str:
    """Return what changes with the notebook, and with how a run is shown."""
    summed = hashlib.sha256()
    views = sorted((TOP / "jupyter_distrib" / "kernel" / "views").glob("*.py"))
    for path in (notebook, TOP / "example_notebooks" / "run.py", *views):
        summed.update(path.read_bytes())
    return summed.hexdigest()[:16]


def with_outputs(notebook: Path, python: str, kept: Path = KEPT) -> Path:
    """Return the path of the executed copy, which is made if it is not there.

    Raises:
        RuntimeError: A cell failed; it has the output of the run.
    """
    copy = kept / f"{notebook.stem}-{digest(notebook)}.ipynb"
    if copy.is_file():
        return copy
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "work")
        folder.mkdir()
        source = folder / notebook.name
        shutil.copyfile(notebook, source)
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "JUPYTER_DISTRIB_IDLE_S": "1",
            "JUPYTER_DISTRIB_RUNTIME_DIR": f"{scratch}/run",
            "PYTHONPATH": str(TOP),
            "XDG_STATE_HOME": f"{scratch}/state",
        }
        command = [python, str(TOP / "example_notebooks" / "run.py"), str(source), f"{scratch}/done.ipynb"]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{notebook.name} fails:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        for old in kept.glob(f"{notebook.stem}-*.ipynb"):
            old.unlink()
        shutil.move(f"{scratch}/done.ipynb", copy)
    return copy


def write_copies(notebooks: Sequence[Path], to: Path) -> None:
    """Write each notebook to the folder, with its outputs if it can be run here and is in turn."""
    turn = os.environ.get(TURN)
    in_turn = notebooks[int(turn) % 3 :: 3] if turn else notebooks

    def write(notebook: Path) -> None:
        python = interpreter(notebook.stem) if notebook in in_turn else None
        try:
            if python:
                shutil.copyfile(with_outputs(notebook, python), to / notebook.name)
                return
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            if python == sys.executable:
                raise
            print(f"{notebook.name} is shown without outputs: {error}", file=sys.stderr)  # its own job tests it
        document = json.loads(notebook.read_text("utf-8"))
        first = document["cells"][0]
        first["source"] = ["".join(first["source"]), f"\n\n{NOT_RUN}"]
        (to / notebook.name).write_text(json.dumps(document), "utf-8")

    to.mkdir(exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(write, notebooks))
