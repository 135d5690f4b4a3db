"""Values on a device are written into shared memory piece by piece, without a copy of the whole on the host."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from jupyter_distrib.serialization import device_memory, payload, shared_memory, tensors


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages of the CPU are taken for those of a device, of which no whole copy may be made."""
    monkeypatch.setattr(tensors, "is_on_accelerator", lambda _: True)
    monkeypatch.setattr(tensors, "on_host", lambda storage: storage.clone() if storage.nbytes() < 1 << 20 else 1 / 0)


def arrived(value: Any) -> Any:
    parcel, fd = payload.to_parcel(payload.pack_value(value, by_value=False, run="", deferred=True))
    return payload.unpack_value(*payload.from_parcel(parcel, fd))


@pytest.mark.parametrize("step_bytes", [1 << 16, 3 << 18, 64 << 20])
def test_values_arrive_whole_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch, step_bytes: int) -> None:
    monkeypatch.setattr(shared_memory, "STEP_BYTES", step_bytes)
    large = torch.arange(300_001)
    back = arrived({"large": large, "half": large[150_000:], "small": torch.ones(3), "other": large.float()})

    assert torch.equal(back["large"], large)
    assert torch.equal(back["other"], large.float())
    assert back["small"].tolist() == [1.0, 1.0, 1.0]
    back["large"][150_000] = 7
    assert back["half"][0] == 7


def test_until_then_they_take_no_memory_of_the_host() -> None:
    large = torch.ones(100 << 20, dtype=torch.uint8)
    before = resident_bytes()
    packed = payload.pack_value(large, by_value=False, run="", deferred=True)

    assert packed.size_bytes > large.nbytes
    assert resident_bytes() - before < 10 << 20


def test_one_piece_of_the_host_serves_all_that_are_read() -> None:
    storage = torch.arange(1000, dtype=torch.uint8).untyped_storage()
    view = memoryview(device_memory.unread(storage)).cast("B")
    read = device_memory.reader_of(view[10:])
    assert read is not None

    first = read(0, 100)
    assert bytes(first) == bytes(range(100))
    assert bytes(read(200, 50)) == bytes(range(200, 250))
    assert ctypes.addressof(ctypes.c_ubyte.from_buffer(first)) == ctypes.addressof(
        ctypes.c_ubyte.from_buffer(read(0, 9))
    )


def test_what_has_its_own_bytes_has_no_reader() -> None:
    assert device_memory.reader_of(memoryview(b"abc")) is None
    assert device_memory.reader_of(memoryview((ctypes.c_ubyte * 3)()).cast("B")) is None


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
