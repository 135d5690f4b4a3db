"""Finds nodes for a worker group, whichever engine provides them, and keeps them a while for the next group.

A placement is used in the coordinator's loop; blocking calls are made in a thread of their own, and their results
come back to the loop through `CallSoon`. Its nodes are looked for, held by a worker group, free for another one, or
ended:

    looking --> held --> free --> ended
                 ^________|  claimed
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jupyter_distrib.coordinator import file_sync
from jupyter_distrib.coordinator.engine import Reserve, ReservedNodes
from jupyter_distrib.coordinator.relay import stamp
from jupyter_distrib.coordinator.remote_node import Delivery, RemoteNode
from jupyter_distrib.coordinator.worker_group import MultiNodeWorkerGroup, Share
from jupyter_distrib.errors import PoolError
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import network_interfaces
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire import versions

TELL_S = 5.0
"""Seconds of waiting after which the kernel gets the reason."""
START_S = 300.0
"""Seconds in which the processes of a node have to start, including a runtime environment that is made first."""
AGAIN_S = 0.5
"""Seconds between checks whether anyone is waiting for the free nodes."""
LEAVING_S = 2.0
"""Seconds after which nodes are released even if their ranks have not left: exit handlers have one second."""
STAY_S = 10.0
"""Seconds for which returned nodes are kept for another worker group, as long as nobody else is waiting for them."""


class Placements:
    """The placements of one coordinator.

    A worker group that asks for what its notebook has just given back, by `--fresh` or when its kernel was restarted,
    is given those nodes, where agents and forkservers are up, so that its ranks are forked at once.

    Args:
        copy_files: Nodes have copies of the notebook's files even if they share its folder.
    """

    def __init__(self, calls: CallSoon, reserve: Reserve, *, copy_files: bool = False) -> None:
        self._calls, self._reserve, self._copy_files = calls, reserve, copy_files
        self._placements: list[Placement] = []

    def find(self, client: Client[MultiNodeWorkerGroup], command: m.OpenWorkerGroup) -> Placement:
        """Return free nodes that fit, or a placement that will look for some."""
        assert client.hello is not None
        self._placements = [each for each in self._placements if not each.ended]
        for each in self._placements:
            if each.claim(client.hello, command):
                return each
        for each in self._placements:
            each.make_room(client.hello)
        running = {name: folder for each in self._placements for name, folder in each.agents(client.hello).items()}
        placement = Placement(
            self._calls, self._reserve, client.hello, command, running=running, copy_files=self._copy_files
        )
        self._placements.append(placement)
        return placement


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The nodes of a placement, ready for ranks."""

    shares: tuple[Share, ...]
    agents: Mapping[str, str]
    """The folder of each node's agent, by the node's address."""
    gpus: bool
    engine_has_gpus: bool
    ends_at_s: float | None
    folder: str
    """The notebook's folder, which the nodes share or have copies of."""
    nodes: Sequence[RemoteNode] = ()
    """The nodes that the shares are on."""


@dataclass(slots=True, kw_only=True)
class _Leave:
    """The departure of ranks from nodes that their worker group has given back."""

    group: str
    nodes: set[int]
    """Nodes on which ranks may still have processes."""
    over: threading.Event = field(default_factory=threading.Event)
    """Event that is set when no node has such processes any more."""


