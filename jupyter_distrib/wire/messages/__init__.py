"""The messages between kernel, coordinator, agent and worker: commands (imperative) and events (past tense).

Plain data, no behaviour, standard library only; loaded in every process of the project. `wire/link.py` carries these
classes as JSON plus raw bytes, so a field may only be one of: `None`, `bool`, `int`, `float`, `str`, `bytes`, a tuple
of these, a `dict` with string keys, or another class of this folder. One file is one conversation:

    kernel  --commands-->  agent  --commands-->  worker (one per rank)      kernel.py, worker.py
    kernel  <---events---  agent  <---events---  worker                     run_events.py
    coordinator  <------>  agents of several nodes                          node.py
    coordinator  <-pipe->  relay of a node                                  relay.py
    kernel  <------------------------------------>  debugger of a rank      debugger.py

`shared.py` and `status.py` hold parts of messages.

Times named `at_s` are the node's monotonic clock in seconds; they order the events of one node.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jupyter_distrib.wire.messages.debugger import Debug, DebuggerLeft, DebuggerPrompted
from jupyter_distrib.wire.messages.kernel import (
    KILL_AFTER_S,
    Answered,
    Ask,
    AskStacks,
    Attach,
    Attached,
    CloseWorkerGroup,
    Execute,
    Forget,
    Hello,
    Leaving,
    NotAttached,
    NotServed,
    OpenWorkerGroup,
    Stop,
    Welcomed,
    WorkerGroupChanged,
    WorkerGroupClosed,
    WorkerGroupOpened,
    WorkerGroupQueued,
    WorkerGroupRefused,
    WorkerGroupStarting,
    number_of_ranks,
)
from jupyter_distrib.wire.messages.protocol import PROTOCOL
from jupyter_distrib.wire.messages.run_events import (
    Cleared,
    Displayed,
    Ended,
    Exited,
    Failed,
    Interrupted,
    Measured,
    Moved,
    Noted,
    Profiled,
    Progressed,
    RanksReduced,
    Restarted,
    Returned,
    RunEvent,
    Sampled,
    Saving,
    StackSeen,
    Stalled,
    Started,
    TimedOut,
    Wrote,
)
from jupyter_distrib.wire.messages.shared import (
    Cell,
    Failure,
    Frame,
    GroupSighting,
    Package,
    Packages,
    Parcel,
    PhaseTimes,
    RankPlace,
    Setting,
    WorkerInfo,
    fields_of,
)

if TYPE_CHECKING:
    from jupyter_distrib.wire.messages.every import Command, Event, Message
    from jupyter_distrib.wire.messages.node import (
        Connected,
        CutRemoteSockets,
        GroupsReset,
        KeepNodeGroups,
        MakeStore,
        NodeDrained,
        NodeSawRanks,
        RankSighting,
        RanksLeft,
        UseStore,
    )
    from jupyter_distrib.wire.messages.relay import (
        RelayAlive,
        RelayCall,
        RelayContent,
        RelayEnded,
        RelayFailed,
        RelayPassed,
        RelayReturned,
    )
    from jupyter_distrib.wire.messages.status import GpuStatus, GroupStatus, NodeStatus, ServerStatus, WaitingStatus
    from jupyter_distrib.wire.messages.worker import (
        CutSockets,
        DeviceDrained,
        DeviceSettled,
        Fork,
        Forked,
        ForkFailed,
        ForkserverReady,
        KeepGroups,
        Leave,
        Preload,
        Probe,
        ProbeAnswer,
        Ready,
        ReplaceStreams,
        ResetGroups,
        StreamsReplaced,
        WorkerOrder,
    )

__all__ = [
    "KILL_AFTER_S",
    "PROTOCOL",
    "Answered",
    "Ask",
    "AskStacks",
    "Attach",
    "Attached",
    "Cell",
    "Cleared",
    "CloseWorkerGroup",
    "Command",
    "Connected",
    "CutRemoteSockets",
    "CutSockets",
    "Debug",
    "DebuggerLeft",
    "DebuggerPrompted",
    "DeviceDrained",
    "DeviceSettled",
    "Displayed",
    "Ended",
    "Event",
    "Execute",
    "Exited",
    "Failed",
    "Failure",
    "Forget",
    "Fork",
    "ForkFailed",
    "Forked",
    "ForkserverReady",
    "Frame",
    "GpuStatus",
    "GroupSighting",
    "GroupStatus",
    "GroupsReset",
    "Hello",
    "Interrupted",
    "KeepGroups",
    "KeepNodeGroups",
    "Leave",
    "Leaving",
    "MakeStore",
    "Measured",
    "Message",
    "Moved",
    "NodeDrained",
    "NodeSawRanks",
    "NodeStatus",
    "NotAttached",
    "NotServed",
    "Noted",
    "OpenWorkerGroup",
    "Package",
    "Packages",
    "Parcel",
    "PhaseTimes",
    "Preload",
    "Probe",
    "ProbeAnswer",
    "Profiled",
    "Progressed",
    "RankPlace",
    "RankSighting",
    "RanksLeft",
    "RanksReduced",
    "Ready",
    "RelayAlive",
    "RelayCall",
    "RelayContent",
    "RelayEnded",
    "RelayFailed",
    "RelayPassed",
    "RelayReturned",
    "ReplaceStreams",
    "ResetGroups",
    "Restarted",
    "Returned",
    "RunEvent",
    "Sampled",
    "Saving",
    "ServerStatus",
    "Setting",
    "StackSeen",
    "Stalled",
    "Started",
    "Stop",
    "StreamsReplaced",
    "TimedOut",
    "UseStore",
    "WaitingStatus",
    "Welcomed",
    "WorkerGroupChanged",
    "WorkerGroupClosed",
    "WorkerGroupOpened",
    "WorkerGroupQueued",
    "WorkerGroupRefused",
    "WorkerGroupStarting",
    "WorkerInfo",
    "WorkerOrder",
    "Wrote",
    "fields_of",
    "number_of_ranks",
]

_LAZY = {
    "every": (
        "Command",
        "Event",
        "Message",
    ),
    "node": (
        "Connected",
        "CutRemoteSockets",
        "GroupsReset",
        "KeepNodeGroups",
        "MakeStore",
        "NodeDrained",
        "NodeSawRanks",
        "RankSighting",
        "RanksLeft",
        "UseStore",
    ),
    "relay": (
        "RelayAlive",
        "RelayCall",
        "RelayContent",
        "RelayEnded",
        "RelayFailed",
        "RelayPassed",
        "RelayReturned",
    ),
    "status": (
        "GpuStatus",
        "GroupStatus",
        "NodeStatus",
        "ServerStatus",
        "WaitingStatus",
    ),
    "worker": (
        "CutSockets",
        "DeviceDrained",
        "DeviceSettled",
        "Fork",
        "Forked",
        "ForkFailed",
        "ForkserverReady",
        "KeepGroups",
        "Leave",
        "Preload",
        "Probe",
        "ProbeAnswer",
        "Ready",
        "ReplaceStreams",
        "ResetGroups",
        "StreamsReplaced",
        "WorkerOrder",
    ),
}
"""The names of conversations in which a kernel takes part seldom or never, by their files. They are loaded at their
first use."""


def __getattr__(name: str) -> Any:
    for file, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
