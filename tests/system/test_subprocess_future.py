"""What is done in a process of its own while this one imports Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("make", ["make", "lambda: os._exit(3) if os.getpid() != here else make()"])
def test_what_is_made_in_another_process_is_made_here_if_that_dies(make: str) -> None:
    code = (
        "import os\nfrom jupyter_distrib.system.subprocess_future import subprocess_future\n"
        "here, make = os.getpid(), lambda: (os.getpid(), bytes(100_000))\nreading, writing = os.pipe()\n"
        f"made = subprocess_future({make}, writing)\nos.close(writing)\nassert os.read(reading, 1) == b'', 'closed there, too'\n"
        "pid, content = made.result(60)\nassert len(content) == 100_000\nprint(pid == here)\n"
        "try:\n    os.wait()\nexcept ChildProcessError:\n    print('no zombie')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(make != "make"), "no zombie"]


def test_what_another_process_raises_is_raised_here() -> None:
    code = (
        "from jupyter_distrib.pools.ray import cluster\nfrom jupyter_distrib.system.subprocess_future import subprocess_future\n"
        "try:\n    subprocess_future(lambda: cluster.look('nonsense', insecure=True)).result(60)\n"
        "except cluster.PoolError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "address = 'nonsense' is not an address of a Ray cluster" in done.stdout
