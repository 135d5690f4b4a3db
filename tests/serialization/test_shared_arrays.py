"""Arrays that overlap in memory, through a payload."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_distrib.serialization import payload
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("size", [8, 2_000, 300_000])
def test_views_of_one_array_share_memory_on_the_rank_as_in_the_notebook(kernel: Kernel, size: int) -> None:
    whole = np.zeros((size, 2))
    views = {"part": whole[:4], "turned": whole[::-1].T, "alike": whole}
    cell = "part[0] = 1; turned[0, 0] = 2\n(whole[0].tolist(), whole[-1].tolist(), alike is whole, turned.strides)"
    assert kernel.run(cell, whole=whole, **views) == ([1, 1], [2, 0], True, (8, -16))
    assert not whole.any()


def test_tensors_and_arrays_of_one_memory_share_it_on_the_rank(kernel: Kernel) -> None:
    array, tensor = np.zeros(6), torch.zeros(1_000_000)
    given = {"array": array, "over": torch.from_numpy(array), "tensor": tensor, "under": tensor[:4].numpy()}
    cell = "over[1] = 1; under[2] = 2\n(array.tolist(), tensor[:4].tolist(), tensor.sum().item())"
    assert kernel.run(cell, **given) == ([0, 1, 0, 0, 0, 0], [0, 0, 2, 0], 2)


def test_arrays_inside_objects_share_memory_and_keep_what_they_may(kernel: Kernel) -> None:
    whole = np.zeros(6)
    fixed = whole[2:]
    fixed.flags.writeable = False
    cell = "given['all'][3] = 1\n(given['parts'][0].tolist(), given['parts'][0].flags.writeable)"
    assert kernel.run(cell, given={"all": whole, "parts": [fixed]}) == ([0, 1, 0, 0], False)


def test_arrays_that_a_rank_returns_share_memory_in_the_notebook(kernel: Kernel) -> None:
    whole, part = kernel.run("whole = np.zeros(4)\n(whole, whole[1:])", np=np)
    part[0] = 1
    assert whole.tolist() == [0, 1, 0, 0]


def test_a_mapped_file_and_a_view_of_it_share_memory(kernel: Kernel, tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", dtype="int32", mode="w+", shape=(4,))
    cell = "plain[1] = 5\n(mapped.tolist(), type(mapped).__name__)"
    assert kernel.run(cell, mapped=mapped, plain=np.asarray(mapped)) == ([0, 5, 0, 0], "memmap")


def test_memory_that_several_arrays_use_is_sent_once_and_what_none_uses_is_not() -> None:
    large = np.zeros((1000, 1000))
    overlap = payload.pack_inputs({"a": large[:600], "b": large[400:]}, {})
    assert large.nbytes < overlap.size_bytes < large.nbytes + 10_000
    apart = payload.pack_inputs({"a": large[:10], "b": large[900:910]}, {})
    assert apart.size_bytes < large.nbytes // 10
    columns = payload.pack_inputs({"a": large[:, 0], "b": large[:, 1]}, {})
    assert columns.size_bytes < large.nbytes // 10


@pytest.mark.timeout(60)  # if each were compared with all others: two minutes, else half a second
def test_twenty_thousand_rows_of_an_array_take_no_time() -> None:
    large = np.zeros((20_000, 100))
    packed = payload.pack_inputs({"large": large, "rows": list(large)}, {})
    assert large.nbytes < packed.size_bytes < 2 * large.nbytes


def test_arrays_of_objects_and_without_items_stay_as_they_are(kernel: Kernel) -> None:
    objects = np.array([[1], "a"], dtype=object)
    empty = np.zeros((0, 3))
    given = {"objects": objects, "some": objects[:1], "empty": empty, "none": empty[:, :1]}
    assert kernel.run("(objects[0] is some[0], empty.shape, none.shape)", **given) == (True, (0, 3), (0, 1))
