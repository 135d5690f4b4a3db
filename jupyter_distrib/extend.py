"""What a pool or a strategy of another package imports from here; nothing else of this package is for other packages.

    Option and its readers          options that a pool or a strategy declares, and how their texts are read
    DistributedError, PoolError     what they raise for the user, in one sentence
    Pool, Node, Capabilities, Link  pools: docs/writing-a-pool.md, with `jupyter_distrib.testing`, the contract suite
    Strategy, TrainingStrategy ...  strategies: docs/strategies.md

Loads neither torch nor IPython.
"""

from __future__ import annotations

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.options import Option, at_least_zero, count, json_object, seconds, string, switch
from jupyter_distrib.pools.base import Capabilities, Lost, Node, Pool, Sink
from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import Command, Event, Hello
from jupyter_distrib.worker.strategy import Strategy, StrategyRun, Training, TrainingStrategy

__all__ = [
    "Capabilities",
    "Command",
    "DistributedError",
    "Event",
    "Hello",
    "Link",
    "Lost",
    "Node",
    "Option",
    "Pool",
    "PoolError",
    "Sink",
    "Strategy",
    "StrategyRun",
    "Training",
    "TrainingStrategy",
    "at_least_zero",
    "count",
    "json_object",
    "seconds",
    "string",
    "switch",
]
