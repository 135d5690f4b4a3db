"""Ranks in an allocation of Slurm: the one that the notebook is in, or one of their own."""

import shutil
from collections.abc import Mapping


def usable(options: Mapping[str, str]) -> bool:
    """Return whether a pool with these options can be reached at all."""
    return shutil.which("srun") is not None
