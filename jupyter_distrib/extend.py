"""The names for pools, strategies and observers of other packages, which should use nothing else of this package.

    Option and its readers          the options that a pool or a strategy declares, and the readers of their texts
    DistributedError, PoolError     the errors that they raise for the user, in one sentence
    HostsPool                       pools of hosts that a command reaches: docs/writing-a-pool.md
    Pool, Node, Link, Descriptors   all other pools, with `jupyter_distrib.testing`, the contract suite
    Strategy, TrainingStrategy ...  strategies: docs/strategies.md
    Observer, ObservedRun           observers: docs/writing-an-observer.md
    RunRecord, RankRecord           the record of a run, and of one of its ranks
    Started, Wrote ... Ended        the events of a run; `RunEvent` is any of them

Loads neither torch nor IPython.
"""

from __future__ import annotations

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.interfaces.strategy import Strategy, StrategyRun, StrategyStart, Training, TrainingStrategy
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.options import Option, at_least_zero, count, json_object, seconds, string, switch
from jupyter_distrib.pools.base import Capabilities, Lost, Node, Pool, Sink
from jupyter_distrib.pools.command.hosts_pool import HostsPool
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import (
    Cleared,
    Command,
    Displayed,
    Ended,
    Event,
    Exited,
    Failed,
    Failure,
    Frame,
    Hello,
    Interrupted,
    Measured,
    Moved,
    Noted,
    Progressed,
    RanksReduced,
    Restarted,
    Returned,
    RunEvent,
    Sampled,
    Stalled,
    Started,
    TimedOut,
    Wrote,
)

__all__ = [
    "Capabilities",
    "Cleared",
    "Command",
    "Descriptors",
    "Displayed",
    "DistributedError",
    "Ended",
    "Event",
    "Exited",
    "Failed",
    "Failure",
    "Frame",
    "Hello",
    "HostsPool",
    "Interrupted",
    "Link",
    "Lost",
    "Measured",
    "Moved",
    "Node",
    "Noted",
    "ObservedRun",
    "Observer",
    "Option",
    "Pool",
    "PoolError",
    "Progressed",
    "RankRecord",
    "RanksReduced",
    "Restarted",
    "Returned",
    "RunEvent",
    "RunRecord",
    "Sampled",
    "Sink",
    "Stalled",
    "Started",
    "Strategy",
    "StrategyRun",
    "StrategyStart",
    "TimedOut",
    "Training",
    "TrainingStrategy",
    "Wrote",
    "at_least_zero",
    "count",
    "json_object",
    "seconds",
    "string",
    "switch",
]
