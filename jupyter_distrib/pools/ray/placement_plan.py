"""Plans how many ranks go to how many nodes of a Ray cluster, from the resources that it reports. Pure.

A *shape* is the number of ranks on each node, the most first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.coordinator.node_count import NodeCount
from jupyter_distrib.errors import PoolError
from jupyter_distrib.wire import messages as m

_TYPE = "accelerator_type:"
"""Prefix of Ray's names of GPU types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The pool's options for the spread of worker groups."""

    nodes: NodeCount = field(default_factory=NodeCount)
    cpus_per_rank: float = 1.0
    python: str = ""
    """Interpreter of the ranks; empty: that of Ray's own processes."""
    runtime_env: Mapping[str, Any] | None = None
    executable: str = ""
    """The `py_executable` of `runtime_env`, if it exists before Ray has made the environment."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the ranks."""
    copy_files: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The resources requested for one worker group."""

    command: m.OpenWorkerGroup
    wanted: Wanted
    gpus: bool
    kind: str
    """Ray's resource name for GPUs of the requested type; empty if any type will do."""

    @classmethod
    def of(cls, command: m.OpenWorkerGroup, wanted: Wanted, nodes: Sequence[Mapping[str, Any]]) -> PlacementRequest:
        """Return the request for a command. Without any GPU, CPU ranks take the place of ranks with GPUs, unless the
        user waits for a number or type of GPUs. Raises `PoolError` if the requested type is missing and the user
        does not wait for it."""
        kind = _gpu_kind(command, nodes)
        may_come = bool(command.size and command.wait_s)
        gpus = command.gpus and (bool(kind) or may_come or have_gpus(nodes))
        return cls(command=command, wanted=wanted, gpus=gpus, kind=kind)

    @property
    def nodes(self) -> int:
        """The number of nodes; 0: as few as possible."""
        return self.wanted.nodes.for_ranks(self.command.size, self.command.unit)

    def there(self, nodes: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the maximum number of ranks on each node, largest first."""
        return sorted((self._room(node["Resources"]) for node in nodes), reverse=True)

    def _room(self, resources: Mapping[str, float]) -> int:
        if self.kind and self.kind not in resources:
            return 0
        limits = [resources.get("GPU", 0.0)] if self.gpus else []
        if self.wanted.cpus_per_rank:
            limits.append(resources.get("CPU", 0.0) // self.wanted.cpus_per_rank)
        return int(min(limits, default=1000))

    def size(self, there: Sequence[int]) -> int:
        return self.command.ranks(max(1, sum(there)) if self.gpus else 0)

    def shapes(self, there: Sequence[int]) -> list[list[int]]:
        """Return the shapes that the nodes have room for when no others use them, the best first."""
        size, nodes = self.size(there), self.nodes
        counts = (min(nodes, size),) if nodes else range(1, len(there) + 1)
        return [shape for count in counts if (shape := _even(size, count, there))]

    def grown(self, there: Sequence[int]) -> list[int]:
        """Return the shape to wait for if the cluster is too small: new nodes are assumed to be like the largest node.
        If no node has room for a rank, each rank gets a bundle of its own, since the room of a new node is unknown."""
        size = self.size(there)
        if self._is_loose(there):
            return [1] * size
        count = self.nodes or -(-size // (max(there, default=0) or size))
        return _split(size, max(1, min(count, size)))

    def strategy(self, shape: Sequence[int], there: Sequence[int]) -> str:
        """Return Ray's placement strategy for a shape: its parts on separate nodes, unless they are single ranks that
        only ask for new nodes."""
        return "PACK" if len(shape) == 1 or self._is_loose(there) else "STRICT_SPREAD"

    def _is_loose(self, there: Sequence[int]) -> bool:
        return not self.nodes and not any(there)

    def bundle(self, size: int) -> dict[str, float]:
        """Return the resources for this many ranks on one node."""
        cpus = self.wanted.cpus_per_rank
        bundle: dict[str, float] = {"CPU": size * cpus} if cpus else {}
        if self.gpus:
            bundle["GPU"] = size
            if self.kind:
                bundle[self.kind] = 0.001
        return bundle or {"CPU": 0.001}

    def busy(self, nodes: Sequence[Mapping[str, Any]], total: Mapping[str, float], free: Mapping[str, float]) -> str:
        """Return a sentence on how much of a scarce resource (Ray's CPUs or GPUs) is requested and how much is free."""
        there = self.there(nodes)
        asked = {unit: count for unit, count in self.bundle(self.size(there)).items() if unit in ("GPU", "CPU")}
        unit = next((unit for unit in sorted(asked) if free.get(unit, 0) < asked[unit]), max(asked))
        typed = ""
        if unit == "GPU" and self.kind:
            such = sum(node["Resources"].get("GPU", 0) for node in nodes if self.kind in node["Resources"])
            typed = f" of type {self.kind.removeprefix(_TYPE)} (the Ray cluster has {such:g})"
        one = asked[unit] == 1
        said = f"{asked[unit]:g} {unit}{'s' * (not one)}{typed} {'is' if one else 'are'} asked for"
        preload = "" if self.shapes(there) else " It has to grow."
        return f"{said}, and {free.get(unit, 0):g} of {total.get(unit, 0):g} are free in the Ray cluster.{preload}"

    def too_few(self, there: Sequence[int]) -> str:
        """Return a sentence on why this cluster cannot meet the request."""
        if not there:
            return (
                "the Ray cluster has no node that is alive: start one with `ray start --address=...`, or use --wait S "
                "if it grows by itself."
            )
        rooms = [room for room in there if room]
        total = f"{sum(rooms)} on {len(rooms)} nodes ({', '.join(map(str, rooms))})" if len(rooms) > 1 else sum(rooms)
        nodes = f" on {self.nodes} nodes" if self.nodes else ""
        each = f", at {self.wanted.cpus_per_rank:g} CPU for each" if not self.gpus and self.wanted.cpus_per_rank else ""
        typed = f" of type {self.command.gpu_type}" if self.command.gpu_type else ""
        fewer = "ask for at most that many, or use" if rooms else "use"
        return (
            f"--{'gpus' if self.gpus else 'ranks'} {self.size(there)}{nodes}, but the Ray cluster has room for "
            f"{total}{typed}{each}; {fewer} --wait S if it grows by itself."
        )

    def advice(self, there: Sequence[int], free: Mapping[str, float]) -> str:
        """Return a sentence, with a space before it, on what to do if no notebook of ours has what is missing; empty if
        the cluster is too small anyway."""
        if not self.shapes(there):
            return ""
        bundle = self.bundle(self.size(there))
        if not self.kind and all(free.get(unit, 0) >= bundle[unit] for unit in bundle):
            where = f"on {self.nodes} nodes" if self.nodes else "where the ranks need them"
            return f" But they are not free {where}, or a node has just been lost: wait with --wait S."
        some = not self.gpus and self.wanted.cpus_per_rank and free.get("CPU")  # a bundle needs a thousandth
        none = ", or let ranks take none with --cpus-per-rank 0" if some else ""
        return f" Actors, tasks or placement groups have the rest: end them, wait for them with --wait S{none}."


def have_gpus(nodes: Sequence[Mapping[str, Any]]) -> bool:
    return any(node["Resources"].get("GPU") for node in nodes)


def _gpu_kind(command: m.OpenWorkerGroup, nodes: Sequence[Mapping[str, Any]]) -> str:
    if not command.gpu_type:
        return ""
    kinds = sorted({name for node in nodes for name in node["Resources"] if name.startswith(_TYPE)})
    wanted = _words(command.gpu_type)
    for kind in kinds:
        if wanted <= _words(kind.removeprefix(_TYPE)):
            return str(kind)
    if command.wait_s:
        return f"{_TYPE}{command.gpu_type.upper()}"  # as Ray spells them; the cluster may grow
    there = ", ".join(kind.removeprefix(_TYPE) for kind in kinds) or "no GPU at all"
    raise PoolError(
        f"--gpu-type {command.gpu_type}, but the Ray cluster has {there}; leave it out, or use another pool."
    )


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def _even(size: int, count: int, there: Sequence[int]) -> list[int]:
    """Spread ranks over nodes as evenly as possible; empty if the nodes have no room for them."""
    if not 0 < count <= min(size, len(there)):
        return []
    shape = _split(size, count)
    return shape if all(mine <= room for mine, room in zip(shape, there, strict=False)) else []


def _split(size: int, count: int) -> list[int]:
    return [size // count + (number < size % count) for number in range(count)]
