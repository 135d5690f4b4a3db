"""The strategy `tensorflow`: the ranks are the workers of one `MultiWorkerMirroredStrategy`, and the cell runs in its
scope.

Ranks are separate programs without torch. They agree on addresses, which `TF_CONFIG` holds for the life of their
processes, like TensorFlow itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces.strategy import Strategy, StrategyRun
from jupyter_distrib.options import Option, switch
from jupyter_distrib.system import network_interfaces
from jupyter_distrib.worker.tensorflow import NAME

OWN_SCOPE = Option(
    flag="--own-scope",
    meaning="set TF_CONFIG only: the cell makes a strategy of `tf.distribute` and enters its scope itself",
    read=switch,
)
_held: list[socket.socket] = []
"""The socket that reserves this rank's port until TensorFlow listens on it."""


class TensorFlowStrategy(Strategy):
    """Replicas on every rank, gradients summed by TensorFlow."""

    options: ClassVar[tuple[Option, ...]] = (OWN_SCOPE,)
    framework = NAME
    summary = "replicated on every rank, in the scope of MultiWorkerMirroredStrategy"

    def __init__(self) -> None:
        self._open = ExitStack()

    @classmethod
    def environment(cls, options: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables that TensorFlow reads at import, which select Keras 2: Keras 3 cannot `fit` on several
        workers."""
        return {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}

    def begin(self, run: StrategyRun) -> None:
        from jupyter_distrib.interfaces import framework, identity

        if not run.everyone:
            raise DistributedError(
                "--strategy tensorflow trains on all ranks, and --on runs the cell on some of them: leave --on out."
            )
        groups: Any = framework.current.groups if framework.current else None
        if not groups.config:
            groups.config = config_of(run.exchange(_own_port()), identity.rank())
        os.environ["TF_CONFIG"] = groups.config
        if "own_scope" in run.options:
            return
        strategy = _strategy()
        run.names.setdefault("strategy", strategy)
        self._open.enter_context(strategy.scope())

    def end(self, *, ok: bool) -> None:
        self._open.close()


def config_of(addresses: tuple[str, ...], rank: int) -> str:
    """Return the value of `TF_CONFIG` for a rank of a cluster with these workers."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def _own_port() -> str:
    """Return an address for this rank, and reserve its port, on which only a server that reuses addresses, such as
    TensorFlow's, can listen then."""
    host = network_interfaces.source(os.environ["MASTER_ADDR"])
    held = socket.socket(network_interfaces.family(host))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    _held.append(held)
    return network_interfaces.with_port(host, held.getsockname()[1])


def _strategy() -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise DistributedError(
            "--strategy tensorflow needs TensorFlow for its ranks, which is not installed: "
            "pip install 'jupyter_distrib[tensorflow]' there, or give --own-scope to a cell that needs none."
        ) from error
    return tf.distribute.MultiWorkerMirroredStrategy()
