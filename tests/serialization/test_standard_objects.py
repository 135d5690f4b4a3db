"""Objects of the standard library that pickle refuses: locks, open files, and what runs."""

from __future__ import annotations

import array
import bz2
import gzip
import io
import lzma
import os
import queue
import subprocess
import tarfile
import textwrap
import threading
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import payload
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel


def test_a_lock_is_a_new_one_for_each_process_and_one_that_is_held_is_refused(kernel: Kernel) -> None:
    class Counter:
        def __init__(self) -> None:
            self.lock, self.same, self.again = lock, lock, threading.RLock()

    lock = threading.Lock()
    cell = "with c.lock, c.again, c.again: held = c.same.locked()\n(held, c.lock.locked(), lock is c.lock)"
    assert kernel.run(cell, c=Counter(), lock=lock) == (True, False, True)
    assert kernel.run("import threading\nthreading.Lock()").acquire(blocking=False)
    jobs: queue.Queue[int] = queue.Queue()
    jobs.put(3)
    assert kernel.run("jobs.put(4)\n(jobs.get(), jobs.get(), jobs.qsize())", jobs=jobs) == (3, 4, 0)
    with lock, pytest.raises(PayloadError, match="a thread of the notebook holds it"):
        kernel.run("1", lock=lock)


def test_a_file_that_is_read_is_opened_again_at_its_place(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        file.read(4)
        assert kernel.run("(file.read(2), file.name)", file=file) == (b"45", str(path))
        assert file.read(2) == b"45", "the notebook's own stays where it was"
        path.rename(tmp_path / "other")
        with pytest.raises(PayloadError, match=r"its file is not at .*data\.bin any more"):
            kernel.run("1", file=file)
    with pytest.raises(PayloadError, match="the file is closed"):
        kernel.run("1", file=file)
    with path.open("wb") as written, pytest.raises(PayloadError, match=r"data\.bin is open for writing"):
        kernel.run("1", file=written)


@pytest.mark.parametrize("newline", [None, "", "\n", "\r\n"])
def test_a_text_file_that_is_read_is_opened_again_at_its_place(
    kernel: Kernel, tmp_path: Path, newline: str | None
) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes("één\r\ntwo\r\nthree\nfour".encode("latin-1"))
    with path.open(encoding="latin-1", newline=newline) as file:
        first = file.readline()
        on_rank = kernel.run("(file.readlines(), file.name, file.encoding)", file=file)
        assert on_rank == (file.readlines(), str(path), "latin-1")
        assert first.startswith("één")
    with path.open(encoding="latin-1") as file:
        next(file)
        with pytest.raises(PayloadError, match=r"data\.csv is read line by line"):
            kernel.run("1", file=file)
    for mode in ("a", "r+"):
        with path.open(mode) as written, pytest.raises(PayloadError, match=r"data\.csv is open for writing"):
            kernel.run("1", file=written)
    with pytest.raises(PayloadError, match="the file is closed"):
        kernel.run("1", file=file)


@pytest.mark.parametrize("module", [bz2, gzip, lzma])
def test_a_compressed_file_that_is_read_is_opened_again_at_its_place(
    kernel: Kernel, tmp_path: Path, module: Any
) -> None:
    path = tmp_path / "data.z"
    with module.open(path, "wb") as file:
        file.write(b"0123456789")
        with pytest.raises(PayloadError, match=r"data\.z is open for writing"):
            kernel.run("1", file=file)
    with module.open(path) as file, module.open(path, "rt") as text:
        file.read(3)
        text.read(4)
        assert kernel.run("(file.read(2), text.read(2))", file=file, text=text) == (b"34", "45")
        assert file.read(2) == b"34", "the notebook's own stays where it was"


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_a_reader_of_a_pipe_is_not_said_to_have_a_place(kernel: Kernel, mode: str) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with open(reading, mode) as file, pytest.raises(PayloadError, match="it does not read a file with a path"):
        kernel.run("1", file=file)


def test_a_compressed_file_of_a_class_of_the_notebook_is_refused(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "data.gz").write_bytes(gzip.compress(b"x"))
    kernel.cell(f"""
        import gzip
        class Own(gzip.GzipFile): pass
        file = Own({str(tmp_path / "data.gz")!r})
    """)
    with pytest.raises(PayloadError, match=r"a rank opens files of gzip\.GzipFile itself only"):
        kernel.run("file.read()")
    kernel.cell("file.close()")


def test_readers_of_memory_come_with_what_they_read(kernel: Kernel) -> None:
    inner: Any = io.BytesIO(b"abcdef")
    binary: io.BufferedReader = io.BufferedReader(inner)
    text = io.TextIOWrapper(io.BytesIO(b"abcdef"))
    binary.read(2)
    text.read(3)
    assert kernel.run("(binary.read(2), text.read(2))", binary=binary, text=text) == (b"cd", "de")


def test_a_weak_reference_to_a_method_is_alive_as_long_as_its_object(kernel: Kernel) -> None:
    kernel.cell("""
        import weakref
        class Thing:
            def five(self): return 5
        thing, lost = Thing(), Thing()
        alive, dead = weakref.WeakMethod(thing.five), weakref.WeakMethod(lost.five)
        del lost
    """)
    assert kernel.run("(alive()(), alive().__self__ is thing, dead())") == (5, True, None)
    assert kernel.run("alive()()") == 5


def test_weak_references_in_a_value_refer_to_its_parts(kernel: Kernel) -> None:
    parent, refs, lost = kernel.run("""
        import weakref
        class Node:
            def __init__(self, parent=None):
                self.children, self.parent = [], parent and weakref.ref(parent)
                self.known = weakref.WeakSet([parent] if parent else ())
        root = Node()
        root.children.append(Node(root))
        root, weakref.WeakValueDictionary(r=root), weakref.ref(Node())""")
    (child,) = parent.children
    assert child.parent() is parent
    assert list(child.known) == [parent]
    assert type(refs) is weakref.WeakValueDictionary
    assert dict(refs) == {"r": parent}
    assert lost() is None


def test_archives_that_are_read_are_opened_again(kernel: Kernel, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    np.savez(tmp_path / "x.npz", a=np.arange(3), b=np.ones(2))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("name", "text")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "x.zip", "inside")
    given = {"x": np.load(tmp_path / "x.npz"), "z": zipfile.ZipFile(tmp_path / "x.zip")}
    given["t"] = tarfile.open(tmp_path / "x.tar")  # noqa: SIM115
    cell = "(x['a'].tolist(), sorted(x.files), z.read('name'), t.getnames())"
    assert kernel.run(cell, **given) == ([0, 1, 2], ["a", "b"], b"text", ["inside"])
    for each in given.values():
        each.close()


def test_a_view_is_one_over_the_same_memory(kernel: Kernel) -> None:
    """cloudpickle sends its bytes."""
    data = bytearray(range(12))
    numbers = array.array("i", range(6))
    given = {
        "data": data,
        "whole": memoryview(data),
        "part": memoryview(data)[2:6],
        "every_other": memoryview(data)[::2],
        "fixed": memoryview(b"abc"),
        "table": memoryview(numbers).cast("B").cast("i", (2, 3)),
        "numbers": numbers,
    }
    assert kernel.run("""
        whole[0] = 9
        table[1, 2] = 7
        part[0] = 8
        data[0], numbers[5], part.tolist(), every_other.tolist(), fixed.readonly, fixed.tobytes(), table.shape""", **given) == (
        9, 7, [8, 3, 4, 5], [0, 2, 4, 6, 8, 10], True, b"abc", (2, 3)
    )  # fmt: skip
    assert data[0] == 0, "the notebook's own stays as it was"


def test_a_view_comes_back_as_one_of_the_same_numbers(kernel: Kernel) -> None:
    numbers, fixed, part, table = kernel.run("""
        import array
        data = array.array("d", [1.5, 2.5])
        (memoryview(data), memoryview(b"abc"), memoryview(bytearray(b"abcdef"))[::2],
         memoryview(array.array("i", range(6))).cast("B").cast("i", (2, 3)))""")
    assert (numbers.tolist(), numbers.readonly) == ([1.5, 2.5], False)
    assert (fixed.tobytes(), fixed.readonly) == (b"abc", True)
    assert part.tobytes() == b"ace"
    assert table.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_accessors_of_the_users_own_classes_are_sent_and_come_back(kernel: Kernel) -> None:
    source = """
        import threading
        class classproperty(property):
            def __new__(cls, fget): return super().__new__(cls, fget)
            def __get__(self, obj, cls): return self.fget(cls)
        class lazy(property):
            __slots__ = ("key", "__dict__")
            def __init__(self, function, key="k"):
                super().__init__(function)
                self.key, self.lock = key, threading.Lock()
            def __get__(self, obj, cls=None):
                if obj is None: return self
                with self.lock: return self.key, self.fget(obj)
        class noted(staticmethod):
            def __init__(self, function):
                super().__init__(function)
                self.note = "n"
        class counted(classmethod): pass
        class A:
            @classproperty
            def name(cls): "doc"; return cls.__name__
            @lazy
            def value(self): return 7
            @noted
            def static(): return "s"
            @counted
            def of_class(cls): return cls.__name__
    """
    cell = "(A.name, A().value, A.static(), vars(A)['static'].note, A.of_class(), vars(A)['name'].__doc__)"
    kernel.cell(source)
    expected = ("A", ("k", 7), "s", "n", "A", "doc")
    assert kernel.run(cell) == expected
    made = kernel.run(f"{textwrap.dedent(source)}\nA")
    assert made is not kernel.namespace["A"]
    assert eval(cell, {"A": made}) == expected


def test_a_vectorized_function_that_has_been_called_is_sent(kernel: Kernel) -> None:
    pytest.importorskip("numpy")
    kernel.cell("""
        import numpy as np
        class Labelled(np.vectorize):
            label = "twice"
        twice = Labelled(lambda number: 2 * number, otypes=[float])
        twice.unit = "m"
        twice([1, 2])
    """)
    assert kernel.run("(twice([1, 2]).tolist(), twice.label, twice.unit)") == ([2.0, 4.0], "twice", "m")


def test_a_class_made_from_vectorize_is_sent_with_all_that_it_has(kernel: Kernel) -> None:
    pytest.importorskip("numpy")
    kernel.cell("""
        import numpy as np
        class Power(np.vectorize):
            def __init__(self, k):
                self._k = k
                super().__init__(lambda number: number**k, otypes=[float], doc="A power.")
        class Scaled(np.vectorize):
            def __init__(self, k):
                self.k = k
                super().__init__(self.scale, signature="(),()->()")
            def scale(self, number, other):
                return self.k * number + other
        power, scaled = Power(3), Scaled(3)
        power([1, 2]), scaled([1, 2], 1)
    """)
    assert kernel.run("(power([1, 2]).tolist(), power._k, power.__doc__)") == ([1.0, 8.0], 3, "A power.")
    assert kernel.run("(scaled([1, 2], 1).tolist(), scaled.pyfunc.__self__ is scaled)") == ([4, 7], True)


def test_what_runs_in_the_notebook_stays_there(kernel: Kernel) -> None:
    with ThreadPoolExecutor(1) as threads, subprocess.Popen(["true"]) as process:
        for value in (threads, threads.submit(int), process, threading.Thread(), threading.Timer(1, print)):
            with pytest.raises(PayloadError, match=r"in the cell|in an earlier cell"):
                kernel.run("1", value=value)


def test_an_exit_in_the_users_getstate_is_an_error_of_the_value(kernel: Kernel) -> None:
    kernel.cell("""
        class Leaving:
            def __getstate__(self): raise SystemExit("bye")
        holder = {"one": Leaving()}
    """)
    with pytest.raises(PayloadError, match="cannot be sent to the ranks: bye"):
        kernel.run("holder")
    found = payload.problem({"holder": kernel["holder"]}, kernel.namespace)
    assert found is not None
    assert (found.path, found.reason) == ("holder['one']", "pickling it raises SystemExit: bye")
