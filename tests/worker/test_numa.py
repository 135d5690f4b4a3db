"""Ranks are bound to the processors that torchrun would take."""

from __future__ import annotations

import builtins
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.numa import binding

from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import numa

GPUS = ("0000:1a:00.0", "0000:1b:00.0", "0000:9c:00.0", "0000:9d:00.0", "0000:9e:00.0")
NODES = (0, 0, 2, 2, 2)
CPUS_OF_A_NODE = 12
ALLOWED = frozenset(range(4 * CPUS_OF_A_NODE)) - {3, 30}
MODES = ("node", "socket", "exclusive", "core-complex")


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two sockets with two nodes each; a node has six cores of two threads, four of which share a cache."""
    monkeypatch.setattr(numa, "SYS", tmp_path)
    for address, node in zip(GPUS, NODES, strict=True):
        write(tmp_path / "bus/pci/devices" / address / "numa_node", node)
    write(tmp_path / "devices/system/node/possible", "0-3")
    for node in range(4):
        first = node * CPUS_OF_A_NODE
        write(tmp_path / f"devices/system/node/node{node}/cpulist", f"{first}-{first + 5},{first + 6}-{first + 11}")
        for place in range(CPUS_OF_A_NODE):
            cpu = tmp_path / f"devices/system/cpu/cpu{first + place}"
            write(cpu / "topology/physical_package_id", node // 2)
            write(cpu / "topology/thread_siblings_list", f"{first + place % 6},{first + place % 6 + 6}")
            shared = [0, 1, 2, 3, 6, 7, 8, 9] if place % 6 < 4 else [4, 5, 10, 11]
            for index, (level, kind) in enumerate(((1, "Data"), (1, "Instruction"), (3, "Unified"))):
                write(cpu / f"cache/index{index}/level", level)
                write(cpu / f"cache/index{index}/type", kind)
                write(cpu / f"cache/index{index}/shared_cpu_list", ",".join(str(first + each) for each in shared))
    return tmp_path


def by_torch(mode: str, own: int, system: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the processors that torch takes on this machine."""
    torchs: Any = binding
    real_open, real_list = builtins.open, os.listdir

    def properties(index: int) -> object:
        _, bus, device = GPUS[index].removesuffix(".0").split(":")
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=int(bus, 16), pci_device_id=int(device, 16))

    def moved(path: object) -> object:
        return str(path).replace("/sys/", f"{system}/", 1) if str(path).startswith("/sys/") else path

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", lambda path, *args, **keywords: real_open(moved(path), *args, **keywords))  # type: ignore[arg-type]
        patched.setattr(os, "listdir", lambda path: real_list(moved(path)))  # type: ignore[call-overload]
        patched.setattr(os, "sched_getaffinity", lambda _: set(ALLOWED))
        patched.setattr(torch.cuda, "device_count", lambda: len(GPUS))
        patched.setattr(torch.cuda, "get_device_properties", properties)
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        return torchs._get_logical_cpus_to_bind_to(gpu_index=own, numa_options=options)


@pytest.mark.parametrize("mode", MODES)
def test_the_processors_are_those_that_torchrun_takes(mode: str, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in range(len(GPUS)):
        found = numa.near(mode, GPUS, own, ALLOWED)
        assert found
        assert found == by_torch(mode, own, system, monkeypatch), own


def test_a_machine_with_one_node_has_all_its_processors(system: Path) -> None:
    write(system / "bus/pci/devices" / GPUS[0] / "numa_node", -1)
    assert numa.near("node", GPUS[:1], 0, ALLOWED) == frozenset(range(CPUS_OF_A_NODE)) - {3}


@pytest.mark.parametrize(
    ("mode", "addresses", "allowed", "text"),
    [
        ("node", (), ALLOWED, "this rank has no GPU"),
        ("node", ("",), ALLOWED, "the driver does not report the PCI address of the GPU"),
        ("socket", ("0000:ff:00.0",), ALLOWED, "numa_node cannot be read (No such file or directory)"),
        ("node", GPUS[:1], frozenset({40}), "may use none of the processors of NUMA node 0, where its GPU is"),
        ("exclusive", GPUS[:2], frozenset({0, 6}), "NUMA node 0 has 1 cores for 2 ranks"),
    ],
)
def test_what_cannot_be_found_out_is_said(
    mode: str, addresses: tuple[str, ...], allowed: numa.Cpus, text: str, system: Path
) -> None:
    with pytest.raises(numa.UnknownTopologyError) as error:
        numa.near(mode, addresses, 0, allowed)
    assert text in str(error.value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes")
def test_threads_are_bound_and_freed(system: Path) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor is all that this process may use")
    own = min(allowed)
    write(system / "devices/system/node/node0/cpulist", own)
    order = m.WorkerOrder(
        group="g",
        worker="g.0",
        agent_pid=1,
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        gpu_addresses=GPUS[:1],
    )
    done, ready = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), done.wait()))
    other.start()
    ready.wait()
    assert other.native_id is not None
    try:
        assert numa.bind("node", order) == []
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == {own}
        write(system / "devices/system/node/node0/cpulist", 4096)
        (told,) = numa.bind("socket", order)
        assert told.startswith("--numa-binding socket has no effect here: this process may use none")
        assert os.sched_getaffinity(0) == allowed
    finally:
        done.set()
        other.join()
        numa.bind("", order)
    assert os.sched_getaffinity(0) == allowed