class Placement:
    """Nodes for one worker group, and for the next one that claims them.

    Args:
        running: The folders of agents that the notebook has already, by the address of their node.
    """

    def __init__(
        self,
        calls: CallSoon,
        reserve: Reserve,
        hello: m.Hello,
        command: m.OpenWorkerGroup,
        *,
        running: Mapping[str, str],
        copy_files: bool = False,
    ) -> None:
        self.group: MultiNodeWorkerGroup
        """The worker group that has the nodes, or had them last."""
        self.ended = False
        """Whether the nodes are given back to the engine, or will be."""
        # Room beyond the minimum is got by `acquire_more`.
        needed = replace(command, size=command.least or command.size, least=0)
        self.delivery = Delivery(calls, reserve(needed, hello, self._say))
        self._reservation = self.delivery.reservation
        self._hello, self._command, self._running, self._copy_files = hello, command, running, copy_files
        self._found: _Found | None = None
        self._more: _Found | None = None
        """All nodes, including those for a run that grows."""
        self._lost = False
        """Whether a node is out of reach, so that the nodes must not be claimed."""
        self._leave: _Leave | None = None
        self._lock = threading.Lock()
        """Lock held to end the placement, and to claim it."""
        self._unwanted = threading.Event()
        """Event that is set when the notebook wants other nodes."""

    # ------------------------------------------------------------------------------------------------ for nodes

    def handle_event(self, node: int, event: m.Event, fds: tuple[int, ...] = ()) -> None:
        """Forward an event from a node; `fds` stay the caller's."""
        if isinstance(event, m.RanksLeft):
            self._ranks_left(node, event)
        elif self.group.place is self:
            self.group.handle_event(node, event, fds)

    def _ranks_left(self, node: int, event: m.RanksLeft) -> None:
        if self._leave is not None and event.group == self._leave.group:
            self._leave.nodes.discard(node)
            if not self._leave.nodes:
                self._leave.over.set()

    def send_note(self, event: m.Event) -> None:
        """Tell the kernel something about a run."""
        self.group.emit(event, ())

    def on_node_lost(self, node: int, reason: str) -> None:
        """Record that a node is out of reach."""
        if self._found is not None and node >= len(self._found.shares):
            return self.drop_room()
        self._lost = True
        if self.group.place is self:
            self.group.on_node_lost(node, reason)

    # ------------------------------------------------------------------------------------------------ claiming

    def claim(self, hello: m.Hello, command: m.OpenWorkerGroup) -> bool:
        """Claim the placement for a kernel; return False if it is not free or does not match the kernel's command."""
        with self._lock:
            if self.ended or self._lost or self._found is None or not self.delivery.given_back.is_set():
                return False
            if not self._fits(self._found, hello, command):
                return False
            if hello.session != self._hello.session:
                self._hello = hello
                self.delivery.reset_notes()
            self.delivery.renew()
            self._unwanted.clear()
            return True

    def _fits(self, found: _Found, hello: m.Hello, command: m.OpenWorkerGroup) -> bool:
        if command.gpus and not found.gpus:
            return False  # there may be GPUs now
        if not _is_same(hello, self._hello) or found.folder != file_sync.directory(hello):
            return False
        given = replace(self._command, size=sum(share.size for share in found.shares), gpus=found.gpus)
        return _wish(command) in (_wish(self._command), _wish(given))

    def make_room(self, hello: m.Hello) -> None:
        """Release returned nodes of the notebook now, unless they were claimed."""
        if self.delivery.given_back.is_set() and _is_same(hello, self._hello):
            self._unwanted.set()

    def agents(self, hello: m.Hello) -> Mapping[str, str]:
        """Return the folders of the agents on these nodes, by address, if they are this notebook's."""
        if self._lost or self._found is None or not _is_same(hello, self._hello):
            return {}
        return self._found.agents

    # ------------------------------------------------------------------------------------------------ looking

    def start(self, command: m.OpenWorkerGroup, group: MultiNodeWorkerGroup) -> None:
        """Give the group its nodes, at once or when they are found."""
        self.group, self._command = group, command
        if self._found is not None:
            return self._give(self._found)
        threading.Thread(target=self._find_nodes, name="jupyter_distrib-place", daemon=True).start()

    def _find_nodes(self) -> None:
        """Find nodes; in a thread of its own."""
        name = f"the {self._reservation.engine} cluster"
        try:
            nodes, command = self._reservation.acquire(self._running), self._command
            if command.least:
                nodes = self._reservation.acquire_more(command.size - command.least, command.unit) or nodes
            folder = file_sync.directory(self._hello)
            remotes = self._remote_nodes(nodes, folder)
        except PoolError as refusal:
            return self._call(partial(self.group.refuse, str(refusal)))
        except TimeoutError as error:
            return self._call(partial(self.group.refuse, str(error) or f"{name} did not answer in time."))
        except Exception as error:  # noqa: BLE001 - engines raise all kinds
            reason = f"{name} could not start the ranks: {self._reservation.cause(error)}"
            return self._call(partial(self.group.refuse, reason))
        found = self._found_on(nodes, remotes, folder)

        def begin() -> None:
            for node in remotes:
                node.listen()
            self._found = found
            self._give(found)

        self._call(begin)

    def _found_on(self, nodes: ReservedNodes, remotes: Sequence[RemoteNode], folder: str) -> _Found:
        return _Found(
            nodes=remotes,
            shares=tuple(
                Share(node=node, size=size, gpus=nodes.gpus) for node, size in zip(remotes, nodes.sizes, strict=True)
            ),
            agents={node.host: node.agent_folder for node in remotes},
            gpus=nodes.gpus,
            engine_has_gpus=nodes.engine_has_gpus,
            ends_at_s=nodes.ends_at_s,
            folder=folder,
        )

    def _give(self, found: _Found) -> None:
        self.group.on_placed(found.shares, has_gpus=found.engine_has_gpus, ends_at_s=found.ends_at_s)

    # ------------------------------------------------------------------------------------------------ growing

    def find_room(self, ranks: int, unit: int, then: Callable[[int], None]) -> None:
        """Get room for more ranks; see `worker_group.NodeSource`."""
        threading.Thread(
            target=self._find_more_nodes, args=(ranks, unit, then), name="jupyter_distrib-more", daemon=True
        ).start()

    def _find_more_nodes(self, ranks: int, unit: int, then: Callable[[int], None]) -> None:
        """Find more nodes; in a thread of its own."""
        before, more = self._found, None
        assert before is not None
        try:
            if (nodes := self._reservation.acquire_more(ranks, unit)) is not None:
                remotes = self._remote_nodes(nodes, before.folder, before.nodes)
                more = self._found_on(nodes, remotes, before.folder)
        except Exception:  # noqa: BLE001 - engines raise all kinds: the run continues as it is
            traceback.print_exc()  # into the coordinator's log
            self._reservation.drop_more()
        self.delivery.calls.put(lambda: self._have_more(before, more, then))

    def _have_more(self, before: _Found, more: _Found | None, then: Callable[[int], None]) -> None:
        if more is None:
            return then(0)
        if self._found is not before or self.group.place is not self or self.group.closed or self._lost:
            threading.Thread(target=self._reservation.drop_more, name="jupyter_distrib-drop").start()
            return then(0)
        for node in more.nodes[len(before.nodes) :]:
            node.listen()
        self._more = more
        return then(sum(share.size for share in more.shares) - sum(share.size for share in before.shares))

    def drop_room(self) -> None:
        """Give the room back; see `worker_group.NodeSource`."""
        if self._more is not None:
            self._more = None
            threading.Thread(target=self._reservation.drop_more, name="jupyter_distrib-drop").start()

    def nodes(self) -> int:
        """Return the number of nodes, with those of the room; see `worker_group.NodeSource`. Each of several jobs on
        a node has a share of its own."""
        found = self._more or self._found
        return len({share.node.short_name for share in found.shares}) if found is not None else 0

    def use_room(self) -> None:
        """Give the group all nodes; see `worker_group.NodeSource`."""
        more, self._more = self._more, None
        assert more is not None
        self._found = more
        self._give(more)

    def _remote_nodes(self, nodes: ReservedNodes, folder: str, known: Sequence[RemoteNode] = ()) -> list[RemoteNode]:
        """Ask the relays about their nodes, and check that they are compatible with the kernel. The first nodes may be
        known: others reach them differently now."""
        before = stamp(folder)
        asked = [
            channel.ask("describe", [*nodes.addresses[:number], *nodes.addresses[number + 1 :]], folder)
            for number, channel in enumerate(nodes.channels)
        ]
        if wait(asked, TELL_S).not_done:
            self._say(f"{self._reservation.engine} starts processes on the nodes.")
        until_s = time.monotonic() + START_S
        abouts = [json.loads(future.result(max(0.0, until_s - time.monotonic()))) for future in asked]
        after = None if self._copy_files else stamp(folder)
        names = nodes.names or [str(about["host"]) for about in abouts]
        differing = list(map(self._check_versions, names, abouts))
        no_route = no_way(abouts, self._reservation.address_advice)
        self.delivery.remark = " ".join(filter(None, (nodes.remark, *differing, no_route)))
        shared = [file_sync.is_shared(about["folder"], before, after) for about in abouts]
        files_are_ours = all(about["user"] == os.getuid() for about in abouts)  # some containers have another clock
        self.delivery.shared_folder = folder if all(shared) and files_are_ours else ""
        nodes_of = list(zip(names, nodes.channels, abouts, shared, strict=True))
        for node, about in zip(known, abouts, strict=False):
            node.host, node.interface = str(about["host"]), str(about["interface"])
        return [
            *known,
            *(
                RemoteNode(self, number, channel, about, name=name, shared=has_folder)
                for number, (name, channel, about, has_folder) in enumerate(nodes_of)
                if number >= len(known)
            ),
        ]

    def _check_versions(self, name: str, about: Mapping[str, Any]) -> str:
        """Return a remark on versions that differ but mostly work together. Raises `PoolError` if they do not."""
        node_versions = m.Welcomed(pid=0, **{name: about[name] for name in ("python", "torch", "cloudpickle")})
        if refusal := versions.refusal(self._hello, node_versions, self._reservation.engine):
            raise PoolError(f"node {name}: {refusal}")
        remark = versions.remark(self._hello, node_versions)
        return f"node {name} has {remark}." if remark else ""

    def _say(self, reason: str) -> None:
        """Tell the kernel why it is waiting; can be called in any thread."""
        self._call(partial(self.group.on_queued, reason))

    def _call(self, call: Callable[[], None]) -> None:
        self.delivery.calls.put(lambda: call() if self.group.place is self and not self.group.closed else None)

    # ------------------------------------------------------------------------------------------------ giving back

    def give_back(self, *, useless: bool, killed: bool) -> None:
        """Free the nodes, even during the search for them; see `worker_group.NodeSource`."""
        self.delivery.given_back.set()
        leaving_s = 0.0 if killed else LEAVING_S
        stay_s = 0.0 if useless or self._lost or self._found is None else STAY_S
        shares = self._found.shares if self._found else ()
        self._leave = leave = _Leave(group=self._command.group, nodes=set(range(len(shares))))
        if not stay_s:
            self._reservation.give_up()
        threading.Thread(
            target=self._end,
            args=(leave, leaving_s, stay_s, self.delivery.given_back),
            name="jupyter_distrib-end",
            daemon=True,
        ).start()

    def _end(self, leave: _Leave, leaving_s: float, stay_s: float, given_back: threading.Event) -> None:
        until_s = time.monotonic() + stay_s
        leave.over.wait(leaving_s)
        while given_back is self.delivery.given_back and not self._lost and time.monotonic() < until_s:
            if self._unwanted.wait(AGAIN_S) or self._reservation.is_room_wanted():
                break
        with self._lock:
            if given_back is not self.delivery.given_back:
                return  # another worker group has claimed it
            self.ended = True
        self._reservation.release(keep_agents=self._unwanted.is_set())


def _is_same(hello: m.Hello, before: m.Hello) -> bool:
    """Return whether this is the same kernel as before, or its notebook's next kernel with the same packages."""
    one, other = (replace(each, session="", pid=0, label="") for each in (hello, before))
    return hello.session == before.session or (bool(hello.notebook) and one == other)


def _wish(command: m.OpenWorkerGroup) -> m.OpenWorkerGroup:
    """Reduce a command to the fields that determine its nodes."""
    return replace(command, group="", load_env={}, wait_s=0.0, packages=None)


def no_way(abouts: Sequence[Mapping[str, Any]], advice: str) -> str:
    """Return a sentence if nodes on different machines would have to connect through their loopback interfaces; else
    empty."""
    stuck = [str(about["host"]) for about in abouts if about["interface"] == network_interfaces.LOOPBACK]
    if not stuck or len({about["machine"] for about in abouts}) == 1:
        return ""
    return (
        f"node {stuck[0]} has no network interface that reaches the other nodes, so its ranks cannot connect to "
        f"theirs: {advice}, or name the interface with --env NCCL_SOCKET_IFNAME=NAME and GLOO_SOCKET_IFNAME=NAME."
    )
