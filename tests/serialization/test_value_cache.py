"""What is sent again and what is not, and that a rank always gets the values as they are when they are sent."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jupyter_distrib.kernel.session.cell_order import Outgoing
from jupyter_distrib.serialization import payload, shared_memory, value_cache
from jupyter_distrib.serialization.value_cache import LARGE_BYTES, ValueCache

MB = 1_000_000
LIMIT = 100 * MB


class Kernel:
    """The values of a notebook, and what a rank gets of them."""

    def __init__(self, limit_bytes: int | None = LIMIT) -> None:
        self.cache = ValueCache()
        self.limit_bytes = limit_bytes
        self.written = 0
        """The number of bytes that the last cell wrote into shared memory."""
        self.parcel: Any = None

    def send(self, **inputs: object) -> dict[str, Any]:
        packed = payload.pack_inputs(inputs, {})
        with closing(Outgoing(packed, self.cache, self.limit_bytes)) as outgoing:
            self.written = sum(view.nbytes for view in outgoing._layout.new)
            outgoing.fill()
            self.parcel = outgoing.parcel
            fd, *more = outgoing.descriptors().take() or (None,)
        namespace: dict[str, Any] = {}
        payload.unpack_inputs(*payload.from_parcel(self.parcel, fd, more), namespace, device="cpu")
        return namespace


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.cache.clear()


def sent(kernel: Kernel, **inputs: object) -> int:
    kernel.send(**inputs)
    return kernel.written


def numbers(size_bytes: int = 2 * MB, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, size_bytes, dtype=np.uint8)


def test_an_unchanged_array_is_sent_once(kernel: Kernel) -> None:
    x = numbers()
    assert [sent(kernel, x=x) for _ in range(3)] == [2 * MB, 0, 0]
    assert np.array_equal(kernel.send(x=x)["x"], x)


def test_an_equal_array_in_another_place_is_not_sent_again(kernel: Kernel) -> None:
    x = numbers()
    kernel.send(x=x)
    assert sent(kernel, y=x.copy()) == 0


@pytest.mark.parametrize("at", [0, 1, 31, 1_000_007, 2 * MB - 1])
def test_a_change_of_one_byte_is_sent(kernel: Kernel, at: int) -> None:
    x = numbers()
    kernel.send(x=x)
    x[at] ^= 1
    assert kernel.send(x=x)["x"][at] == x[at]
    assert kernel.written == 2 * MB


def test_values_below_a_megabyte_go_as_they_did(kernel: Kernel) -> None:
    x = numbers(LARGE_BYTES - 1)
    for _ in range(2):
        assert sent(kernel, x=x) == LARGE_BYTES - 1
        assert not kernel.parcel.segments
        assert not kernel.parcel.kept
    assert kernel.cache.size_bytes == 0


def test_small_values_beside_a_large_one_are_sent_and_not_kept(kernel: Kernel) -> None:
    x, y = numbers(), numbers(500_000)
    kernel.send(x=x, y=y)
    y += 1
    got = kernel.send(x=x, y=y)
    assert np.array_equal(got["y"], y)
    assert np.array_equal(got["x"], x)
    assert kernel.written == 500_000
    assert kernel.cache.size_bytes < 2 * MB + 4096


def test_what_a_cell_writes_is_not_seen_by_the_next(kernel: Kernel) -> None:
    x = numbers()
    for _ in range(3):
        got = kernel.send(x=x)["x"]
        assert np.array_equal(got, x)
        got[:] = 7
    assert np.array_equal(kernel.send(x=x)["x"], x)


def test_two_equal_arrays_of_a_cell_stay_two(kernel: Kernel) -> None:
    x = numbers()
    kernel.send(x=x)
    got = kernel.send(x=x, y=x.copy())
    assert kernel.written == 0
    got["x"][5] = got["x"][5] + 1
    assert got["y"][5] == x[5]


def test_views_of_one_tensor_stay_views_of_one_storage(kernel: Kernel) -> None:
    base = torch.arange(500_000)
    for _ in range(2):
        got = kernel.send(a=base[:250_000], b=base[250_000:])
        got["a"][0] = 5
        assert got["a"].untyped_storage().data_ptr() == got["b"].untyped_storage().data_ptr()
    assert kernel.written == 0


def test_one_large_array_of_many_is_sent_alone(kernel: Kernel) -> None:
    arrays = {f"x{number}": numbers(seed=number) for number in range(5)}
    kernel.send(**arrays)
    arrays["x3"][1] ^= 1
    got = kernel.send(**arrays)
    assert kernel.written == 2 * MB
    assert all(np.array_equal(got[name], array) for name, array in arrays.items())
    assert sent(kernel, **arrays) == 0
    assert sent(kernel, x2=arrays["x2"]) == 0


def test_a_mapped_file_is_sent_once_whatever_else_changes(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(numbers().tobytes())
    x = np.memmap(tmp_path / "data", dtype=np.uint8, mode="r")
    for rate in range(3):
        got = kernel.send(x=x, rate=rate)
        assert got["rate"] == rate
        assert type(got["x"]) is np.memmap
        assert np.array_equal(got["x"], numbers())
        got["x"][0] = 1
    assert kernel.written == 0
    with (tmp_path / "data").open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"\0\1")
    assert list(kernel.send(x=x)["x"][1_234_567:1_234_569]) == [0, 1]


def test_memory_is_bounded_and_what_was_used_longest_ago_goes_first() -> None:
    kernel = Kernel(limit_bytes=7 * MB)
    x, y, z = (numbers(seed=seed) for seed in range(3))
    for array in (x, y, z, x):
        kernel.send(v=array)
    assert kernel.cache.size_bytes < 7 * MB
    assert sent(kernel, v=numbers(seed=3)) == 2 * MB  # y goes
    assert [sent(kernel, v=v) for v in (z, x)] == [0, 0]
    assert sent(kernel, v=y) == 2 * MB
    kernel.cache.clear()
    assert kernel.cache.size_bytes == 0


def test_what_is_larger_than_the_limit_is_sent_each_time() -> None:
    kernel = Kernel(limit_bytes=MB)
    x = numbers()
    assert [sent(kernel, x=x) for _ in range(2)] == [2 * MB, 2 * MB]
    assert kernel.cache.size_bytes == 0


def test_a_limit_of_nothing_frees_what_was_kept(kernel: Kernel) -> None:
    x = numbers()
    kernel.send(x=x)
    kernel.limit_bytes = 0
    assert [sent(kernel, x=x) for _ in range(2)] == [2 * MB, 2 * MB]
    assert kernel.cache.size_bytes == 0


def test_an_array_that_changes_in_place_takes_memory_once(kernel: Kernel) -> None:
    x = numbers()
    for _ in range(5):
        x += 1
        kernel.send(x=x)
    assert kernel.cache.size_bytes < 3 * MB


@pytest.mark.parametrize(
    ("total", "free", "memory", "limit"),
    [(80, 80, 1000, 20), (800, 800, 100, 25), (80, 5, 1000, 5), (80, 0, 1000, 0), (0, 0, 1000, 0)],
)
def test_the_machine_s_own_limit(
    monkeypatch: pytest.MonkeyPatch, total: int, free: int, memory: int, limit: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))
    monkeypatch.setattr(value_cache, "free_memory_bytes", lambda: memory)
    assert value_cache.own_limit_bytes() == limit


def test_without_dev_shm_everything_is_sent_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> object:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    kernel, x = Kernel(limit_bytes=None), numbers()
    assert [sent(kernel, x=x) for _ in range(2)] == [2 * MB, 2 * MB]


def test_memory_of_others_is_not_opened_and_ours_is_sealed(kernel: Kernel) -> None:
    before = set(os.listdir("/dev/shm"))
    kernel.send(x=numbers())
    assert set(os.listdir("/dev/shm")) == before
    (segment,) = kernel.cache._segments.values()
    assert shared_memory.is_sealed(segment.fd)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"planted", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, segment.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)


def test_a_file_cut_short_does_not_kill_the_kernel(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(numbers().tobytes())
    x = np.memmap(tmp_path / "data", dtype=np.uint8, mode="r")
    kernel.send(x=x)
    os.truncate(tmp_path / "data", MB)
    with pytest.raises(OSError, match="Bad address"):
        kernel.send(x=x)


def test_a_process_that_can_open_nothing_more_sends_everything(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = numbers(), numbers(10)
    kernel.send(x=x, y=y)

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", refuse)
        for _ in range(2):
            got = kernel.send(x=x, y=y)
            assert np.array_equal(got["x"], x)
            assert kernel.written >= 2 * MB
    assert [sent(kernel, x=x) for _ in range(2)] == [2 * MB, 0]


# --------------------------------------------------------------------------------------------------- never stale

Change = Callable[[random.Random], object]


class Values:
    """Values of all kinds, and ways to change them in place."""

    def __init__(self, folder: Path) -> None:
        size = 1_200_000
        self.array = numbers(size)
        self.base = numbers(3 * size, seed=1)
        self.part = self.base[size : 2 * size]
        self.read_only = numbers(size, seed=2)
        self.writable = self.read_only
        self.read_only = self.read_only.view()
        self.read_only.flags.writeable = False
        self.strided = numbers(2 * size, seed=3)[::2]
        self.columns = np.asfortranarray(numbers(size, seed=4).reshape(1200, 1000))
        self.tensor = torch.from_numpy(numbers(size, seed=5).copy())
        self.of_tensor = self.tensor.view(1000, -1).t()
        self.shared = torch.from_numpy(self.array)
        self.file = folder / "data"
        self.file.write_bytes(numbers(size, seed=6).tobytes())
        self.mapped = np.memmap(self.file, dtype=np.uint8, mode="r")
        self.array_of_file = np.asarray(self.mapped)
        self.private = np.memmap(self.file, dtype=np.uint8, mode="c")
        self.words = bytearray(numbers(size, seed=7).tobytes())
        self.frame = {"a": [numbers(size, seed=8), "text"], "list": list(range(400_000))}
        self.equal = self.array.copy()

    def inputs(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("file", "writable", "base")}

    def change(self, draw: random.Random) -> None:
        kinds: list[Change] = [
            lambda draw: self._in(self.array, draw),
            lambda draw: self._in(self.base, draw),
            lambda draw: self._in(self.part, draw),
            lambda draw: self._in(self.writable, draw),
            lambda draw: self._in(self.strided, draw),
            lambda draw: self._in(self.columns[:, draw.randrange(1000)], draw),
            lambda draw: self._in(self.tensor.numpy(), draw),
            lambda draw: self._in(self.of_tensor.numpy(), draw),
            lambda draw: self.shared.__iadd__(1),
            self._write_file,
            lambda draw: self._in(self.private, draw),
            lambda draw: self._in(np.frombuffer(self.words, np.uint8), draw),
            lambda draw: self._in(self.frame["a"][0], draw),  # type: ignore[arg-type]
            lambda draw: self.frame["list"].__setitem__(draw.randrange(400_000), draw.random()),
            lambda draw: setattr(self, "array", self.equal.copy()),
            lambda draw: setattr(self, "equal", self.array.copy()),
            lambda draw: setattr(self, "part", self.base[(at := draw.randrange(MB)) : at + 1_200_000]),
        ]
        draw.choice(kinds)(draw)

    @staticmethod
    def _in(array: np.ndarray[Any, Any], draw: random.Random) -> None:
        at = np.unravel_index(draw.randrange(array.size), array.shape)
        array[at] = (int(array[at]) + draw.randrange(1, 255)) % 256

    def _write_file(self, draw: random.Random) -> None:
        with self.file.open("r+b") as file:
            file.seek(draw.randrange(1_200_000))
            file.write(bytes([draw.randrange(256)]))


def assert_equal(got: object, wanted: object) -> None:
    if isinstance(wanted, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, wanted)
    elif isinstance(wanted, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert np.array_equal(got, wanted)
    elif isinstance(wanted, dict):
        assert isinstance(got, dict)
        assert_equal(got["a"][0], wanted["a"][0])
        assert got["list"] == wanted["list"]
    else:
        assert got == wanted


def spoil(got: dict[str, Any]) -> None:
    """What a cell may do with its values."""
    for value in got.values():
        if isinstance(value, torch.Tensor):
            value.fill_(9)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            value[...] = 9


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("limit", [LIMIT, 6 * MB])
def test_no_value_is_ever_stale(tmp_path: Path, seed: int, limit: int) -> None:
    draw, values = random.Random(seed), Values(tmp_path)
    notebooks = [Kernel(limit), Kernel(limit)]
    saved = 0
    for _ in range(25):
        for _ in range(draw.randrange(3)):
            values.change(draw)
        names = draw.sample(sorted(values.inputs()), draw.randrange(1, 8))
        inputs = {name: values.inputs()[name] for name in names}
        kernel = draw.choice(notebooks)
        got = kernel.send(**inputs)
        saved += sum(kernel.parcel.sizes) - kernel.written
        for name, value in inputs.items():
            assert_equal(got[name], value)
        spoil(got)
        del got
    assert saved > 0
    for kernel in notebooks:
        assert kernel.cache.size_bytes <= limit
        kernel.cache.clear()
    gc.collect()


def test_a_change_while_the_values_are_hashed_ahead_is_seen(kernel: Kernel) -> None:
    x = numbers(20 * MB)
    kernel.send(x=x)
    x[3] ^= 1
    kernel.cache.tidy()
    assert kernel.send(x=x)["x"][3] == x[3]
    assert kernel.written == 20 * MB
