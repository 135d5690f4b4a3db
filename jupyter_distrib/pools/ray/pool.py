"""Ranks on the nodes of a Ray cluster. Kernel side: finds or starts the coordinator (`coordinator/`), which is the
cluster's client; the kernel itself never loads Ray."""

from __future__ import annotations

import importlib.util
import json

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.base import Lost, Sink
from jupyter_distrib.pools.local import Home, LocalNode, fingerprint
from jupyter_distrib.pools.ray.cluster import resolve
from jupyter_distrib.wire.link import Link, peer_uid
from jupyter_distrib.wire.messages import Hello

INSTALL = 'pip install "jupyter_distrib[ray]"'


class RayPool:
    """A Ray cluster; the options are those of `strategies.POOLS`."""

    kind = "ray"
    early = True

    def __init__(self, **options: str) -> None:
        self._options = options

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> LocalNode:
        if importlib.util.find_spec("ray") is None:
            raise PoolError(f"the ray pool needs Ray, which is not installed here: {INSTALL}.")
        address = resolve(self._options.get("address", "auto")).shown  # a coordinator is of one cluster
        options = json.dumps({**self._options, "address": address}, sort_keys=True)
        home = Home(name=f"ray-{fingerprint(options)}", module="jupyter_distrib.pools.ray", told=options)
        sock = home.reach()
        peer_uid(sock)
        node = LocalNode(Link(sock), sink, lambda reason: lost("the process that holds the Ray cluster has ended"))
        node.send(hello)
        return node
