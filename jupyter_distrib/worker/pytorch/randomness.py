"""The seeds of a rank's random numbers.

Every rank begins with its own seed, as separate programs do. Ranks that train together begin with the seed of rank 0,
on the CPU, so that the CPU random numbers of an unchanged cell (a random split, say) are the same on all of them; only
once, and a seed of the user stays.
"""

from __future__ import annotations

import random
import sys

import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.pytorch import process_group

_mine: int | None = None
"""The seed that this module gave to torch; None as soon as the ranks have begun alike."""


def begin() -> None:
    """Draw new seeds when a process becomes a rank: a fork has the state of its parent."""
    global _mine
    _mine = torch.default_generator.seed()
    _seed_others(None)


def begin_alike() -> None:
    """Begin with the seed of rank 0. Called before each run in which the ranks train together, on all of them."""
    global _mine
    board = process_group.current.board()
    if board is None or identity.world_size() == 1:
        return
    if identity.rank() == 0:
        board.put("seed", str(torch.initial_seed()))
    if _mine is None or torch.initial_seed() != _mine:
        return
    seed = _mine if identity.rank() == 0 else int(board.get("seed"))
    torch.default_generator.manual_seed(seed)
    _seed_others(seed % 2**32)
    _mine = None


def _seed_others(seed: int | None) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
