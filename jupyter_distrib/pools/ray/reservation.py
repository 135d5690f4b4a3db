"""Reserves nodes of a Ray cluster for one worker group: a placement group with one bundle a node, and one actor in
each.

`RayReservation.acquire` and `release` run in threads of their own, reports of Ray arrive in Ray's own threads.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar

from jupyter_distrib.coordinator.engine import ReservedNodes, Transfer
from jupyter_distrib.coordinator.further_nodes import FurtherNodes
from jupyter_distrib.coordinator.part_transfer import PartTransfer, Taking
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.ray import cluster
from jupyter_distrib.pools.ray.cluster import cause
from jupyter_distrib.pools.ray.placement_plan import PlacementRequest, Wanted, have_gpus
from jupyter_distrib.system import log_folder, paths, run_list
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire import messages as m

_PLACEMENT_GROUPS = itertools.count(1)
"""Makes the names of placement groups unique, as Ray requires: a released group keeps its name for a moment."""
TELL_S = 5.0
"""Seconds of waiting for the cluster after which the kernel gets the reason."""
JOIN_S = 1.5 * cluster.JOIN_S
"""Seconds to wait for the cluster: the last attempt to join starts before `cluster.JOIN_S` and may be slow."""
READY_S = 5.0
"""Seconds within which a placement group is ready if the cluster has room for it."""
START_S = 300.0
"""Seconds in which the processes of a node have to start, including a runtime environment that is made first."""
LOOK_S = 2.0
"""Seconds between checks for new nodes while waiting for some."""
ROOM_S = 3.0
"""Seconds to wait for room: Ray frees it some time after it could (`free_objects_period_milliseconds`)."""
AGAIN_S = 0.1


class RayChannel:
    """The actor on one node, which forwards calls to its relay; see `coordinator.engine.Channel`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def order(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.actor, method).remote(*arguments)
        except Exception:  # noqa: BLE001 - Ray Client raises at once when the cluster has gone; its listener is told too
            traceback.print_exc()  # into the coordinator's log
            return None

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        try:
            answer: Future[Any] = getattr(self.actor, method).remote(*arguments).future()
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds, in either call
            answer = Future()
            answer.set_exception(error)
        return answer


