"""Arrays over files that the notebook has mapped to read, through a payload and on real ranks."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import payload
from tests.notebook import Notebook

np = pytest.importorskip("numpy")

LENGTH = 600_000
PLAIN_BYTES = 4 * LENGTH


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "Trainingsdaten für 2026.bin"
    np.arange(LENGTH, dtype=np.int32).tofile(path)
    return path


def packed(array: Any, *, reads_files: bool = True) -> payload.Packed:
    return payload.pack_inputs({"x": array}, {}, reads_files=lambda: reads_files)


def rebuilt(sent: payload.Packed) -> Any:
    namespace: dict[str, Any] = {}
    payload.unpack_inputs(sent.data, [memoryview(bytearray(view)) for view in sent.buffers], namespace, device="cpu")
    return namespace["x"]


@pytest.mark.parametrize("offset", [0, 400])
def test_a_file_is_mapped_again_and_so_is_each_view_of_it(file: Path, offset: int) -> None:
    whole = np.memmap(file, np.int32, "r", offset)
    table = whole[: LENGTH // 2].reshape(1000, -1)
    for array in (whole, whole[100:], whole[::-1], table.T[::2, 5:], whole.view(np.uint8)[3:]):
        sent = packed(array)
        assert sent.size_bytes < 1000
        got = rebuilt(sent)
        assert type(got) is np.memmap
        assert (got.shape, got.strides, got.dtype, got.mode) == (array.shape, array.strides, array.dtype, "r")
        assert np.array_equal(got, array)
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 1


def test_a_file_of_numpy_itself_is_mapped_too(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(LENGTH, dtype=np.int32))
    sent = packed(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert sent.size_bytes < 1000
    assert rebuilt(sent)[-1] == LENGTH - 1


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_an_array_that_can_be_written_is_copied(file: Path, mode: str) -> None:
    array = np.memmap(file, np.int32, mode)
    array[5] = 7
    sent = packed(array)
    assert sent.size_bytes > PLAIN_BYTES
    assert rebuilt(sent)[5] == 7


def test_what_other_machines_get_and_what_is_small_is_copied(file: Path) -> None:
    array = np.memmap(file, np.int32, "r")
    assert packed(array, reads_files=False).size_bytes > PLAIN_BYTES
    assert packed(array[:1000]).size_bytes > 4000


@pytest.mark.parametrize("gone", ["removed", "replaced"])
def test_a_file_that_is_no_longer_at_its_path_is_copied(file: Path, gone: str) -> None:
    array = np.memmap(file, np.int32, "r")
    file.unlink()
    if gone == "replaced":
        np.zeros(LENGTH, np.int32).tofile(file)
    sent = packed(array)
    assert sent.size_bytes > PLAIN_BYTES
    assert rebuilt(sent)[5] == 5


def test_a_file_that_was_renamed_is_found(file: Path, tmp_path: Path) -> None:
    array = np.memmap(file, np.int32, "r")
    file.rename(tmp_path / "other")
    np.zeros(LENGTH, np.int32).tofile(file)
    assert packed(array).size_bytes < 1000
    assert rebuilt(packed(array))[5] == 5


def test_a_file_that_is_replaced_on_the_way_is_named(file: Path) -> None:
    sent = packed(np.memmap(file, np.int32, "r"))
    other = file.with_name("new")
    np.zeros(LENGTH, np.int32).tofile(other)
    other.rename(file)
    with pytest.raises(PayloadError, match=r"`x` .* FileNotFoundError: .*2026\.bin has been replaced since"):
        rebuilt(sent)


@pytest.mark.slow
def test_ranks_read_files_that_are_larger_than_the_memory(shared_notebook: Notebook, tmp_path: Path) -> None:
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(1 << 40)
        os.pwrite(file.fileno(), b"\7", (1 << 40) - 1)
    setup = f"""
        import numpy as np
        from jupyter_distrib import distributed
        tokens = np.memmap({str(tmp_path / "train.bin")!r}, np.uint8, "r")

        class Tokens:
            def __init__(self, data):
                self.data = data

        held = Tokens(tokens[1:])

        @distributed(ranks=2)
        def last(data):
            return int(data[-1])
        """
    shared_notebook.ok(textwrap.dedent(setup))
    cell = "%%distributed --ranks 2\nlen(tokens), int(held.data[-1]), tokens.mode"
    assert shared_notebook.ok(cell).result == f"ranks 0-1: ({1 << 40}, 7, 'r')"
    assert "1.1 TB" not in shared_notebook.ok(f"{cell}".replace("--ranks 2", "--ranks 2 --explain")).text
    assert shared_notebook.ok("[*last.distributed(tokens)]").result == "[7, 7]"
    assert shared_notebook.ok("run = last.submit(tokens)\n[*run.result()]").result == "[7, 7]"
