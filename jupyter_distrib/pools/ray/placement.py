"""Finds nodes of a Ray cluster for one worker group, and gives them back.

`RayPlacement` is used in the coordinator's loop; what blocks is done in a thread of its own for each worker group
(`_look`), and what Ray reports arrives in threads of Ray's. Both come back to the loop through `Calls`."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from jupyter_distrib.coordinator import file_sync
from jupyter_distrib.coordinator.relay import stamp
from jupyter_distrib.coordinator.worker_group import Share, SpreadWorkerGroup
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.ray import cluster
from jupyter_distrib.pools.ray.node import RayNode, cause
from jupyter_distrib.pools.ray.object_store import Receive, Transfer
from jupyter_distrib.pools.ray.placement_plan import PlacementRequest, Wanted, have_gpus
from jupyter_distrib.server.client import Client
from jupyter_distrib.system import network_interfaces
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire import versions as versions_module
from jupyter_distrib.wire.messages import Execute, Hello, OpenWorkerGroup, Welcomed

TELL_S = 5.0
"""Who still waits after this is told what for."""
JOIN_S = 1.5 * cluster.JOIN_S
"""The last attempt to join begins before `cluster.JOIN_S` and may take its time."""
READY_S = 5.0
"""A placement group that the cluster has room for is ready within this."""
START_S = 300.0
"""For the processes of a node, and for a runtime environment that has to be made first."""
AGAIN_S = 0.5
"""How often nodes that are free look whether somebody waits for room."""
LOOK_S = 2.0
"""How often to look for new nodes while waiting for some."""
LEAVING_S = 2.0
"""Ranks that are told to leave are given a second for exit handlers."""
STAY_S = 10.0
"""Nodes that are given back stay for so long, as long as nobody waits for room: another worker group may claim them."""


class Placements:
    """Of one coordinator. A worker group that asks for what its notebook has just given back, by `--fresh` or when its
    kernel was restarted, is given those nodes, where agents and forkservers are up, so that its ranks are forked at
    once."""

    def __init__(
        self, calls: CallSoon, wanted: Wanted, joined: Future[cluster.Address], package: Future[bytes]
    ) -> None:
        self._calls, self._wanted, self._joined, self._package = calls, wanted, joined, package
        self._places: list[RayPlacement] = []

    def find(self, client: Client[Any], command: OpenWorkerGroup) -> RayPlacement:
        """Nodes, or who will look for them."""
        assert client.hello is not None
        self._places = [place for place in self._places if not place.over]
        for place in self._places:
            if place.claim(client.hello, command):
                return place
        for place in self._places:
            place.make_room(client.hello)
        self._places.append(RayPlacement(self._calls, client.hello, self._wanted, self._joined, self._package))
        return self._places[-1]


class RayPlacement:
    """Nodes for one worker group, and for the next one that claims them."""

    def __init__(
        self, calls: CallSoon, hello: Hello, wanted: Wanted, joined: Future[cluster.Address], package: Future[bytes]
    ) -> None:
        self.calls, self._hello, self._wanted, self._joined, self._package = calls, hello, wanted, joined, package
        self.group: SpreadWorkerGroup
        self.remark = ""
        """On the nodes, for a kernel's first cell."""
        self.told: set[str] = set()
        """What its kernel has been told of them."""
        self.over = False
        """Its nodes are gone, or will be."""
        self._given_back = threading.Event()
        """By the worker group that has it now."""
        self._unwanted = threading.Event()
        """Its notebook wants other nodes now."""
        self._asked: OpenWorkerGroup
        self._found: tuple[list[Share], bool] | None = None
        """What the worker group was given, see `WorkerGroup.placed`."""
        self._lost = False
        """One of them."""
        self._lock = threading.Lock()
        self._group: Any = None
        self._attempts = 0
        self._said = ""
        self._actors: list[Any] = []
        self._transfer: Transfer | None = None
        self._looked: tuple[str, file_sync.Found] | None = None
        """By which run."""

    def put(self, run: str, fds: Sequence[int], receive: Receive) -> None:
        """Bring a content (`shared_memory.Arriving`) by way of Ray's object store, once for all nodes of a run."""
        if self._transfer is None or self._transfer.run != run:
            self._transfer = Transfer(run, fds, self.calls, self._given_back)
        self._transfer.add(receive)

    def found_for(self, command: Execute) -> file_sync.Found:
        """The notebook's files, looked through once for all nodes of a run."""
        if self._looked is None or self._looked[0] != command.run:
            self._looked = command.run, file_sync.look(command.setting.directory, command.setting.path)
        return self._looked[1]

    # ------------------------------------------------------------------------------------------------ looking

    def claim(self, hello: Hello, command: OpenWorkerGroup) -> bool:
        """Whether it has been given back, and is what this kernel wants now: it has it again then."""
        with self._lock:
            if self.over or self._lost or self._found is None or not self._given_back.is_set():
                return False
            shares, _ = self._found
            gpus = any(share.gpus for share in shares)
            if command.gpus and not gpus:
                return False  # there may be some now
            if not _is_same(hello, self._hello) or self._folder != file_sync.directory(hello):
                return False
            given = replace(self._asked, size=sum(share.size for share in shares), gpus=gpus)
            if _wish(command) not in (_wish(self._asked), _wish(given)):
                return False
            if hello.session != self._hello.session:
                self._hello, self.told = hello, set()
            self._given_back = threading.Event()
            self._unwanted.clear()
            return True

    def make_room(self, hello: Hello) -> None:
        """Its notebook has not claimed it: what was given back need not stay."""
        if self._given_back.is_set() and _is_same(hello, self._hello):
            self._unwanted.set()

    def lost(self, number: int, reason: str) -> None:
        """This node is out of reach."""
        self._lost = True
        self.group.lost(number, reason)

    def start(self, command: OpenWorkerGroup, group: SpreadWorkerGroup) -> None:
        self.group, self._asked = group, command
        if self._found is not None:
            shares, has_gpus = self._found
            return group.placed(shares, has_gpus=has_gpus)
        threading.Thread(target=self._look, args=(command,), name="jupyter_distrib-place", daemon=True).start()

    def _look(self, command: OpenWorkerGroup) -> None:
        """In a thread of its own."""
        try:
            address = self._wait_until_joined()
            cluster.check_port(address)
            need = PlacementRequest.of(command, self._wanted, _alive())
            sizes = self._reserve(need)
            self._start_actors(sizes, gpus=need.gpus, client=address.client)
            nodes = self._nodes()
            has_gpus = have_gpus(_alive())
        except PoolError as refusal:
            return self._call(partial(self.group.refuse, str(refusal)))
        except TimeoutError:
            return self._call(partial(self.group.refuse, f"the Ray cluster did not answer within {JOIN_S:g} s."))
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds
            return self._call(partial(self.group.refuse, f"the Ray cluster could not start the ranks: {cause(error)}"))
        shares = [Share(node=node, size=size, gpus=need.gpus) for node, size in zip(nodes, sizes, strict=True)]

        def begin() -> None:
            for node in nodes:
                node.listen()
            self._found = shares, has_gpus
            self.group.placed(shares, has_gpus=has_gpus)

        self._call(begin)

    def _wait_until_joined(self) -> cluster.Address:
        try:
            return self._joined.result(TELL_S)
        except TimeoutError:
            self._say("the Ray cluster is being joined.")
            return self._joined.result(JOIN_S)

    def _call(self, call: Callable[[], None]) -> None:
        self.calls.put(lambda: None if self.group.closed else call())

    def _reserve(self, need: PlacementRequest) -> list[int]:
        """The best shape that there is room for now; else, if it may take its time, the best there will be room for."""
        until_s = time.monotonic() + need.command.wait_s
        while True:
            nodes = _alive()
            there = need.there(nodes)
            shapes = need.shapes(there)
            if not shapes and not need.command.wait_s:
                raise PoolError(need.too_few(there))
            for shape in shapes[:3]:
                if self._try(shape, need, time.monotonic() + READY_S):
                    return shape
            # Left standing, it is what an autoscaler looks at.
            shape = shapes[0] if shapes else need.grown(there)
            if need.command.wait_s and self._try(shape, need, until_s, known=nodes):
                return shape
            if time.monotonic() >= until_s:
                raise PoolError(_busy(need, nodes))

    def _try(self, shape: list[int], need: PlacementRequest, until_s: float, known: list[Any] | None = None) -> bool:
        """Whether the nodes were had in this shape and in time. If nodes are `known`, say what is missing, and give up
        when others are there."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        strategy = need.strategy(shape, need.there(_alive() if known is None else known))
        self._attempts += 1
        who = os.path.basename(self._hello.notebook) or self._hello.label  # its next kernel may have it, too
        name = f"jupyter_distrib: {who} #{need.command.group}.{self._attempts}"  # Ray wants them unique
        with self._lock:
            if self._given_back.is_set():
                raise PoolError("the ranks were given up while they were waited for.")
            group = self._group = placement_group([need.bundle(size) for size in shape], strategy=strategy, name=name)
        ready = group.ready()
        while True:
            done, _ = ray.wait([ready], timeout=max(0.1, min(LOOK_S, until_s - time.monotonic())))
            if done:
                ray.get(ready)
                if strategy == "STRICT_SPREAD" or len(shape) == 1:
                    return True
            nodes = _alive()
            changed = known is not None and {node["NodeID"] for node in nodes} != {node["NodeID"] for node in known}
            if done or changed or self._given_back.is_set() or time.monotonic() >= until_s:
                remove_placement_group(group)
                return False
            if known is not None:
                self._say(_busy(need, nodes))

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._call(partial(self.group.queued, reason))

    def _start_actors(self, sizes: Sequence[int], *, gpus: bool, client: bool) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        package, cls = ray.put(self._package.result()), cluster.actor_class()
        probes = []
        with self._lock:
            if self._given_back.is_set():
                raise PoolError("the ranks were given up while they were starting.")
            for number, size in enumerate(sizes):
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
                options = {
                    "num_cpus": size * self._wanted.cpus_per_rank,
                    "num_gpus": size if gpus else 0,
                    "scheduling_strategy": place,
                }
                if self._wanted.runtime_env:
                    options["runtime_env"] = dict(self._wanted.runtime_env)
                more = {"plain": client, "env": dict(self._wanted.env), "python": self._wanted.python}
                actor = cls.options(**options).remote(package, self._hello.label, self._hello.session, **more)
                self._actors.append(actor)
                if self._wanted.executable:
                    probe = cluster.probe().options(scheduling_strategy=place)
                    probes.append(probe.remote(self._wanted.executable))
        if unfit := next(filter(None, ray.get(probes, timeout=START_S)), ""):
            raise PoolError(unfit)

    def _nodes(self) -> list[RayNode]:
        """What the actors say of their nodes, which must be fit for what the kernel sends."""
        import ray

        folder = self._folder = file_sync.directory(self._hello)
        addresses, before = self._addresses(len(self._actors)), stamp(folder)
        asked = [
            actor.describe.remote(addresses[:number] + addresses[number + 1 :], folder)
            for number, actor in enumerate(self._actors)
        ]
        if ray.wait(asked, num_returns=len(asked), timeout=TELL_S)[1]:
            self._say("Ray starts processes on the nodes.")
        abouts = [json.loads(text) for text in ray.get(asked, timeout=START_S)]
        after = None if self._wanted.copy_files else stamp(folder)
        differing = list(map(self._check_versions, abouts))
        self.remark = " ".join(filter(None, (*differing, no_way(abouts))))
        return [
            RayNode(
                self, number, self._actors[number], about, shared=file_sync.is_shared(about["folder"], before, after)
            )
            for number, about in enumerate(abouts)
        ]

    def _addresses(self, count: int) -> list[str]:
        """Of the nodes that have the bundles, in their order."""
        from ray.util import placement_group_table

        of_nodes = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in _alive()}
        there = placement_group_table(self._group)["bundles_to_node_id"]
        return [of_nodes[there[number]] for number in range(count) if there[number] in of_nodes]

    def _check_versions(self, about: Mapping[str, Any]) -> str:
        """What differs and mostly works. Raises `PoolError` if it does not."""
        versions = {name: about[name] for name in ("python", "torch", "cloudpickle")}
        there = Welcomed(pid=0, **versions)
        if refusal := versions_module.refusal(self._hello, there, "Ray"):
            raise PoolError(refusal)
        remark = versions_module.remark(self._hello, there)
        return f"node {about['host']} has {remark}." if remark else ""

    # ------------------------------------------------------------------------------------------------ giving back

    def give_back(self, *, useless: bool, killed: bool) -> None:
        self._given_back.set()
        leaving_s = 0.0 if killed else LEAVING_S
        stay_s = 0.0 if useless or self._lost or self._found is None else STAY_S
        threading.Thread(
            target=self._end, args=(leaving_s, stay_s, self._given_back), name="jupyter_distrib-end", daemon=True
        ).start()

    def _end(self, leaving_s: float, stay_s: float, given_back: threading.Event) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        until_s = time.monotonic() + stay_s
        time.sleep(leaving_s)
        while given_back is self._given_back and not self._lost and time.monotonic() < until_s:
            if self._unwanted.wait(AGAIN_S) or _are_waiting():
                break
        with self._lock:
            if given_back is not self._given_back:
                return  # another worker group has claimed them
            self.over = True
            group, actors = self._group, list(self._actors)
        try:
            ended = [actor.end.remote() for actor in actors]
            ray.wait(ended, num_returns=len(ended), timeout=1.0) if ended else None
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)
        except Exception:  # noqa: BLE001 - Ray raises all kinds: the cluster is gone, and all that was there with it
            traceback.print_exc()  # into the coordinator's log


def _is_same(hello: Hello, before: Hello) -> bool:
    """Whether this is the kernel that was there before, or the next one of its notebook with the same packages."""
    one, other = (replace(each, session="", pid=0, label="") for each in (hello, before))
    return hello.session == before.session or (bool(hello.notebook) and one == other)


def _are_waiting() -> bool:
    """Whether somebody in the cluster waits for room, in this notebook or elsewhere."""
    from ray.util import placement_group_table

    try:
        return any(group["state"] in ("PENDING", "RESCHEDULING") for group in placement_group_table().values())
    except Exception:  # noqa: BLE001 - Ray raises all kinds: the cluster is gone
        return True


def _wish(command: OpenWorkerGroup) -> OpenWorkerGroup:
    """What nodes it takes."""
    return replace(command, group="", load_env={}, wait_s=0.0)


def no_way(abouts: Sequence[Mapping[str, Any]]) -> str:
    """A sentence, if nodes on several machines would meet on their loopback interfaces."""
    stuck = [str(about["host"]) for about in abouts if about["interface"] == network_interfaces.LOOPBACK]
    if not stuck or len({about["machine"] for about in abouts}) == 1:
        return ""
    return (
        f"node {stuck[0]} has no network interface by which it reaches the other nodes, so that ranks will not meet: "
        "start Ray there with --node-ip-address and an address that the others reach, or name the interface by --env "
        "NCCL_SOCKET_IFNAME=NAME and GLOO_SOCKET_IFNAME=NAME."
    )


def _alive() -> list[Any]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _busy(need: PlacementRequest, nodes: Sequence[Mapping[str, Any]]) -> str:
    """What is free, and which notebooks have the rest."""
    import ray
    from ray.util import placement_group_table

    names = {
        str(group["name"]).partition(": ")[2].partition(" #")[0]
        for group in placement_group_table().values()
        if str(group.get("name", "")).startswith("jupyter_distrib: ") and group["state"] == "CREATED"
    }
    holders = f" {', '.join(sorted(names))} have ranks there." if names else ""
    return need.busy(nodes, ray.cluster_resources(), ray.available_resources()) + holders
