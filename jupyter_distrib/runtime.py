"""The place of this process among the ranks of a run, for functions and modules that have no names of a cell.

Everything is read from the variables that torchrun sets as well, so the answers are right before any process group
exists, in processes that a rank has started, and under torchrun itself. Outside a run ranks are 0 and sizes 1.

Kernel and ranks; standard library only, no state.
"""

from __future__ import annotations

import os

__all__ = [
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_num_nodes",
    "get_world_size",
]


def get_global_rank() -> int:
    """Return the number of this rank among all ranks."""
    return _number("RANK", 0)


def get_local_rank() -> int:
    """Return the number of this rank among the ranks of its node."""
    return _number("LOCAL_RANK", 0)


def get_node_rank() -> int:
    """Return the number of this rank's node."""
    return _number("GROUP_RANK", 0)


def get_world_size() -> int:
    """Return the number of ranks."""
    return _number("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return _number("LOCAL_WORLD_SIZE", 1)


def get_num_nodes() -> int:
    """Return the number of nodes that have ranks."""
    return _number("GROUP_WORLD_SIZE", 1)


def _number(variable: str, outside: int) -> int:
    """Return a variable of torchrun. A variable without torchrun's run id beside it does not belong to a run."""
    return int(os.environ.get(variable, outside)) if "TORCHELASTIC_RUN_ID" in os.environ else outside
