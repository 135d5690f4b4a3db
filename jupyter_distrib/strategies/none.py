"""The strategy `none`: torchrun's contract. The environment identifies the rank; the cell makes its own process group,
or none."""

from __future__ import annotations

from jupyter_distrib.interfaces.strategy import Strategy


class NoStrategy(Strategy):
    """A strategy that changes nothing."""

    framework = ""
