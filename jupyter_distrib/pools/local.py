"""Ranks on this machine: an agent that the user's kernels share."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option
from jupyter_distrib.pools.base import IDLE, PACKAGES, PYTHON, Capabilities, Lost, Sink
from jupyter_distrib.pools.server_home import Home, connected
from jupyter_distrib.pools.server_link import LocalNode, greeted
from jupyter_distrib.system import paths
from jupyter_distrib.wire import messages as m

DEFAULT_IDLE_S = 1800.0
ANSWER_S = 30.0
"""Seconds to wait for an interpreter to report its versions."""


class LocalPool:
    """The pool of this machine.

    Args:
        python: The interpreter that agent and ranks run under; empty: the kernel's own.
        idle: Seconds after which idle ranks that keep nothing give their GPUs back; empty: half an hour.
    """

    kind = "local"
    options: ClassVar = (PYTHON, IDLE, *PACKAGES)
    capabilities: ClassVar = Capabilities(remote=False, unasked=True)

    def __init__(self, python: str = "", idle: str = "") -> None:
        self._python, self._idle_s = python, float(idle or DEFAULT_IDLE_S)

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        if sys.platform == "win32":
            raise PoolError("jupyter_distrib does not run on Windows itself; run JupyterLab inside WSL.")
        home = Home.of(self._python)
        hello = replace(hello, idle_s=self._idle_s)
        return greeted(home.reach(), hello, sink, lambda reason: lost(home.explained(reason)))

    def try_out(self) -> str:
        """Return a sentence on the interpreter. Raises `PoolError` if it does not run, or has no torch."""
        from jupyter_distrib.pools.trial import VERSIONS, versions

        python = Home.of(self._python).python or sys.executable
        try:
            done = subprocess.run([python, "-"], input=VERSIONS, capture_output=True, timeout=ANSWER_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PoolError(f"{python} does not run here: {error}.") from None
        if (found := versions(done.stdout)) is None:
            raise PoolError(f"{python} is not a Python interpreter: set python to one that has torch.")
        if not found[1]:
            raise PoolError(f"{python} has no torch: install torch there, or set python to another interpreter.")
        return f"This machine has Python {found[0]} with torch {found[1]} at {python}."


class RunningServer:
    """A running agent or coordinator, whatever started it.

    Args:
        name: The name of its socket.
    """

    kind = ""
    options: ClassVar[tuple[Option, ...]] = ()
    capabilities: ClassVar = Capabilities()

    def __init__(self, name: str) -> None:
        self._name = name

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        if (sock := connected(paths.runtime_directory() / f"{self._name}.sock")) is None:
            raise PoolError(
                "the process that holds the detached run accepts no connection, so the run cannot be shown here."
            )
        return greeted(sock, hello, sink, lost)
