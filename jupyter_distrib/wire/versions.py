"""Checks whether torch is new enough, and whether kernel and ranks may exchange pickles: their Python, torch and
cloudpickle, compared before anything is unpickled. Pure functions, standard library only."""

from __future__ import annotations

import re
import sys

from jupyter_distrib.wire import messages as m

OLDEST_TORCH = "2.9"
"""The oldest version that works; pyproject.toml declares it. On gloo, FSDP of 2.8 adds gradients without dividing them
by the number of ranks."""
_SAME_PARTS = {"python": 2, "torch": 2, "cloudpickle": 1}
"""Number of version parts that must be equal: code objects change with Python's minor version, pickled tensors with
torch's, and functions pickled by value with cloudpickle's major version."""
_SHOWN = {"python": "Python", "torch": "torch", "cloudpickle": "cloudpickle"}


def too_old(torch: str) -> str:
    """Return a sentence if this version of torch is too old; empty if it is not, or there is none."""
    numbers = [int(each) for each in re.findall(r"\d+", torch)[:2]]
    if not numbers or numbers >= [int(each) for each in OLDEST_TORCH.split(".")]:
        return ""
    return (
        f"torch {_release(torch)} is too old for jupyter_distrib, which needs {OLDEST_TORCH} or newer: "
        f"`{sys.executable} -m pip install 'torch>={OLDEST_TORCH}'`, then restart the kernel."
    )


def refusal(kernel: m.Hello, agent: m.Welcomed, pool: str) -> str:
    """Return a sentence that names both sides; empty if they are compatible."""
    for name, parts in _SAME_PARTS.items():
        ours, theirs = getattr(kernel, name), getattr(agent, name)
        shown = _SHOWN[name]
        if ours and not theirs:
            return (
                f"the Python of the {pool} pool has no {shown}: install {shown} {_release(ours)} there, or give the "
                "pool another Python."
            )
        if ours and _parts(ours, parts) != _parts(theirs, parts):
            return (
                f"the notebook has {shown} {ours} and the {pool} pool has {shown} {theirs}, which cannot exchange "
                f"values: use {shown} {'.'.join(_parts(ours, parts))} in both."
            )
    return ""


def remark(kernel: m.Hello, agent: m.Welcomed) -> str:
    """Describe version differences that are mostly harmless; empty if there are none."""
    differing = [
        f"{_SHOWN[name]} {theirs} there, {ours} here"
        for name in _SAME_PARTS
        if (ours := getattr(kernel, name)) and (theirs := getattr(agent, name)) and _release(ours) != _release(theirs)
    ]
    return "; ".join(differing)


def _parts(version: str, count: int) -> list[str]:
    return _release(version).split(".")[:count]


def _release(version: str) -> str:
    """Return a version without the build: `2.13.0` for `2.13.0+cu130`."""
    return version.partition("+")[0]
