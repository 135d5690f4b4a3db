"""What a pool's options hold, such as keys in a runtime environment, is for its ranks alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.ray.conftest import ENVIRONMENT, Cluster
from tests.settings_files import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOBS = """
import ray, sys
from ray._private import state
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(state.jobs(), state.actors(), state.state.placement_group_table())
"""


def where(canary: bytes, since_s: float, runtime: Path, cluster: Cluster) -> Iterator[str]:
    """Wherever it can be read by others."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if canary in path.read_bytes():
                yield str(path)
    folders = (runtime, *(path for path in Path("/tmp/ray").glob("session_*") if not path.is_symlink()))
    for path in (path for folder in folders for path in folder.rglob("*")):
        with suppress(OSError):
            if path.is_file() and path.stat().st_mtime >= since_s and canary in path.read_bytes():
                yield str(path)
    env = {**os.environ, **ENVIRONMENT}
    command = (sys.executable, "-c", JOBS, cluster.address)
    shown = subprocess.run(command, env=env, capture_output=True, check=True).stdout
    assert b"jupyter_distrib" in shown, "our own job is there"
    if canary in shown:
        yield "what Ray tells of jobs and actors"


def test_keys_are_seen_by_ranks_alone(cluster: Cluster, tmp_path: Path, runtime: Path) -> None:
    canary, since_s = f"canary-{uuid.uuid4().hex}", time.time()
    write_trusted(
        tmp_path,
        f'pool = "lab"\n[pools.lab]\nkind = "ray"\naddress = "{cluster.address}"\ninsecure = true\nranks = 1\n'
        f"""runtime_env = '{{"env_vars": {{"HF_TOKEN": "{canary}", "MORE": "${{HF_TOKEN}}-${{NOT_THERE}}"}}}}'\n""",
    )
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        outcome = book.cell(
            dedent("""\
                %%distributed
                import os
                (os.environ['HF_TOKEN'], os.environ['MORE'])"""),
            timeout_s=150,
        )
        assert outcome.result.startswith(f"rank 0: ('{canary}', '"), outcome.text
        assert list(where(canary.encode(), since_s, runtime, cluster)) == []