class RayCluster:
    """The cluster of one coordinator.

    Args:
        wanted: The pool's options for the spread of worker groups.
        joined: The cluster, once it has been joined.
        package: This package as a file, for the nodes.
    """

    def __init__(
        self, calls: CallSoon, wanted: Wanted, joined: Future[cluster.Address], package: Future[bytes]
    ) -> None:
        self.calls, self.wanted, self.package = calls, wanted, package
        self._joined = joined

    def reserve(self, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> RayReservation:
        """See `coordinator.engine.Reserve`."""
        return RayReservation(self, command, hello, say)

    def wait_until_joined(self, say: Callable[[str], None]) -> cluster.Address:
        try:
            return self._joined.result(TELL_S)
        except TimeoutError:
            say("the Ray cluster is being joined.")
        try:
            return self._joined.result(JOIN_S)
        except TimeoutError:
            raise TimeoutError(f"the Ray cluster did not answer within {JOIN_S:g} s.") from None


class RayReservation:
    """See `coordinator.engine.Reservation`.

    Args:
        hello: The kernel whose notebook gets the nodes.
    """

    engine = "Ray"
    left_out: ClassVar[tuple[str, ...]] = ()
    """Prefixes of further variables that ranks do not get from their nodes."""
    address_advice = "start Ray there with --node-ip-address and an address that the others reach"

    def __init__(self, of: RayCluster, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> None:
        self._cluster, self._command, self._hello, self._send_text = of, command, hello, say
        self._wanted = of.wanted
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        """Lock held to make the placement group or an actor, and to record that no more will be made."""
        self._group: Any = None
        self._actors: list[Any] = []
        self._said = ""
        self._reserved: ReservedNodes | None = None
        self._before: ReservedNodes | None = None
        """The nodes before the last `acquire_more`."""
        self._further = FurtherNodes(self._reservation_of)
        self.taken: frozenset[str] = frozenset()
        """Ids of the nodes that it must not use, since the run that grows by whole nodes has them already."""

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        address = self._cluster.wait_until_joined(self._say)
        cluster.check_port(address)
        need = PlacementRequest.of(self._command, self._wanted, _alive())
        sizes = self._reserve(need)
        self._start_actors(sizes, running, gpus=need.gpus, client=address.client)
        self._reserved = ReservedNodes(
            channels=list(map(RayChannel, self._actors)),
            addresses=self._addresses(len(self._actors)),
            sizes=sizes,
            gpus=need.gpus,
            engine_has_gpus=have_gpus(_alive()),
        )
        return self._reserved

    def acquire_more(self, ranks: int, unit: int) -> ReservedNodes | None:
        """See `Reservation.acquire_more`: by one more placement group, unless any is pending in the cluster."""
        assert self._reserved is not None
        self._before = self._reserved
        found = None if self.is_room_wanted() else self._further.acquire(self._reserved, ranks, unit)
        self._reserved = found or self._reserved
        return found

    def _reservation_of(self, ranks: int) -> RayReservation:
        command = replace(self._command, size=ranks, wait_s=0.0)
        further = type(self)(self._cluster, command, self._hello, lambda text: None)
        if self._wanted.nodes.step and self._reserved is not None:
            had = self._reserved.addresses
            further.taken = frozenset(node["NodeID"] for node in _alive() if node["NodeManagerAddress"] in had)
        return further

    def drop_more(self) -> None:
        self._reserved = self._before
        self._further.drop()

    def give_up(self) -> None:
        self._given_up.set()

    def transfer(self, run: str, fds: Sequence[int], given_up: threading.Event, folder: str) -> Transfer:
        return PartTransfer(run, fds, self._cluster.calls, given_up, ObjectStore())

    def cause(self, error: BaseException) -> str:
        return cluster.cause(error)

    def was_raised_on_node(self, error: BaseException) -> bool:
        from ray.exceptions import RayTaskError

        return isinstance(error, RayTaskError)

    # ------------------------------------------------------------------------------------------------ acquiring

    def _reserve(self, need: PlacementRequest) -> list[int]:
        """Reserve nodes in the best shape that fits now or, if the command allows waiting, in the best shape that will
        fit."""
        until_s = time.monotonic() + need.command.wait_s
        while True:
            nodes = _alive()
            there = need.there([node for node in nodes if node["NodeID"] not in self.taken])
            shapes = need.shapes(there)
            if not shapes and not need.command.wait_s:
                raise PoolError(need.too_few(there))
            for shape in shapes[:3]:
                if self._try(shape, need, time.monotonic() + READY_S):
                    return shape
            # An autoscaler looks at the pending group, so it stays.
            shape = shapes[0] if shapes else need.grown(there)
            if need.command.wait_s and self._try(shape, need, until_s, known=nodes):
                return shape
            if time.monotonic() >= until_s:
                raise PoolError(_busy(need, nodes))

    def _try(self, shape: list[int], need: PlacementRequest, until_s: float, known: list[Any] | None = None) -> bool:
        """Return whether nodes were reserved in this shape and in time. If nodes are `known`, report what is missing,
        and give up when the cluster's nodes differ from them."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        strategy = need.strategy(shape, need.there(_alive() if known is None else known))
        who = os.path.basename(self._hello.notebook) or self._hello.label  # the notebook's next kernel may use it, too
        name = f"jupyter_distrib: {who} #{need.command.group}.{next(_PLACEMENT_GROUPS)}"
        with self._lock:
            if self._given_up.is_set():
                raise PoolError("the request was cancelled before the ranks started.")
            group = self._group = placement_group(
                [need.bundle(size) for size in shape], strategy=strategy, name=name, **self._elsewhere(len(shape))
            )
        ready = group.ready()
        while True:
            done, _ = ray.wait([ready], timeout=max(0.1, min(LOOK_S, until_s - time.monotonic())))
            if done:
                ray.get(ready)
                if strategy == "STRICT_SPREAD" or len(shape) == 1:
                    return True
            nodes = _alive()
            changed = known is not None and {node["NodeID"] for node in nodes} != {node["NodeID"] for node in known}
            if done or changed or self._given_up.is_set() or time.monotonic() >= until_s:
                remove_placement_group(group)
                return False
            if known is not None:
                self._say(_busy(need, nodes))

    def _elsewhere(self, bundles: int) -> dict[str, Any]:
        """Return the arguments that keep bundles away from the nodes that it must not use."""
        others = ",".join(sorted(self.taken))
        return {"bundle_label_selector": [{"ray.io/node-id": f"!in({others})"}] * bundles} if others else {}

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._send_text(reason)

    def _start_actors(self, sizes: Sequence[int], running: Mapping[str, str], *, gpus: bool, client: bool) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        package, cls = ray.put(self._cluster.package.result()), cluster.actor_class()
        probes = []
        with self._lock:
            if self._given_up.is_set():
                raise PoolError("the request was cancelled while the ranks were starting.")
            for number, size in enumerate(sizes):
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
                options = {
                    "num_cpus": size * self._wanted.cpus_per_rank,
                    "num_gpus": size if gpus else 0,
                    "scheduling_strategy": place,
                }
                if self._wanted.runtime_env:
                    options["runtime_env"] = dict(self._wanted.runtime_env)
                # `env` is expanded there as Ray expands its own, see `ray._private.utils.update_envs`.
                more = {
                    "plain": client,
                    "env": {**log_folder.limits(), **self._wanted.env},
                    "python": self._wanted.python,
                }
                more |= {"left_out": self.left_out, "running": dict(running)}
                actor = cls.options(**options).remote(package, self._hello.label, self._hello.session, **more)
                self._actors.append(actor)
                if self._wanted.executable:
                    probe = cluster.probe().options(scheduling_strategy=place)
                    probes.append(probe.remote(self._wanted.executable))
        if unfit := next(filter(None, ray.get(probes, timeout=START_S)), ""):
            raise PoolError(unfit)

    def _addresses(self, count: int) -> list[str]:
        """Return the addresses of the nodes that have the bundles, in the bundles' order."""
        from ray.util import placement_group_table

        of_nodes = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in _alive()}
        there = placement_group_table(self._group)["bundles_to_node_id"]
        return [of_nodes[there[number]] for number in range(count) if there[number] in of_nodes]

    # ------------------------------------------------------------------------------------------------ releasing

    def is_room_wanted(self) -> bool:
        """Return whether any placement group in the cluster is pending, of this notebook or of others."""
        from ray.util import placement_group_table

        try:
            return any(group["state"] in ("PENDING", "RESCHEDULING") for group in placement_group_table().values())
        except Exception:  # noqa: BLE001 - Ray raises all kinds: the cluster is gone
            return True

    def release(self, *, keep_agents: bool) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        self._given_up.set()
        self._further.release(keep_agents=keep_agents)
        with self._lock:
            group, actors = self._group, list(self._actors)
        try:
            ended = [actor.end.remote(keep_agent=keep_agents) for actor in actors]
            ray.wait(ended, num_returns=len(ended), timeout=1.0) if ended else None
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)
        except Exception:  # noqa: BLE001 - Ray raises all kinds: the cluster is gone, with everything in it
            traceback.print_exc()  # into the coordinator's log


