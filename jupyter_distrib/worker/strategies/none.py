"""`--strategy none`: torchrun's contract. The environment says who the rank is; the cell makes its own process group,
or none."""

from __future__ import annotations

from typing import Any

from jupyter_distrib.errors import DistributedError


def begin() -> None:
    """Nothing to do before the cell."""


def prepare(*_: object) -> Any:
    raise DistributedError(
        "jupyter_distrib.prepare() needs a strategy to prepare for: add --strategy ddp to the first line of this cell."
    )
