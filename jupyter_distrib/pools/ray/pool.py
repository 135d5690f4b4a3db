"""Ranks on the nodes of a Ray cluster. Kernel side: finds or starts the coordinator (`coordinator/`), which is the
cluster's client; the kernel itself never loads Ray."""

from __future__ import annotations

import importlib.util
import json
from typing import ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option, at_least_zero, json_object, not_an_option
from jupyter_distrib.pools.base import IDLE, NODES, PACKAGES, PYTHON, Capabilities, Lost, Sink
from jupyter_distrib.pools.server_home import Home, fingerprint
from jupyter_distrib.pools.server_link import LocalNode, greeted
from jupyter_distrib.wire import messages as m

INSTALL = 'pip install "jupyter_distrib[ray]"'


class RayPool:
    """The pool of a Ray cluster."""

    kind = "ray"
    options: ClassVar = (
        Option(
            flag="--address",
            metavar="WHERE",
            meaning="the cluster: auto, HOST:PORT or ray://HOST:10001",
            read=not_an_option,
            default="auto: the cluster that runs here",
            main=True,
        ),
        NODES,
        Option(
            flag="--cpus-per-rank",
            metavar="N",
            meaning="CPUs reserved for each rank, which then uses as many threads",
            read=at_least_zero,
            default="1",
        ),
        Option(flag="--insecure", meaning="use a cluster that requires no token", default="refuse it", main=True),
        IDLE,
        Option(
            flag="--copy-files",
            meaning="give the nodes copies of the notebook's files",
            default="where they do not share its folder",
        ),
        Option(
            flag="--runtime-env", metavar="JSON", meaning="Ray's runtime environment for the ranks", read=json_object
        ),
        PYTHON,
        *PACKAGES,
    )
    capabilities: ClassVar = Capabilities(streams_content=True, read_variables={"address": "RAY_ADDRESS"})

    def __init__(self, **options: str) -> None:
        self._options = options

    def try_out(self) -> str:
        """Return a sentence on the cluster. Raises `PoolError` if it cannot be used. Sends no user data."""
        _check_installed()
        from jupyter_distrib.pools.ray.cluster import find_cluster

        found, mode = find_cluster(self._options.get("address", "auto"), insecure="insecure" in self._options)
        return f"The Ray cluster at {found.shown} answers, and " + (
            "takes your token." if mode == "token" else "asks for no token."
        )

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        _check_installed()
        from jupyter_distrib.pools.ray.cluster import resolve

        address = resolve(self._options.get("address", "auto")).shown  # a coordinator belongs to one cluster
        options = json.dumps({**self._options, "address": address}, sort_keys=True)
        home = Home(name=f"ray-{fingerprint(options)}", module="jupyter_distrib.pools.ray", stdin_text=options)
        return greeted(home.reach(), hello, sink, lambda _: lost("the process that holds the Ray cluster has ended"))


def _check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise PoolError(f"the ray pool needs Ray, which is not installed here: {INSTALL}.")
