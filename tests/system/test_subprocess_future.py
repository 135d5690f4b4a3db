"""What is done in a process of its own while this one imports Ray."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest


@pytest.mark.parametrize("make", ["make", "lambda: os._exit(3) if os.getpid() != here else make()"])
def test_what_is_made_in_another_process_is_made_here_if_that_dies(make: str) -> None:
    code = dedent(f"""\
        import os
        from jupyter_distrib.system.subprocess_future import subprocess_future
        here, make = os.getpid(), lambda: (os.getpid(), bytes(100_000))
        reading, writing = os.pipe()
        made = subprocess_future({make}, writing)
        os.close(writing)
        assert os.read(reading, 1) == b'', 'closed there, too'
        pid, content = made.result(60)
        assert len(content) == 100_000
        print(pid == here)
        try:
            os.wait()
        except ChildProcessError:
            print('no zombie')""")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(make != "make"), "no zombie"]


def test_what_another_process_raises_is_raised_here() -> None:
    code = dedent("""\
        from jupyter_distrib.pools.ray import cluster
        from jupyter_distrib.system.subprocess_future import subprocess_future
        try:
            subprocess_future(lambda: cluster.find_cluster('nonsense', insecure=True)).result(60)
        except cluster.PoolError as error:
            print(error)""")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'nonsense' is not an address" in done.stdout
