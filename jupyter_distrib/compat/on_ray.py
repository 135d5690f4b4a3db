"""The function that `ray_launch` runs on each rank: the first rank of a node starts a member of a Ray cluster, the very
first runs the user's function, and all wait for its end. Ray's processes end with it, and with their rank however that
ends, since their environment marks them as its children. Loads nothing of the kernel's side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jupyter_distrib.system import network_interfaces, scratch

START_S = 120.0
ASKED_S = 0.5
"""Seconds for a member of the cluster to end by itself."""
END_S = 15.0
LOG_LINES = 20
_DONE = "jupyter_distrib/ray_launch/done"
_LOOK_S = 0.2


def member(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], token: str) -> Any:
    """Run the function on the head of a cluster of these ranks; called on each of them.

    Args:
        function: The user's function.
        args: Its positional arguments.
        keywords: Its arguments by name.
        token: The secret of the cluster, from the kernel: it does not pass between ranks, where others may listen.
    """
    from torch import distributed

    from jupyter_distrib.worker.pytorch.private import default_store

    distributed.init_process_group("gloo")
    try:
        where, everyone = _exchanged()
        os.environ.update(_environment(where, token))
        members = len({each["node"] for each in everyone})
        with _node(where, everyone) if os.environ["LOCAL_RANK"] == "0" else _nothing():
            value = None
            if os.environ["RANK"] == "0":
                value = _driven(function, args, keywords, members)
                default_store().set(_DONE, b"")
            # Not only in a collective, which would be reported as hanging for as long as the function takes.
            while not default_store().check([_DONE]):
                time.sleep(_LOOK_S)
            distributed.barrier()  # the head stays until all members have come up
        return value
    finally:
        with suppress(Exception):  # other ranks have gone
            distributed.destroy_process_group()


def _exchanged() -> tuple[str, list[dict[str, str]]]:
    """Return the cluster's address, and each rank's report on its node. Nothing in these texts is secret, and
    nothing else is trusted."""
    from jupyter_distrib.worker.autoparallel import object_collectives

    address = _address()
    own = {
        "node": os.environ["GROUP_RANK"],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "address": address,
        "cluster": network_interfaces.with_port(address, _free_port(address)) if os.environ["RANK"] == "0" else "",
    }
    everyone = [{key: str(each[key]) for key in own} for each in object_collectives.gather(own)]
    return everyone[0]["cluster"], everyone


def _environment(where: str, token: str) -> dict[str, str]:
    """Return the variables by which Ray's processes, and the function, find the cluster."""
    return {
        "RAY_ADDRESS": where,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # Ray's own limit is too short for a loaded machine, and `_wait_until_up` has one.
        "RAY_raylet_start_wait_time_s": f"{START_S:.0f}",
        "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
    }


def _address() -> str:
    """Return the address of this node by which the other nodes reach it."""
    address = network_interfaces.source(os.environ["MASTER_ADDR"])
    if address == "127.0.0.1" and sys.platform == "linux":
        # Nodes of a test may share a machine: each has an address there.
        return f"127.0.0.{2 + int(os.environ['GROUP_RANK'])}"
    return address


def _free_port(address: str) -> int:
    with network_interfaces.listen(address) as reserved:
        port: int = reserved.getsockname()[1]
    return port


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _node(where: str, everyone: Sequence[Mapping[str, str]]) -> Iterator[None]:
    """Run a member of the cluster on this node for the duration of the block."""
    mine = [each for each in everyone if each["node"] == os.environ["GROUP_RANK"]]
    gpus = [gpu for each in mine for gpu in each["gpus"].split(",") if gpu]
    address = next(each["address"] for each in mine)
    short = scratch.SHORT if os.access(scratch.SHORT, os.W_OK) else None
    with scratch.folder(short) as folder, _member(where, address, gpus, str(folder)):
        yield


@contextmanager
def _member(where: str, address: str, gpus: Sequence[str], folder: str) -> Iterator[None]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    log = Path(folder) / "start.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            _command(where, address, gpus, folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait_until_up(process, address, where, log)
        yield
    finally:
        _end(process)


def _command(where: str, address: str, gpus: Sequence[str], folder: str) -> list[str]:
    common = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}",
        f"--num-cpus={_cpus()}", f"--num-gpus={len(gpus)}", f"--metrics-export-port={_free_port(address)}",
    ]  # fmt: skip
    if os.environ["RANK"] != "0":
        return [*common, f"--address={where}", f"--temp-dir={folder}"]
    port, client = where.rpartition(":")[2], _free_port(address)
    return [
        *common, "--head", f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false",
        f"--temp-dir={folder}",
    ]  # fmt: skip


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait_until_up(process: subprocess.Popen[bytes], address: str, where: str, log: Path) -> None:
    """Wait until `ray start` says that the member is up. Raises `RuntimeError` with the end of its log."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        if "Ray runtime started" in log.read_text("utf-8", "replace"):
            return
        time.sleep(0.1)
    reason = f"took longer than {START_S:g} s" if process.poll() is None else f"ended with {process.returncode}"
    said = log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
    raise RuntimeError("\n".join([f"Ray did not start on node {address} for {where}: it {reason}. Its output:", *said]))


def _driven(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], members: int) -> Any:
    """Run the function, connected to the cluster, once all members have joined; it may connect itself as well."""
    import ray

    connect = ray.init
    connect(address=os.environ["RAY_ADDRESS"], logging_level="ERROR")
    try:
        until_s = time.monotonic() + START_S
        while len(found := [node for node in ray.nodes() if node["Alive"]]) < members:
            if time.monotonic() > until_s:
                raise RuntimeError(f"{len(found)} of {members} nodes have joined Ray within {START_S:g} s.")
            time.sleep(0.1)

        def init(*args: Any, **options: Any) -> Any:
            """Connect with the function's own options; Ray refuses a second connection."""
            ray.init = connect
            ray.shutdown()
            return connect(*args, **options)

        ray.init = init
        return function(*args, **keywords)
    finally:
        ray.init = connect
        ray.shutdown()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a member. `ray start --block` would end what it has started, one after another, in some fifteen seconds, and
    nobody needs the cluster any more. A killed member takes its children with it."""
    for number, wait_s in ((signal.SIGTERM, ASKED_S), (signal.SIGKILL, END_S)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