def _alive() -> list[Any]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _busy(need: PlacementRequest, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on free resources, and on who has the rest."""
    import ray
    from ray.util import placement_group_table

    names = {
        str(group["name"]).partition(": ")[2].partition(" #")[0]
        for group in placement_group_table().values()
        if str(group.get("name", "")).startswith("jupyter_distrib: ") and group["state"] == "CREATED"
    }
    going_on = [run for run in run_list.listed(paths.runtime_directory()) if not run.ended]
    detached = [run.run for run in going_on if (os.path.basename(run.notebook) or run.holder) in names]
    free = ray.available_resources()
    advice = holders(names, detached) or need.advice(need.there(nodes), free)
    return need.busy(nodes, ray.cluster_resources(), free) + advice


def holders(names: Collection[str], detached: Sequence[str] = ()) -> str:
    """Return a sentence, with a space before it, on the notebooks that have ranks in a cluster, and on how to free
    them; empty without any.

    Args:
        names: The notebooks.
        detached: Ids of their detached runs on this machine.
    """
    if not names:
        return ""
    told, verb = ", ".join(sorted(names)), "has" if len(names) == 1 else "have"
    attach = [f"`%distributed_attach {run}`" for run in detached] or ["`%distributed_attach`"]
    return (
        f" {told} {verb} ranks in it: `%distributed_pool stop` in that notebook frees them, and {', '.join(attach)} "
        "shows a detached run of it; or wait for them with --wait S."
    )


class ObjectStore:
    """Ray's object store: a part is a reference, which each node fetches."""

    part_bytes = 64 << 20
    ahead = 3
    """Number of parts in the store: two that some node has not fetched yet, and the one being put."""

    def packed(self, buffer: memoryview, taking: Taking, *, last: bool) -> Any:
        """Put a part into the store; if store and disk are full, wait until earlier parts have been fetched."""
        import ray

        until_s = 0.0
        while True:
            try:
                return ray.put(pickle.PickleBuffer(buffer))
            except ray.exceptions.RayError:
                until_s = until_s or time.monotonic() + ROOM_S
                if not taking and time.monotonic() > until_s:
                    raise
            if taking:
                self.wait(taking.popleft())
            else:
                time.sleep(AGAIN_S)

    def wait(self, calls: list[Any]) -> None:
        import ray

        ray.wait(calls, num_returns=len(calls), timeout=None)

    def close(self) -> None:
        """Do nothing: Ray removes unreferenced objects."""

    def failure(self, error: Exception) -> str:
        return f"the values for this cell could not be put into Ray's object store: {cause(error)}"
