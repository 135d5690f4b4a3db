"""The messages between kernel, coordinator, agent and worker: commands (imperative) and events (past tense).

Plain data, no behaviour, standard library only; loaded in every process of the project. `wire/link.py` carries these
classes as JSON plus raw bytes, so a field may only be one of: `None`, `bool`, `int`, `float`, `str`, `bytes`, a tuple
of these, a `dict` with string keys, or another class of this folder. One file is one conversation:

    kernel  --commands-->  agent  --commands-->  worker (one per rank)      kernel.py, worker.py
    kernel  <---events---  agent  <---events---  worker                     run_events.py
    coordinator  <------>  agents of several nodes                          node.py
    coordinator  <-pipe->  relay of a node                                  relay.py
    kernel  <------------------------------------>  debugger of a rank      debugger.py

`shared.py` and `status.py` hold parts of messages. To add a message, write its class, with `Command`, `Event` or
`RunEvent` as its base.

Times named `at_s` are the node's monotonic clock in seconds; they order the events of one node.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from binascii import crc32
from typing import TYPE_CHECKING, Any

from jupyter_distrib.wire.messages.debugger import *
from jupyter_distrib.wire.messages.kernel import *
from jupyter_distrib.wire.messages.run_events import *
from jupyter_distrib.wire.messages.shared import *

if TYPE_CHECKING:
    from jupyter_distrib.wire.messages.node import *
    from jupyter_distrib.wire.messages.relay import *
    from jupyter_distrib.wire.messages.status import *
    from jupyter_distrib.wire.messages.worker import *

SELDOM = ("node", "relay", "status", "worker")
"""Conversations in which a kernel rarely or never takes part; loaded at first use."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for file in SELDOM:
            module = importlib.import_module(f"{__name__}.{file}")
            if name in vars(module):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_all() -> None:
    """Load every conversation, as a process does when it gets an unknown message."""
    for file in SELDOM:
        importlib.import_module(f"{__name__}.{file}")


_FIELDS = re.compile(rb"^(?:class \w+|    \w+: .+)", re.MULTILINE)
"""The lines of a source with the classes and their fields."""


def _number() -> int:
    folder, loader = os.path.dirname(__file__), _loader()
    names = sorted(module.name for module in pkgutil.iter_modules([folder]))
    sources = [loader.get_data(os.path.join(folder, f"{name}.py")) for name in names]
    return crc32(b"\n".join(line for source in sources for line in _FIELDS.findall(source)))


def _loader() -> Any:
    """Return the loader of this package, which may lie in an archive."""
    return __spec__.loader


PROTOCOL = _number()
"""Number that changes whenever the fields of a class of this folder change; part of the agent's fingerprint. It
comes from the sources, so that a process need not load all of them to know it."""
