"""Passwords in addresses: wherever an address may come from, they are nowhere in what is shown or saved."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook, Outcome, ask

pytestmark = pytest.mark.slow  # kernels and agents

CANARY = "canary-4711-hunter2"
MLFLOW = """
import os
def get_tracking_uri(): return os.environ["MLFLOW_TRACKING_URI"]
def active_run(): return None
class MlflowClient:
    def __init__(self, *_): pass
    def search_experiments(self, **_):
        raise RuntimeError("cannot connect to " + get_tracking_uri() + " with the password canary-4711-hunter2/x")
"""
WANDB = """
import os
run = None
class Settings:
    def __init__(self, **_): self.base_url = os.environ["WANDB_BASE_URL"]
def init(**_): raise OSError("no answer from " + os.environ["WANDB_BASE_URL"] + " by " + os.environ["HTTPS_PROXY"])
"""
SETTINGS = f"""
[pools.cluster]
kind = "ray"
address = "ray://u:{CANARY}@127.0.0.1:1"
[pools.odd]
kind = "ray"
address = "http://u:{CANARY}@head"
[pools.connect]
kind = "spark"
master = "sc://host:15002/;token={CANARY}"
"""
CELLS = (
    "%%distributed --track mlflow --ranks 1\n1",
    "%%distributed --track wandb --ranks 1 --env DATABASE=postgresql://u:$PASSWORD@db/x\n1",
    "%%distributed --pool auto\n1",
    "%%distributed --pool cluster\n1",
    "%%distributed --pool odd\n1",
    "%%distributed --pool connect\n1",
    "%%distributed --explain --pool cluster\n1",
    "import os, jupyter_distrib\n@jupyter_distrib.distributed(ranks=1)\ndef train(url, more):\n    return 1",
    "train.submit(os.environ['MLFLOW_TRACKING_URI'], more={'proxy': os.environ['HTTPS_PROXY']}).result()",
    "%distributed_pool",
    "%distributed_status",
    "%distributed_status --json",
    "%distributed_runs",
    "%distributed_status --doctor",
)


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """Write stand-ins of libraries, settings and a git folder, and return variables with a password in each."""
    modules = tmp_path / "modules"
    for name, content in {"mlflow": MLFLOW, "wandb": WANDB, "ray": "", "pyspark": ""}.items():
        (modules / name).mkdir(parents=True)
        (modules / name / "__init__.py").write_text(content)
    (tmp_path / "settings.toml").write_text(SETTINGS + '[pools.auto]\nkind = "ray"\n')
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    subprocess.run(["git", "-C", work, "remote", "add", "origin", f"https://u:{CANARY}@git.example/x"], check=True)
    folders = {name: str(tmp_path / name) for name in ("JUPYTER_DISTRIB_LOG_DIR", "XDG_STATE_HOME")}
    for folder in folders.values():
        Path(folder).mkdir(mode=0o700)
    return {
        **folders,
        "PYTHONPATH": os.pathsep.join((str(modules), os.getcwd(), os.environ.get("PYTHONPATH", ""))),
        "JUPYTER_DISTRIB_CONFIG": str(tmp_path / "settings.toml"),
        "JUPYTER_DISTRIB_OTHER": f"http://u:{CANARY}@proxy:1",
        "MLFLOW_TRACKING_URI": f"postgresql://u:{CANARY}%2Fx@db/mlflow",
        "WANDB_BASE_URL": f"https://u:{CANARY}@wandb.example",
        "RAY_ADDRESS": f"u:{CANARY}@head",
        "PIP_INDEX_URL": f"https://u:{CANARY}@index/simple",
        "HTTP_PROXY": f"http://u:{CANARY}@proxy:1",
        "HTTPS_PROXY": f"http://u:{CANARY}@proxy:1",
        "NO_PROXY": "127.0.0.1",
    }


def leaks(outcome: Outcome) -> Iterator[str]:
    """Yield what shows the password of what a cell left."""
    for name, content in vars(outcome).items():
        if CANARY in str(content):
            yield f"{name}: {content}"


def test_a_password_in_an_address_is_neither_shown_nor_saved(
    tmp_path: Path, surroundings: dict[str, str], runtime: Path
) -> None:
    shown = ""
    with Notebook(tmp_path / "work", env=surroundings) as book:
        book.ok("%load_ext jupyter_distrib")
        for code in CELLS:
            outcome = book.cell(code)
            assert list(leaks(outcome)) == [], code
            shown += outcome.text
        for op in ("overview", "history"):
            assert CANARY not in str(ask(book, op=op))
    for word in (
        "MLflow: nothing is recorded",
        "wandb.example",
        "head",
        "127.0.0.1:1",
        "sc://host:15002",
        "proxy:1",
        "train(",
    ):
        assert word in shown, "it was tried"
    files = [path for folder in (tmp_path, runtime) for path in folder.rglob("*") if path.is_file()]
    written = [path for path in files if path.suffix not in (".py", ".pyc", ".toml") and ".git" not in path.parts]
    assert [str(path) for path in written if CANARY.encode() in path.read_bytes()] == []
    assert any("history" in str(path) for path in written)
