"""Payloads: parcels and values between a real kernel process and real ranks."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from jupyter_distrib.errors import PayloadError, ValueLost
from jupyter_distrib.serialization import payload
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel, returned, round_trip

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel

torch: Any = pytest.importorskip("torch")


def test_arrays_bytes_and_read_only_memory_survive(kernel: Kernel) -> None:
    numpy = pytest.importorskip("numpy")
    array, frozen = numpy.arange(50_000), numpy.arange(50_000)
    frozen.flags.writeable = False
    packed = payload.pack_inputs({"array": array}, {})
    assert len(packed.data) < 1000
    back = kernel.run(
        "array[0] = 9; [array, frozen, text, frozen.flags.writeable]", array=array, frozen=frozen, text=b"x" * 3_000_000
    )
    assert (back[0][0], array[0], back[1].sum(), len(back[2]), back[3]) == (9, 0, array.sum(), 3_000_000, False)


def test_a_long_pickle_stream_travels_in_shared_memory_too() -> None:
    packed = payload.pack_inputs({"text": [str(n) for n in range(200_000)]}, {})
    parcel, fd = payload.to_parcel(packed)
    assert (parcel.data, len(parcel.sizes)) == (b"", 1)
    namespace: dict[str, Any] = {}
    payload.unpack_inputs(*payload.from_parcel(parcel, fd), namespace, device="cpu")
    assert namespace["text"][-1] == "199999"


def test_small_buffers_travel_inline_and_large_ones_in_shared_memory() -> None:
    small, no_fd = payload.to_parcel(payload.pack_inputs({"t": torch.zeros(2000)}, {}))
    assert (no_fd, len(small.inline)) == (None, 1)
    large, fd = payload.to_parcel(payload.pack_inputs({"t": torch.zeros(20_000)}, {}))
    assert fd is not None
    assert (large.inline, large.sizes) == ((), (80_000,))
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_parcel_without_its_memory_says_so() -> None:
    parcel, fd = payload.to_parcel(payload.pack_inputs({"t": torch.zeros(20_000)}, {}))
    assert fd is not None
    os.close(fd)
    with pytest.raises(PayloadError, match="without its shared memory"):
        payload.from_parcel(parcel, None)


def test_a_variable_that_cannot_be_rebuilt_on_the_rank_is_named(kernel: Kernel) -> None:
    kernel.cell("class Bad:\n    def __reduce__(self): return int, ('x',)")
    kind, value = kernel.reply("bad", good=1, bad=kernel["Bad"]())
    assert "PayloadError: `bad` cannot be rebuilt on the rank: ValueError" in kind
    assert isinstance(value, PayloadError)


def test_the_rank_is_told_each_name_before_its_value_is_loaded() -> None:
    names: list[str] = []
    packed = payload.pack_inputs({"a": 1, "b": [2]}, {})
    payload.unpack_inputs(packed.data, packed.buffers, {}, device="cpu", loading=names.append)
    assert names == ["a", "b"]


def test_only_the_items_that_cannot_be_pickled_are_replaced(kernel: Kernel) -> None:
    value = kernel.run("{'gen': (i for i in ()), 'ok': [1], 'f': open('/dev/null')}")
    assert value["ok"] == [1]
    assert value["gen"].type_name == "generator"
    assert value["gen"].short.startswith("<generator")
    assert "pickle" in value["gen"].reason
    assert [type(value[name]) for name in ("gen", "f")] == [payload.Unreturned] * 2
    assert "not returned" in repr(value["gen"])
    with pytest.raises(AttributeError, match="there is no `send` here, since this generator was not returned"):
        value["gen"].send(None)
    assert copy.copy(value["gen"]) == pickle.loads(pickle.dumps(value["gen"])) == value["gen"]


def test_a_value_that_cannot_be_pickled_at_all_is_a_placeholder(kernel: Kernel) -> None:
    value = kernel.run(
        dedent("""\
            class A:
                def __reduce__(self): raise ValueError('no')
                def __repr__(self): 1/0
            A()""")
    )
    assert isinstance(value, payload.Unreturned)
    assert (value.type_name, value.reason) == ("A", "no")
    assert value.short.startswith("<A")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert isinstance(returned((1, deep))[1], payload.Unreturned)


def test_a_value_that_fails_in_the_notebook_is_a_placeholder_too(kernel: Kernel) -> None:
    value = kernel.run(
        dedent("""\
            import sys, types
            m = sys.modules['only_here'] = types.ModuleType('only_here')
            exec('class A: pass', m.__dict__)
            m.A()""")
    )
    assert isinstance(value, payload.Unreturned)
    assert "only_here" in value.reason


def test_a_kept_value_is_found_by_its_key_and_missed_with_a_clear_error() -> None:
    payload.kept_values["r/x"] = value = object()
    try:
        assert payload.kept_value("r/x") is value
    finally:
        del payload.kept_values["r/x"]
    with pytest.raises(ValueLost, match="r/x"):
        payload.kept_value("r/x")


def test_sizes_are_those_of_the_data() -> None:
    numpy = pytest.importorskip("numpy")
    found = payload.sizes(
        {
            "t": torch.zeros(1000),
            "a": numpy.zeros(1000),
            "b": b"x" * 500,
            "m": torch.nn.Linear(100, 100),
            "bad": (i for i in ()),
        }
    )
    assert found["t"] == pytest.approx(4000, rel=0.2)
    assert found["a"] == 8000
    assert found["b"] == pytest.approx(533, abs=10)
    assert found["m"] == pytest.approx(40_400, rel=0.2)
    assert found["bad"] == 0


def test_packing_little_is_quick() -> None:
    inputs = {"a": 1, "b": 2, "c": 3}
    payload.pack_inputs(inputs, {})
    best_s = min(_timed(inputs) for _ in range(200))
    assert best_s < 300e-6  # measured 20 us; the rest is for a busy machine


def _timed(inputs: dict[str, Any]) -> float:
    begun_s = time.perf_counter()
    payload.pack_inputs(inputs, {})
    return time.perf_counter() - begun_s


def _open_files_and_maps() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().count("memfd:jupyter_distrib")
    return len(os.listdir("/proc/self/fd")), maps


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_neither_descriptors_nor_mappings_leak() -> None:
    before = _open_files_and_maps()
    for _ in range(30):
        value = round_trip(t=torch.zeros(50_000), v=[torch.zeros(30_000)])
        value["t"] += 1
        del value
        returned(torch.zeros(50_000))
    gc.collect()
    assert _open_files_and_maps() == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_value_holds_its_mapping_without_a_descriptor_and_lets_go_of_it() -> None:
    before = _open_files_and_maps()
    tensor = round_trip(t=torch.ones(50_000))["t"]
    gc.collect()
    assert _open_files_and_maps() == (before[0], before[1] + 1)
    part = tensor[10:]
    del tensor
    gc.collect()
    assert part.sum() == 49_990
    del part
    gc.collect()
    assert _open_files_and_maps() == before
