"""All messages as types. Importing this module loads every conversation, so a process that takes part in few of them
imports it for its type checker only."""

from __future__ import annotations

from jupyter_distrib.wire.messages.debugger import Debug
from jupyter_distrib.wire.messages.kernel import (
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
)
from jupyter_distrib.wire.messages.node import (
    Connected,
    CutRemoteSockets,
    GroupsReset,
    KeepNodeGroups,
    MakeStore,
    NodeDrained,
    NodeSawRanks,
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
from jupyter_distrib.wire.messages.run_events import RunEvent
from jupyter_distrib.wire.messages.status import ServerStatus  # noqa: F401 - a part of `Answered`
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
)

Command = (
    Hello
    | OpenWorkerGroup
    | Execute
    | Stop
    | AskStacks
    | Debug
    | Forget
    | CloseWorkerGroup
    | MakeStore
    | UseStore
    | KeepNodeGroups
    | CutRemoteSockets
    | Ask
    | Attach
    | Fork
    | Preload
    | ResetGroups
    | KeepGroups
    | ReplaceStreams
    | CutSockets
    | Probe
    | Leave
)
Event = (
    Welcomed
    | Leaving
    | NotServed
    | DeviceDrained
    | DeviceSettled
    | ForkserverReady
    | Forked
    | ForkFailed
    | Ready
    | StreamsReplaced
    | ProbeAnswer
    | WorkerGroupOpened
    | WorkerGroupStarting
    | WorkerGroupRefused
    | WorkerGroupQueued
    | GroupsReset
    | Connected
    | NodeDrained
    | NodeSawRanks
    | RanksLeft
    | WorkerGroupClosed
    | WorkerGroupChanged
    | RunEvent
    | Answered
    | Attached
    | NotAttached
)
RelayMessage = RelayCall | RelayContent | RelayReturned | RelayFailed | RelayPassed | RelayEnded | RelayAlive
Message = Command | Event | RelayMessage
"""Message that a link carries."""
