"""A rank's GPU, with feigned answers of CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.framework import DeviceState
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import process_group, pytorch
from jupyter_distrib.worker.pytorch.pytorch import Device


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """What CUDA was asked, and in which thread."""
    asked: dict[str, list[object]] = {"set_device": [], "empty_cache": []}
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: asked["set_device"].append((str(at), _thread())))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked["empty_cache"].append(_thread()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return asked


def _thread() -> str:
    return threading.current_thread().name


def test_the_thread_that_waits_has_the_ranks_gpu(asked: dict[str, list[object]]) -> None:
    assert Device("cuda:3").drain(5.0) == DeviceState()
    assert asked["set_device"] == [("cuda:3", "jupyter_distrib-drain")]


def test_an_error_of_cuda_is_reported_by_its_first_line(asked: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ...")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    error = "CUDA error: an illegal memory access was encountered"
    assert Device("cuda:0").drain(5.0) == DeviceState(drained=False, error=error)


def test_work_that_does_not_end_is_not_waited_for(asked: object, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", over.wait)

    assert Device("cuda:0").drain(0.01) == DeviceState(drained=False)
    over.set()


def test_a_cpu_rank_asks_nothing(asked: dict[str, list[object]]) -> None:
    cpu = Device("")
    cpu.make_current()
    cpu.release_memory()

    assert cpu.drain(5.0) == DeviceState()
    assert asked == {"set_device": [], "empty_cache": []}


def test_a_device_of_another_kind_is_asked_by_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    xpu = SimpleNamespace(
        set_device=lambda at: taken.append(str(at)),
        synchronize=lambda: taken.append("synchronize"),
        empty_cache=lambda: taken.append("empty_cache"),
        memory_allocated=lambda: 1 << 30,
        memory_reserved=lambda: 3 << 30,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"xpu": xpu}[torch.device(name).type])
    own = Device("xpu:1")

    assert own.drain(5.0) == DeviceState()
    assert own.memory() == (1 << 30, 3 << 30)
    own.release_memory()
    assert taken == ["xpu:1", "synchronize", "empty_cache"]
    assert process_group.default_backend(torch.device("xpu:1")) == "cpu:gloo,xpu:xccl"


@pytest.mark.parametrize(("reserved", "emptied"), [(3 << 30, 1), ((2 << 30) + 1, 1), (2 << 30, 0)])
def test_much_memory_in_reserve_is_given_back(
    asked: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch, reserved: int, emptied: int
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 30)

    Device("cuda:0").release_memory()

    assert len(asked["empty_cache"]) == emptied
    assert pytorch.RELEASE_BYTES == 1 << 30


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_that_is_warmed_has_multiplied_and_no_memory_is_taken(
    asked: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    done: list[str] = []

    def ones(*size: int, device: str) -> object:
        if fails:
            raise torch.OutOfMemoryError
        return device

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch, "mm", lambda one, other: done.append(f"{one} @ {other}"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("cleared"), raising=False)

    Device("cuda:1").warm()

    assert done == ([] if fails else ["cuda:1 @ cuda:1", "cleared"])
    assert len(asked["empty_cache"]) == len(done) // 2


@pytest.fixture
def gpu_rank() -> Iterator[None]:
    order = m.WorkerOrder(
        group="g",
        worker="w",
        agent_pid=1,
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        device="cuda:0",
        visible_devices="0",
    )
    with identity.assumed(order):
        yield


def test_gpu_ranks_have_defaults_for_nccl_that_the_user_overrides(gpu_rank: None) -> None:
    ours = identity.with_defaults({})
    names = ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    assert [ours[name] for name in names] == ["0", "0", "0"]

    assert identity.with_defaults({names[0]: "1"})[names[0]] == "1"
    assert names[1] not in identity.with_defaults({"NCCL_ASYNC_ERROR_HANDLING": "3"})


def test_nccl_uses_the_interface_of_that_name_alone(gpu_rank: None) -> None:
    """NCCL takes a name for the beginning of one, gloo does not: eth1 would mean eth10 for one of the two."""
    ours = identity.with_defaults({})
    assert (ours["NCCL_SOCKET_IFNAME"], ours["GLOO_SOCKET_IFNAME"]) == ("=lo", "lo")
    assert identity.with_defaults({"NCCL_SOCKET_IFNAME": "ib0"})["NCCL_SOCKET_IFNAME"] == "ib0"
