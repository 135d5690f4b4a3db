"""Starts the agent of one node for a relay, in a folder that is removed with it. Runs in a process of the engine on
that node."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system.launch import exec_agent

SOCKET = "agent.sock"
SHARED = "shared"
"""File that marks the folder of an agent used by several worker groups."""
STARTING_S = 60.0
IDLE_S = 3.0
"""Seconds after which the agent ends once its host has gone."""
KEPT_S = 10.0
"""The same limit where the notebook's next worker group may reuse the agent: a busy engine needs seconds to start
that group's relay."""


class NodeAgent:
    """The agent of a notebook on one node, shared by its worker groups there if the engine allows it.

    Args:
        folder: Private to it; it removes the folder when it ends.
        address: The address by which the engine knows this node.
        python: The interpreter of the agent and its ranks; empty: this process's own.
        env: Variables of the agent and its ranks; `${NAME}` is the node's own.
        left_out: Prefixes of variables that the engine has set for its own process.
        idle_s: Seconds after which the agent ends without a worker group.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        python: str,
        env: Mapping[str, str],
        left_out: Sequence[str],
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        self._folder, self._address, self._idle_s = folder, address, idle_s
        self._python = os.path.expanduser(python) or sys.executable
        self._env, self._left_out = _expanded(env), tuple(left_out)

    def start(self) -> socket.socket:
        """Start the agent and return a connection to it. Raises `PoolError`.

        The agent leaves its parent, so that an engine which kills the children of its processes does not end it before
        it has ended its ranks.
        """
        if not os.access(self._python, os.X_OK) or os.path.isdir(self._python):
            raise PoolError(
                f"there is no interpreter at {self._python} on node {self._address}: give --python that of an "
                "environment with torch that all nodes have."
            )
        sweep(self._folder)
        path = str(self._folder / SOCKET)
        arguments = ("jupyter_distrib.agent", str(self._folder), "agent", "--alone")
        with (self._folder / "agent.log").open("wb") as log:
            try:
                parent = exec_agent(path, log, arguments, self._environment(), self._python)
            except OSError:  # a program for another machine, or not a program at all
                raise self.error() from None
        sock = socket.socket(socket.AF_UNIX)
        if parent.wait() or sock.connect_ex(path):
            sock.close()
            raise self.error()
        return sock

    def error(self) -> PoolError:
        """Return the error for an agent that did not start, with the last line that it wrote."""
        said = (self._folder / "agent.log").read_text("utf-8", "replace").split("\n")
        last = next((f": {line.strip()}" for line in reversed(said) if line.strip()), "")
        return PoolError(f"no agent can be started under {self._python} on node {self._address}{last}.")

    def _environment(self) -> dict[str, str]:
        """Return the node's own environment, without what the engine set for its own process."""
        source = str(Path(__file__).parent.parent.parent)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(self._left_out)}
        own = {**kept, **self._env}
        before = own.get("PYTHONPATH")
        return {
            **own,
            "PYTHONPATH": source if not before else f"{source}{os.pathsep}{before}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "JUPYTER_DISTRIB_RUNTIME_DIR": str(self._folder),
            "JUPYTER_DISTRIB_LOG_DIR": str(self._folder / "logs"),
            "JUPYTER_DISTRIB_IDLE_S": str(self._idle_s),
        }


def running_agent(folder: str) -> socket.socket | None:
    """Return a connection to the agent of this folder; None if it has ended or belongs to another user."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        (Path(folder) / SHARED).touch()  # first, since its present user might end it meanwhile, see `Relay.end`
        sock.connect(os.path.join(folder, SOCKET))
    except OSError:
        sock.close()
        return None
    return sock


def sweep(folder: Path) -> None:
    """Remove sibling folders whose agent was killed before it could remove them."""
    kind = folder.name.rpartition("-")[0]
    for other in folder.parent.glob(f"{kind}-*"):
        if other != folder and _is_own(other) and _is_deserted(other / SOCKET):
            shutil.rmtree(other, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Return whether this folder belongs to this user: others may have put anything beside it."""
    try:
        info = folder.lstat()
    except OSError:  # the folder has just been removed
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _is_deserted(path: Path) -> bool:
    """Return whether a socket exists, nobody listens at it, and the socket is not just being made."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # else it waits where too many others are waiting already
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return time.time() - path.stat().st_mtime > STARTING_S
        except FileNotFoundError:  # no socket yet, or a link to the socket of an agent that has removed its folder
            return path.is_symlink()
        except OSError:  # another user's socket
            return False
    return False


def _expanded(env: Mapping[str, str]) -> dict[str, str]:
    """Expand `${NAME}` in the values by this process's variables, one after another."""
    variables = dict(os.environ)
    for name, value in env.items():
        variables[name] = re.sub(r"\$\{(\w+)\}", lambda match: variables.get(match[1], ""), value)
    return {name: variables[name] for name in env}
