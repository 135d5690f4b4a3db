"""The environment of a cell on a rank: the kernel's folder, variables and path, and the names provided for the cell.

Runs in the thread that executes cells: a rank's main thread, or the thread that uses an inline pool.
"""

from __future__ import annotations

import os
import sys
import time

import jupyter_distrib
from jupyter_distrib.interfaces import identity
from jupyter_distrib.system.process_environment import variables
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import shell
from jupyter_distrib.worker.output import displaying

_libraries = tuple(folder for folder in sys.path if folder)
"""The folders on `sys.path` when this process started."""
environment = dict(os.environ)
"""The environment when this process started."""
PROGRAM = "cell.py"
"""`sys.argv[0]` of a cell, unless the notebook has set arguments. Not empty: argument parsers show it, and
`HfArgumentParser` takes it apart as a path."""


def apply(setting: m.Setting, env: dict[str, str]) -> None:
    """Apply the kernel's folder, path, arguments and umask, and replace the environment by this one."""
    here = variables()
    if here != env:
        for name in here.keys() - env.keys():
            del os.environ[name]
        for name, value in env.items():
            if here.get(name) != value:
                os.environ[name] = value
        if here.get("TZ") != env.get("TZ"):
            time.tzset()
    if setting.umask is not None:
        os.umask(setting.umask)
    os.chdir(setting.directory or ".")
    overlay = filter(None, [identity.order().overlay])
    sys.path[:] = (*setting.path, *(_libraries if setting.own_libraries else ()), *overlay)
    sys.argv = list(setting.argv or [PROGRAM])  # a new list: the last cell may have left anything there


def names(command: m.Execute, namespace: dict[str, object]) -> dict[str, object]:
    """Return the predefined names of a cell, or of a script run as its own program, and set the script's arguments."""
    cell = command.cell
    if not cell.script:
        return {**provided(namespace), "__package__": command.setting.package or None}
    # On another node the folder is a copy, at another place.
    here = cell.script if os.path.exists(cell.script) else os.path.join(sys.path[0], os.path.basename(cell.script))
    sys.argv = [here, *cell.arguments]
    return {"__file__": os.path.abspath(here), "__spec__": None, "__package__": None, "__cached__": None}


def provided(namespace: dict[str, object]) -> dict[str, object]:
    """Return the names that every cell has unless the notebook defines them."""
    here, order = shell.RankShell(namespace), identity.order()
    return {
        "jupyter_distrib": jupyter_distrib,
        "rank": order.rank,
        "local_rank": order.local_rank,
        "world_size": order.world_size,
        "device": identity.device(),
        "get_ipython": lambda: here,
        "display": displaying.display,
    }
