"""Binds a rank to the processors near its GPU, as torchrun's `--numa-binding` does. Rank's main thread.

On a machine with several NUMA nodes, memory of another node is slower to reach, for the processors and for the GPU.
/sys says which node a GPU and a processor belong to. The modes and their rules are those of
`torch.numa.binding`, which needs the program numactl and can bind a process only once, when it begins.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.wire import messages as m

SYS = Path("/sys")
Cpus = frozenset[int]
_bound = ""
"""The mode in force."""
_all: Cpus = frozenset()
"""The processors of this process before it was bound."""


class UnknownTopologyError(Exception):
    """The system does not say where the GPU or the processors are; the text begins with a small letter."""


def bind(mode: str, order: m.WorkerOrder) -> list[str]:
    """Bind this process and its threads, or free them if `mode` is empty. Return a sentence if that is not possible."""
    global _all, _bound
    if mode == _bound:
        return []
    if not hasattr(os, "sched_setaffinity"):
        return ["--numa-binding has no effect here: this system cannot bind processes."]
    if not _bound:
        _all = frozenset(os.sched_getaffinity(0))
    problem, cpus = "", _all
    if mode:
        try:
            cpus = near(mode, order.gpu_addresses, order.local_rank, _all)
        except (UnknownTopologyError, OSError, ValueError) as error:
            problem = f"--numa-binding {mode} has no effect here: {error}."
    _bind_threads(cpus)
    _bound = "" if problem else mode
    return [problem] if problem else []


def _bind_threads(cpus: Cpus) -> None:
    """Bind all threads that have not been bound by others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(int(thread)) == before:
                os.sched_setaffinity(int(thread), cpus)


def near(mode: str, addresses: Collection[str], own: int, allowed: Cpus) -> Cpus:
    """Return the processors for one rank.

    Args:
        mode: `node`, `socket`, `exclusive` or `core-complex`.
        addresses: The PCI addresses of the GPUs of this machine's ranks, by local rank.
        own: The local rank.
        allowed: The processors that this process may use.

    Raises:
        UnknownTopologyError: It says why there are none.
    """
    if not addresses:
        raise UnknownTopologyError("this rank has no GPU")
    nodes = [_node_of_gpu(each) for each in addresses]
    node = nodes[own]
    here = _cpus_of_node(node) & allowed
    if mode == "socket" and here:
        package = _package(min(here))
        parts = (_cpus_of_node(each) & allowed for each in _numbers(_read(SYS / "devices/system/node/possible")))
        here = frozenset().union(*(part for part in parts if part and _package(min(part)) == package))
    if not here:
        raise UnknownTopologyError(f"this process may use none of the processors of NUMA node {node}, where its GPU is")
    place, count = nodes[:own].count(node), nodes.count(node)
    if mode == "exclusive":
        return _share(list(_grouped(here, _core).values()), place, count, node)
    if mode == "core-complex":
        complexes = sorted(_grouped(here, _last_cache).items(), key=lambda each: (-len(each[1]), each[0]))
        return complexes[place % len(complexes)][1]
    return here


def _share(cores: list[Cpus], place: int, count: int, node: int) -> Cpus:
    """Return an equal share of the cores; the first ranks have one more if the cores cannot be divided evenly."""
    each, more = divmod(len(cores), count)
    if not each:
        raise UnknownTopologyError(f"NUMA node {node} has {len(cores)} cores for {count} ranks")
    start = place * each + min(place, more)
    return frozenset().union(*cores[start : start + each + (place < more)])


def _grouped(cpus: Cpus, key: Callable[[int], int]) -> dict[int, Cpus]:
    found = defaultdict[int, set[int]](set)
    for cpu in sorted(cpus):
        found[key(cpu)].add(cpu)
    return {first: frozenset(found[first]) for first in sorted(found)}


# ------------------------------------------------------------------------------------------------ the system's files


def _node_of_gpu(address: str) -> int:
    if not address:
        raise UnknownTopologyError("the driver does not report the PCI address of the GPU")
    return max(0, int(_read(SYS / "bus/pci/devices" / address / "numa_node")))  # -1 where there is one node only


def _cpus_of_node(node: int) -> Cpus:
    return _numbers(_read(SYS / f"devices/system/node/node{node}/cpulist"))


def _package(cpu: int) -> int:
    return int(_read(SYS / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"))


def _core(cpu: int) -> int:
    """Return the first processor of the same core."""
    return min(_numbers(_read(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")))


def _last_cache(cpu: int) -> int:
    """Return the first processor that shares the last cache."""
    caches = (SYS / f"devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")
    levels = [(int(_read(each / "level")), each) for each in caches if _read(each / "type") in {"Unified", "Data"}]
    if not levels:
        raise UnknownTopologyError(f"the system does not report the caches of processor {cpu}")
    return min(_numbers(_read(max(levels)[1] / "shared_cpu_list")))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UnknownTopologyError(f"{path} cannot be read ({error.strerror})") from None


def _numbers(text: str) -> Cpus:
    """Parse a list such as `0-2,4`."""
    found = set[int]()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
