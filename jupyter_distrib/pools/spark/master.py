"""Reads the address of a Spark master: whether Ray on Spark runs there, and how many executors it has. Pure; kernel and
application."""

from __future__ import annotations

import os
import re

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:, *\d+)?\])?")
_KINDS = "a standalone master (spark://HOST:7077), or local-cluster[N, CORES, MB]"


def refusal(master: str) -> str:
    """Return a sentence on why this master cannot provide ranks, and what to do instead; empty if it can, or if no
    master is given."""
    if not master:
        return ""
    if master.startswith("sc://"):
        return (
            f"master = {master!r} is Spark Connect, whose client cannot start Ray in the cluster: give {_KINDS}, or "
            'start Ray on Spark in the driver there and use its address with kind = "ray".'
        )
    if master == "yarn" or master.startswith("yarn-"):
        return (
            f"master = {master!r} is YARN, where Ray on Spark is not supported here: give {_KINDS}, or start Ray in "
            'YARN and use its address with kind = "ray".'
        )
    if master.startswith(("k8s://", "mesos://")):
        return (
            f"master = {master!r} is not a cluster in which Ray on Spark runs: start Ray there with KubeRay and use "
            "its "
            'address with kind = "ray".'
        )
    if not master.startswith(("spark://", "local-cluster[")) and not _LOCAL.fullmatch(master):
        return f"master = {master!r} is not a Spark master for Ray on Spark: give {_KINDS}."
    return ""


def local_cores(master: str) -> int:
    """Return the cores of `local[N]`, where driver and executor are one process; 0 for any other master."""
    match = _LOCAL.fullmatch(master)
    if match is None:
        return 0
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or "1")


def executors(master: str) -> int:
    """Return the number of executors of `local-cluster[N, CORES, MB]`; 0 for masters that provide as many as they
    have."""
    match = re.match(r"local-cluster\[ *(\d+)", master)
    return int(match[1]) if match else 0
