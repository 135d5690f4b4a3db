"""Starts the relay of a node in the actor that Ray has started there, see `cluster.actor_class`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from jupyter_distrib.coordinator.relay import Relay

_OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Prefixes of variables that Ray sets for its own processes."""


def start(folder: str, label: str, session: str, *, left_out: Sequence[str], **more: Any) -> Relay:
    """Start the relay; remove its folder if that fails.

    Args:
        folder: Private to it.
        label: The label of the notebook.
        session: Its session.
        left_out: Prefixes of further variables that ranks do not get.
        more: Other arguments of `Relay`.
    """
    import ray

    try:
        # With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES Ray sets no variable.
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU") or None
        address = ray.util.get_node_ip_address()
        return Relay(folder, label, session, address=address, left_out=(*_OF_RAY, *left_out), gpus=gpus, **more)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
