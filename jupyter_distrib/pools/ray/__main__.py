"""`python -m jupyter_distrib.pools.ray SOCKET_FD DIRECTORY NAME`: started by `pools/ray/pool.py`, which has bound the
socket. The pool's options are JSON on standard input: they may contain keys, and Ray shows command lines as entrypoints
of jobs."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from jupyter_distrib.coordinator.run import LOST_LOGS_S
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.ray import cluster
from jupyter_distrib.pools.ray.reservation import RayCluster
from jupyter_distrib.pools.ray.serve import TELL_S, Serving, prepare, serve
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.subprocess_future import subprocess_future


def main(arguments: Sequence[str], options: dict[str, str]) -> None:
    prepare()
    find = partial(cluster.find_cluster, options.get("address", "auto"), insecure="insecure" in options)
    looking = subprocess_future(find, int(arguments[0]))
    serve(arguments, options, partial(_make, looking))
    os._exit(0)  # Ray's own threads take seconds to end, and hold nothing of this package


def _make(looking: Future[cluster.Looked], serving: Serving) -> RayCluster:
    _join(looking, serving.coordinator, serving.calls, serving.joined)
    return RayCluster(serving.calls, serving.wanted, serving.joined, serving.archive)


def _join(
    looking: Future[cluster.Looked], coordinator: Coordinator, calls: CallSoon, joined: Future[cluster.Address]
) -> None:
    """Join the cluster in a thread, since Ray may take its time or hang. On failure, kernels that ask get the reason
    and the coordinator ends, so that the next cell tries anew. It also ends when Ray Client has lost its connection for
    good, since without it Ray ends the process."""

    def join() -> None:
        try:
            address = cluster.join(looking)
        except Exception as error:  # noqa: BLE001 - Ray's, or our own sentence
            # First, so that kernels that are refused ask another coordinator.
            calls.put(lambda: coordinator.give_up(TELL_S))
            joined.set_exception(error)
        else:
            coordinator.title = f"Ray at {address.shown}"
            joined.set_result(address)
            if address.client:
                cluster.wait_until_cut()
                said = f"the connection to the Ray cluster at {address.shown} is lost, and everything there with it."
                calls.put(lambda: coordinator.lose(said, LOST_LOGS_S + TELL_S))

    threading.Thread(target=join, name="jupyter_distrib-join", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:], json.load(sys.stdin))
