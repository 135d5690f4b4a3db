"""The strategies a cell can ask for, and the options that each declares itself. Kernel side: no torch here.

What a strategy does is in `worker/strategies/`, one file each under the same name.
"""

from __future__ import annotations

from jupyter_distrib.arguments import Declared

STRATEGIES: Declared = {"none": (), "ddp": ()}
POOLS: Declared = {"local": (), "inline": ()}
