"""Why something cannot be pickled, by name and path."""

from __future__ import annotations

import io
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import payload, pickle_errors
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel, round_trip

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel

torch: Any = pytest.importorskip("torch")


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class WithSlots:
    __slots__ = ("lock",)

    def __init__(self, lock: Any) -> None:
        self.lock = lock


def generator() -> Iterator[int]:
    yield 1


def problem_of(**inputs: Any) -> tuple[str, str, str]:
    namespace = dict(inputs)
    with pytest.raises(PayloadError):
        payload.pack_inputs(inputs, namespace)
    found = payload.problem(inputs, namespace)
    assert found is not None
    assert found.reason
    return found.name, found.path, found.type_name


def test_a_value_that_is_nested_too_deeply_is_named_as_such() -> None:
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    found = payload.problem({"a": 1, "deep": deep}, {})
    assert found is not None
    assert (found.name, found.path, found.type_name) == ("deep", "deep", "list")
    assert found.reason == "it is nested too deeply"


def test_a_problem_is_named_with_its_path() -> None:
    lock = (i for i in ())
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].extra = lock
    assert problem_of(a=1, loader=Holder(pool=Holder(_lock=lock))) == ("loader", "loader.pool._lock", "generator")
    assert problem_of(lock=lock) == ("lock", "lock", "generator")
    assert problem_of(x=[1, {"k": (lock,)}])[1] == "x[1]['k'][0]"
    assert problem_of(x=WithSlots(lock))[1] == "x.lock"
    assert problem_of(m=module)[1] == "m.0.extra"
    assert problem_of(g=generator())[2] == "generator"
    assert problem_of(e={"s": {lock: 1}})[1] == "e['s'] (a key)"


def test_a_problem_is_found_in_functions_partials_and_bound_methods(kernel: Kernel) -> None:
    import functools

    kernel.cell("""
        import threading
        lock = (i for i in ())
        def uses(): return lock
        def calls(): return uses()
        def make():
            inside = (i for i in ())
            return lambda: inside
        closed = make()
        def defaulted(a=lock): return a
        class A:
            def __init__(self): self.lock = (i for i in ())
            def go(self): pass
        bound = A().go
        class B:
            hidden = (i for i in ())
    """)
    spaces = kernel.namespace
    spaces["part"] = functools.partial(print, spaces["lock"])

    def path(name: str) -> str:
        found = payload.problem({name: spaces[name]}, spaces)
        assert found is not None
        assert found.type_name == "generator"
        return found.path

    assert path("uses") == "uses (global lock)"
    assert path("calls") == "calls (global uses) (global lock)"
    assert path("closed") == "closed (closure variable inside)"
    assert path("defaulted") == "defaulted (a default argument)"
    assert path("bound") == "bound.__self__.lock"
    assert path("part") == "part.args[0]"
    assert path("B") == "B.hidden"


def test_files_sockets_and_databases_are_named_but_standard_streams_travel(tmp_path: Path) -> None:
    import sqlite3

    with (tmp_path / "f").open("w+") as text, (tmp_path / "g").open("wb") as binary, socket.socket() as sock:
        assert problem_of(f=[text])[1:] == ("f[0]", "_io.TextIOWrapper")
        assert problem_of(f=binary)[2] == "_io.BufferedWriter"
        assert problem_of(f=Holder(s=sock))[1:] == ("f.s", "socket.socket")
    database = sqlite3.connect(":memory:")
    assert problem_of(db=database)[2] == "sqlite3.Connection"
    database.close()
    assert round_trip(out=sys.stdout)["out"] is sys.stdout
    assert round_trip(text=io.StringIO("a"))["text"].read() == "a"


@pytest.mark.slow
def test_a_problem_in_something_big_or_deep_is_found_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = (i for i in ())
    for _ in range(5000):
        deep = [deep]
    rows = {"rows": [Holder(n=n) for n in range(20_000)] + [(i for i in ())] + [1] * 100_000}
    with monkeypatch.context() as patient:
        patient.setattr(pickle_errors, "_PATH_TIME_S", 20.0)  # the machine may be busy
        assert problem_of(bad=rows)[1] == "bad['rows'][20000]"
    big = [list(range(1000)) for _ in range(1000)] + [(i for i in ())]
    for value in (deep, big, [Holder(n=n) for n in range(100_000)] + [(i for i in ())]):
        begun_s = time.process_time()
        name, path, _ = problem_of(ok=1, bad=value)
        assert name == "bad"
        assert path.startswith("bad")
        assert time.process_time() - begun_s < 2.5  # two failed pickles of this value included
