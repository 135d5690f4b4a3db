"""The strategies and the kinds of pools that a cell can ask for, with the options that each declares. No torch.

A strategy is one file in `strategies/`, a pool one file or folder in `pools/`; or a class of another package, which
declares it by an entry point.
"""

from __future__ import annotations

from jupyter_distrib.interfaces import strategy
from jupyter_distrib.options import Declared
from jupyter_distrib.pools import base

STRATEGIES: Declared = strategy.declared()
POOLS: Declared = base.kinds()
strategy_environment = strategy.environment
strategy_ready = strategy.ready
StrategyStart = strategy.StrategyStart
