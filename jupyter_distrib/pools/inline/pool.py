"""Ranks without processes: every rank of a cell runs in the notebook's own process, one after another, in the thread
that sends it.

For debugging a cell: `input()`, `breakpoint()` and the interrupt button work as in any cell. For tests: no process, no
torch, no waiting. A cell gets copies of what it captured and the same environment as on other pools, but there is no
process group, so ranks cannot call collectives, unless they take turns (`--step-through`, `stepped_run.py`): then
collectives work, and each is shown.

    send(Execute) -> for each rank: Started, the cell, Returned | Failed | Interrupted -> Ended -> send returns
"""

from __future__ import annotations

import os
import platform
from typing import ClassVar

from jupyter_distrib.options import Option, switch
from jupyter_distrib.pools.base import Capabilities, Lost, Node, Sink
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS

STEP_THROUGH = Option(
    flag="--step-through",
    meaning="the ranks take turns, so that collectives work, and each is shown step by step",
    read=switch,
)


class InlinePool:
    """The pool whose ranks run in this process."""

    kind = "inline"
    options: ClassVar = (STEP_THROUGH,)
    capabilities: ClassVar = Capabilities(
        remote=False,
        unasked=True,
        nameable=False,
        echoes_output=True,
        runs_in_send=True,
        ignored_options={
            "hang_timeout_s": "its ranks run one after another, so none waits for another",
            "check": "its ranks run one after another, so there are no collectives",
            "min_ranks": "its ranks are never lost",
            "max_restarts": "its ranks run in this process, so a rank cannot be lost on its own",
            "profile": "a cell in the notebook's own process can use torch.profiler itself",
            "wait_s": "its ranks are never busy with something else",
        },
    )

    def __init__(self, step_through: object = False) -> None:
        self._in_steps = step_through is not False

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> Node:
        # The modules that run cells are not needed to know the pool.
        from jupyter_distrib.pools.inline.node import InlineNode

        node = InlineNode(hello, sink, in_steps=self._in_steps)
        sink(
            m.Welcomed(
                pid=os.getpid(), python=platform.python_version(), torch=hello.torch, cloudpickle=hello.cloudpickle
            ),
            NO_DESCRIPTORS,
        )
        return node
