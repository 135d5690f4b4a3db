"""For tests of payloads: two real ranks, and this process as a kernel, its `__main__` replaced by a notebook."""

from __future__ import annotations

import ast
import os
import pickle
import socket
import struct
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.serialization import payload

RANK_SOURCE = """
import ast, os, pickle, socket, struct, sys, types
sys.path[:0] = [p for p in os.environ["RANK_PATH"].split(os.pathsep) if p]
from jupyter_distrib.serialization import exceptions, payload

def receive(link):
    head, fds, _, _ = socket.recv_fds(link, 12, 1)
    size, rank = struct.unpack("!QI", head)
    data = b""
    while len(data) < size:
        data += link.recv(size - len(data))
    return pickle.loads(data), (fds or [None])[0]

def send(link, message, fd):
    data = pickle.dumps(message)
    socket.send_fds(link, [struct.pack("!QI", len(data), 0)], [] if fd is None else [fd])
    link.sendall(data)
    if fd is not None:
        os.close(fd)

def execute(order, fd):
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    namespace = module.__dict__
    namespace["rank"] = order["rank"]
    payload.unpack_inputs(*payload.from_parcel(order["parcel"], fd), namespace, device="cpu")
    tree = ast.parse(order["cell"])
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "Cell In[1]", "exec"), namespace)
    return eval(compile(last, "Cell In[1]", "eval"), namespace) if last else None

link = socket.socket(fileno=int(sys.argv[1]))
while True:
    try:
        order, fd = receive(link)
    except (struct.error, EOFError):
        break
    how = dict(by_value=order["by_value"], run=order["run"])
    try:
        kind, packed = "value", payload.pack_value(execute(order, fd), **how)
    except BaseException as error:
        kind, packed = f"error {type(error).__name__}: {error}", exceptions.pack_exception(error, **how)
    parcel, fd = payload.to_parcel(packed) if packed is not None else (None, None)
    send(link, (kind, parcel), fd)
    packed = None
"""


class Rank:
    """A process that executes cells."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.link, theirs = socket.socketpair()
        path = os.pathsep.join((str(Path(payload.__file__).parents[2]), str(Path(__file__).parent)))
        command = [sys.executable, "-c", RANK_SOURCE, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "RANK_PATH": path, "OMP_NUM_THREADS": "1"}
        )
        theirs.close()

    def run(self, cell: str, packed: payload.Packed, run: str, by_value: bool) -> tuple[str, Any]:
        parcel, fd = payload.to_parcel(packed)
        order = {"rank": self.number, "parcel": parcel, "cell": textwrap.dedent(cell), "run": run, "by_value": by_value}
        data = pickle.dumps(order)
        socket.send_fds(self.link, [struct.pack("!QI", len(data), 0)], [] if fd is None else [fd])
        self.link.sendall(data)
        if fd is not None:
            os.close(fd)
        head, fds, _, _ = socket.recv_fds(self.link, 12, 1)
        size = struct.unpack("!QI", head)[0]
        reply = b""
        while len(reply) < size:
            reply += self.link.recv(size - len(reply))
        kind, parcel = pickle.loads(reply)
        if parcel is None:
            return kind, None
        return kind, payload.unpack_value(*payload.from_parcel(parcel, (fds or [None])[0]))

    def close(self) -> None:
        self.link.close()
        self.process.wait(10)


class Kernel:
    """A kernel's namespace, and the ranks it runs cells on."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.module = types.ModuleType("__main__")
        self.namespace = self.module.__dict__
        self.ranks, self.runs = ranks, 0

    def cell(self, source: str) -> None:
        exec(compile(textwrap.dedent(source), "Cell In[0]", "exec"), self.namespace)

    def __getitem__(self, name: str) -> Any:
        return self.namespace[name]

    def reply(self, cell: str, rank: int = 0, by_value: bool = False, same_run: bool = False, **more: Any) -> Any:
        """Capture every notebook name that the cell mentions, and run it on one rank."""
        self.runs += not same_run
        mentioned = {node.id for node in ast.walk(ast.parse(textwrap.dedent(cell))) if isinstance(node, ast.Name)}
        inputs = {name: self.namespace[name] for name in mentioned & self.namespace.keys()} | more
        packed = payload.pack_inputs(inputs, self.namespace)
        run = f"{id(self)}.{self.runs}"
        return self.ranks[rank].run(cell, packed, run, by_value)

    def run(self, cell: str, **options: Any) -> Any:
        kind, value = self.reply(cell, **options)
        assert kind == "value", kind
        return value

    def run_on_both(self, cell: str) -> tuple[Any, Any]:
        return self.run(cell), self.run(cell, rank=1, same_run=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Rank]]:
    both = [Rank(0), Rank(1)]
    yield both
    for rank in both:
        rank.close()


@pytest.fixture
def kernel(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(ranks)
    monkeypatch.setitem(sys.modules, "__main__", made.module)
    return made


def round_trip(**inputs: Any) -> dict[str, Any]:
    """Inputs through pickle and parcel within this process."""
    namespace: dict[str, object] = {}
    data, buffers = payload.from_parcel(*payload.to_parcel(payload.pack_inputs(inputs, {})))
    payload.unpack_inputs(data, buffers, namespace, device="cpu")
    return namespace


def returned(value: Any, by_value: bool = False) -> Any:
    """A value through pickle and parcel within this process."""
    packed = payload.pack_value(value, by_value=by_value, run="here")
    return payload.unpack_value(*payload.from_parcel(*payload.to_parcel(packed)))
