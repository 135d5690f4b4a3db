"""The strategies and pools a cell can ask for, and the options that each declares itself. Kernel side: no torch here.

A strategy is one file in `strategies/`, or a class that another package declares by an entry point.
"""

from __future__ import annotations

from jupyter_distrib.options import Declared, Option, at_least_zero, count, json_object, seconds
from jupyter_distrib.worker import strategy

STRATEGIES: Declared = strategy.declared()
_PYTHON = Option(
    flag="--python",
    metavar="PATH",
    meaning="the interpreter of the ranks, with a torch of its own",
    default="the kernel's",
)
_RAY = (
    Option(
        flag="--address",
        metavar="WHERE",
        meaning="the cluster: auto, HOST:PORT or ray://HOST:10001",
        default="auto: the one that runs here",
    ),
    Option(
        flag="--nodes", metavar="N", meaning="spread the ranks over N nodes", read=count, default="as few as can be"
    ),
    Option(
        flag="--cpus-per-rank",
        metavar="N",
        meaning="CPUs that each rank takes, and threads that it uses then",
        read=at_least_zero,
        default="1",
    ),
    Option(flag="--insecure", meaning="use a cluster that asks for no token", default="refuse it"),
    Option(
        flag="--idle",
        metavar="S",
        meaning="give idle ranks that keep nothing back after S seconds",
        read=seconds,
        default="600",
    ),
    Option(
        flag="--copy-files",
        meaning="give the nodes copies of the notebook's files",
        default="where they do not share its folder",
    ),
    Option(flag="--runtime-env", metavar="JSON", meaning="Ray's runtime environment for the ranks", read=json_object),
    _PYTHON,
)
POOLS: Declared = {"local": (_PYTHON,), "inline": (), "ray": _RAY}
"""The kinds of pools, likewise."""
