"""Payloads between a real kernel process (this one, its `__main__` replaced by a notebook) and two real ranks."""

from __future__ import annotations

import ast
import gc
import io
import os
import pickle
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jupyter_distrib import origins, payload, tensors  # noqa: E402
from jupyter_distrib.errors import PayloadError, ValueLost  # noqa: E402

RANK_SOURCE = """
import ast, os, pickle, socket, struct, sys, types
sys.path[:0] = [p for p in os.environ["RANK_PATH"].split(os.pathsep) if p]
from jupyter_distrib import payload

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
        kind, packed = f"error {type(error).__name__}: {error}", payload.pack_exception(error, **how)
    parcel, fd = payload.to_parcel(packed) if packed is not None else (None, None)
    send(link, (kind, parcel), fd)
    packed = None
"""


class Rank:
    """A process that executes cells."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.link, theirs = socket.socketpair()
        path = os.pathsep.join((str(Path(payload.__file__).parents[1]), str(Path(__file__).parent)))
        command = [sys.executable, "-c", RANK_SOURCE, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "RANK_PATH": path, "OMP_NUM_THREADS": "1"}
        )
        theirs.close()

    def run(self, cell: str, packed: payload.Packed, run: str, by_value: bool) -> tuple[str, Any]:
        parcel, fd = payload.to_parcel(packed)
        order = dict(rank=self.number, parcel=parcel, cell=textwrap.dedent(cell), run=run, by_value=by_value)
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


class Notebook:
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
def notebook(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook(ranks)
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


# ------------------------------------------------------------------------------------------ functions and globals


def test_a_notebook_function_and_the_cell_share_their_globals(notebook: Notebook) -> None:
    notebook.cell("""
        counter = 1
        def count():
            global counter
            counter += 1
            return counter
    """)
    assert notebook.run("count()\ncounter += 10\n(count(), counter)") == (13, 13)
    assert notebook["counter"] == 1


def test_a_function_brings_what_it_uses_through_other_functions_and_modules_under_their_names(notebook: Notebook) -> None:
    notebook.cell("""
        import collections as c, os.path as p
        table = [1, 2]
        def inner(): return c.Counter(table), p.join("a", "b")
        def outer(): return inner()
    """)
    assert notebook.run("outer()[1], 'table' in globals(), c.__name__, p.__name__") == ("a/b", True, "collections", "posixpath")


def test_what_a_function_uses_is_the_object_that_the_cell_uses(notebook: Notebook) -> None:
    notebook.cell("shared = []\ndef add(x): shared.append(x)")
    assert notebook.run("add(1); add(2); shared") == [1, 2]


def test_two_names_of_one_object_stay_one_object(notebook: Notebook) -> None:
    notebook.cell("a = [1]\nb = a")
    assert notebook.run("a is b") is True


def test_names_of_the_rank_win_against_globals_of_functions_and_inputs_against_both(notebook: Notebook) -> None:
    notebook.cell("rank = 'stale'\ndef who(): return rank")
    assert notebook.run("who()", rank=1) == 1
    assert notebook.run("who(), rank", rank=1) == ("stale", "stale")


def test_recursive_functions_closures_decorators_and_methods_travel(notebook: Notebook) -> None:
    notebook.cell("""
        import functools
        def fact(n): return 1 if n < 2 else n * fact(n - 1)
        def make(k): return lambda x: x * k
        triple = make(3)
        @functools.lru_cache
        def cached(x): return fact(x)
        part = functools.partial(make, 4)
        class A:
            def __init__(self): self.v = 5
            def get(self): return self.v
        bound = A().get
    """)
    assert notebook.run("fact(5), triple(2), cached(4), part()(2), bound()") == (120, 6, 24, 8, 5)


def test_functions_of_the_shell_stay_in_the_kernel(notebook: Notebook) -> None:
    notebook.cell("def shell(): return get_ipython()\ndef op(): return open")
    ipython: dict[str, Any] = {"__name__": "IPython.core.interactiveshell", "lock": threading.Lock()}
    exec("class Shell:\n    def get_ipython(self): return self\n    def __reduce__(self): return lock", ipython)
    notebook.namespace["get_ipython"] = ipython["Shell"]().get_ipython
    assert notebook.run("'get_ipython' in globals(), callable(shell)") == (False, True)


def test_a_function_of_the_kernel_comes_back_as_itself(notebook: Notebook) -> None:
    notebook.cell("x = 1\ndef f(): return x\ng = lambda: f()")
    value = notebook.run("x = 99\n[f, g, {'f': f}]")
    assert value[0] is notebook["f"]
    assert value[1] is notebook["g"]
    assert value[2]["f"] is notebook["f"]
    assert notebook["f"]() == 1


def test_a_function_of_the_cell_has_globals_of_its_own(notebook: Notebook) -> None:
    notebook.cell("x = 1")
    function = notebook.run("x = 99\ny = 5\ndef h():\n    global x\n    x += y\n    return x\nh")
    assert function() == 104
    assert notebook["x"] == 1
    assert "y" not in notebook.namespace
    assert "h" not in notebook.namespace


def test_a_function_of_an_earlier_cell_can_be_captured_again(notebook: Notebook) -> None:
    notebook.namespace["h"] = notebook.run("y = 5\ndef h(): return y\nh")
    assert notebook.run("h() + 1") == 6
    assert notebook.run("h") is notebook["h"]


# ------------------------------------------------------------------------------------------ classes

CLASSES = """
    import abc, dataclasses, enum, typing
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)
        def forward(self, x): return helper(self.fc(x))
    def helper(x): return x
    class Color(enum.Enum):
        RED = 1
        BLUE = "b"
        def shout(self): return self.name + "!"
    class Flag(enum.IntFlag):
        A = 1
        B = 2
    @dataclasses.dataclass
    class Point:
        x: int
        y: list = dataclasses.field(default_factory=list)
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        x: int
    class Pair(typing.NamedTuple):
        a: int
        b: str = "b"
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...
    class Square(Shape):
        def area(self): return 4
    T = typing.TypeVar("T")
    class Box(typing.Generic[T]):
        def __init__(self, item): self.item = item
    class Outer:
        class Inner:
            pass
    class Meta(type):
        def __new__(cls, name, bases, ns):
            return super().__new__(cls, name, bases, {**ns, "tag": "m"})
    class WithMeta(metaclass=Meta): pass
    class Oops(Exception):
        def __init__(self, code, *, hint):
            super().__init__(f"code {code}")
            self.code, self.hint = code, hint
    class Proto(typing.Protocol):
        def go(self): ...
"""
INSTANCES = {
    "Net": "Net()",
    "Color": "Color.BLUE",
    "Flag": "Flag.A | Flag.B",
    "Point": "Point(1, [2])",
    "Slotted": "Slotted(3)",
    "Pair": "Pair(1)",
    "Square": "Square()",
    "Box": "Box(1)",
    "Outer": "Outer()",
    "WithMeta": "WithMeta()",
}


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("by_value", [False, True])
def test_an_instance_of_a_notebook_class_comes_back_as_one(notebook: Notebook, name: str, by_value: bool) -> None:
    notebook.namespace["torch"] = torch
    notebook.cell(textwrap.dedent(CLASSES))
    before = dict(vars(notebook[name]))
    value = notebook.run(INSTANCES[name], by_value=by_value)
    assert type(value) is notebook[name]
    after = dict(vars(notebook[name]))
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_notebook_classes_work_on_the_rank_as_in_the_notebook(notebook: Notebook) -> None:
    notebook.namespace["torch"] = torch
    notebook.cell(textwrap.dedent(CLASSES))
    value = notebook.run("""
        [Color("b") is Color.BLUE, Color.RED.shout(), Flag.A | Flag.B, Point(1) == Point(1), Slotted(1), Pair(2).b,
         isinstance(Square(), Shape), Box[int](3).item, Outer.Inner.__qualname__, WithMeta.tag, Outer.Inner, T,
         Net()(torch.zeros(1, 2)).shape == (1, 2), Point.__module__, Proto.__name__]
    """)
    assert value[:4] == [True, "RED!", notebook["Flag"](3), True]
    assert value[4] == notebook["Slotted"](1)
    assert value[5:10] == ["b", True, 3, "Outer.Inner", "m"]
    assert value[10] is notebook["Outer"].Inner
    assert value[11] is notebook["T"]
    assert value[12:] == [True, "__main__", "Proto"]


def test_cloudpickle_alone_would_change_the_notebooks_class(notebook: Notebook) -> None:
    """The reason for `origins`: if this fails, cloudpickle has learned not to, and `origins` may go."""
    import cloudpickle

    notebook.cell("class Plain:\n    def f(self): return 1")
    method = notebook["Plain"].f
    pickle.loads(cloudpickle.dumps(notebook["Plain"]))
    assert notebook["Plain"].f is not method


def test_methods_and_bound_methods_of_notebook_classes_come_back_as_its_own(notebook: Notebook) -> None:
    notebook.cell("class A:\n    def f(self): return 'old'\n    @classmethod\n    def c(cls): return cls")
    method, bound, klass = notebook.run("A.f = A.f; [A.f, A().f, A.c]")
    assert method is notebook["A"].f
    assert bound.__func__ is notebook["A"].f
    assert klass() is notebook["A"]


def test_a_class_patched_on_the_rank_is_whole_again_in_the_next_run(notebook: Notebook) -> None:
    notebook.cell("class A:\n    size = 1\n    def f(self): return 'f'")
    notebook.run("A.size = 7; A.extra = 1; keep = payload_kept(A); del A.f", payload_kept=notebook_kept)
    assert notebook.run("(A.size, hasattr(A, 'extra'), A().f())") == (1, False, "f")
    assert notebook["A"].size == 1


def notebook_kept(cls: type) -> bool:
    """Runs on the rank: keeps the class alive beyond the run."""
    payload.kept_values["class"] = cls
    return True


def test_a_class_changed_in_the_notebook_is_sent_as_it_is_now(notebook: Notebook) -> None:
    notebook.cell("class A:\n    def f(self): return 'old'\n    gone = 1")
    notebook.run("payload_kept(A)", payload_kept=notebook_kept)
    notebook.cell("A.f = lambda self: 'new'\ndel A.gone")
    assert notebook.run("(A().f(), hasattr(A, 'gone'))") == ("new", False)


CELL_CLASSES = """
    import dataclasses, enum, typing
    @dataclasses.dataclass
    class Result:
        n: int
        def double(self): return twice(self.n)
    def twice(n): return 2 * n
    class Kind(enum.Enum):
        GOOD = 1
    class Pair(typing.NamedTuple):
        a: int
    Result(3), Kind.GOOD, Pair(1)
"""


def test_a_class_of_the_cell_is_one_class_for_all_ranks(notebook: Notebook) -> None:
    one, two = notebook.run_on_both(CELL_CLASSES)
    assert one == two
    assert type(one[0]) is type(two[0])
    assert one[1] is two[1]
    assert type(one[2]) is type(two[2])
    assert one[0].double() == 6
    assert "twice" not in notebook.namespace


def test_the_second_rank_does_not_change_the_class_that_the_first_brought(notebook: Notebook) -> None:
    one = notebook.run("class A:\n    n = 1\nA()")
    type(one).n = 2
    two = notebook.run("class A:\n    n = 1\nA()", rank=1, same_run=True)
    assert type(two) is type(one)
    assert type(one).n == 2


def test_ranks_that_define_different_classes_of_one_name_get_two(notebook: Notebook) -> None:
    cell = "class A:\n    def f(self): return 'zero'\nif rank:\n    class A:\n        def f(self): return 'one'\nA()"
    one, two = notebook.run_on_both(cell)
    assert (one.f(), two.f()) == ("zero", "one")


def test_classes_of_one_definition_made_twice_stay_two(notebook: Notebook) -> None:
    one, two = notebook.run("def make():\n    class A: pass\n    return A\nmake(), make()")
    assert one is not two


def test_a_class_of_the_cell_can_be_captured_and_returned_again(notebook: Notebook) -> None:
    notebook.namespace["thing"] = notebook.run("class A:\n    n = 1\nA()")
    again = notebook.run("thing", rank=1)
    assert type(again) is type(notebook["thing"])
    assert type(notebook.run("thing")) is type(notebook["thing"])


def test_init_subclass_of_a_notebook_class_is_not_run_again_for_what_is_known(notebook: Notebook) -> None:
    notebook.cell("class Base:\n    seen = []\n    def __init_subclass__(cls): Base.seen.append(cls.__name__)")
    notebook.run_on_both("class Sub(Base): pass\nSub()")
    assert notebook["Base"].seen == ["Sub"]


def test_a_value_of_a_detached_run_can_be_read_by_a_kernel_that_never_knew_its_classes(notebook: Notebook) -> None:
    notebook.cell("""
        import enum
        class Color(enum.Enum):
            RED = 1
        class A:
            n = 3
            def f(self): return g(self.n)
        def g(x): return x + 1
    """)
    notebook.run("payload_kept(A)", payload_kept=notebook_kept)
    code = "import sys; from jupyter_distrib import payload; v = payload.unpack_value(sys.stdin.buffer.read(), []);"
    code += "w = payload.unpack_value(payload.pack_value(v, by_value=False, run='').data, []);"
    code += "print(v[0].f(), v[1](1), type(v[0]).__name__, v[2] is type(v[0]).__init__, v[3].name)"
    data = notebook.run("payload_packed([A(), g, A.__init__, Color.RED])", payload_packed=packed_by_value)
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True, cwd=Path(payload.__file__).parents[1])
    assert done.stdout.split() == [b"4", b"2", b"A", b"True", b"RED"]


def packed_by_value(value: object) -> bytes:
    return payload.pack_value(value, by_value=True, run="detached").data


def test_a_value_whose_class_is_gone_from_the_notebook_says_so(notebook: Notebook) -> None:
    notebook.cell("class Gone: pass")
    packed = payload.pack_inputs({"Gone": notebook["Gone"]}, notebook.namespace)
    key = origins.tracker_id(notebook["Gone"])
    assert packed.sent == (notebook["Gone"],)
    assert origins.resolve(key, "Gone", None) is notebook["Gone"]
    with pytest.raises(PayloadError, match="`Gone` of the notebook"):
        origins.resolve("unknown", "Gone", None)


# ------------------------------------------------------------------------------------------ torch

TENSORS = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "large": lambda: torch.arange(100_000),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.5),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.randn(50, 60).t(),
    "expanded": lambda: torch.ones(1).expand(10_000),
    "grad": lambda: torch.ones(3, requires_grad=True),
    "nonleaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "inference": lambda: _inference(),
}


def _inference() -> Any:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_survives_both_ways(notebook: Notebook, name: str) -> None:
    made = TENSORS[name]()
    back = notebook.run("given", given=made)
    assert type(back) is type(made)
    assert (back.dtype, back.shape, back.layout, back.requires_grad) == (made.dtype, made.shape, made.layout, made.requires_grad)
    if made.layout is torch.strided:
        assert back.stride() == made.stride()
        assert (back.is_conj(), back.is_neg()) == (made.is_conj(), made.is_neg())
    assert torch.equal(back.detach().to_dense().to(torch.complex64), made.detach().to_dense().to(torch.complex64))


@pytest.mark.filterwarnings("ignore")
def test_quantized_meta_and_subclass_tensors_survive(notebook: Notebook) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    meta = torch.empty(3, 4, device="meta")
    assert notebook.run("given.dequantize()", given=quantized).tolist() == pytest.approx([1, 1, 1])
    back = notebook.run("given", given=meta)
    assert (back.device.type, back.shape) == ("meta", (3, 4))
    notebook.namespace["torch"] = torch
    notebook.cell("class Tagged(torch.Tensor): pass\nt = torch.ones(3).as_subclass(Tagged)\nt.tag = 'x'")
    back = notebook.run("t")
    assert (type(back), back.tag) == (notebook["Tagged"], "x")


def test_dtypes_devices_and_generators_survive(notebook: Notebook) -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5))
    back = notebook.run("given", given=(torch.float16, torch.device("cuda:1"), torch.Size([2])))
    assert back == (torch.float16, torch.device("cuda:1"), torch.Size([2]))
    state = notebook.run("given.get_state()", given=generator)
    assert torch.equal(torch.rand(2, generator=torch.Generator().set_state(state)), expected)


def test_views_of_one_storage_stay_views_and_travel_once(notebook: Notebook) -> None:
    base = torch.zeros(300_000)
    packed = payload.pack_inputs({"base": base, "tail": base[100_000:], "again": [base.view(3, -1)]}, {})
    assert packed.size_bytes < 1.1 * base.nbytes
    value = notebook.run("base[-1] = 7; (tail[-1].item(), again[0][2, -1].item())", base=base, tail=base[9:], again=[base.view(3, -1)])
    assert value == (7, 7)
    assert base[-1] == 0
    one, two = notebook.run("import torch; b = torch.zeros(300_000); [b, b[5:]]")
    two[0] = 3
    assert one[5] == 3


def test_a_storage_given_as_itself_is_the_one_of_its_tensor() -> None:
    tensor = torch.zeros(10_000)
    back = round_trip(storage=tensor.untyped_storage(), tensor=tensor)
    back["tensor"][0] = 1
    assert bytes(back["storage"][:4]) == bytes(torch.ones(1).untyped_storage())


def test_a_small_view_of_a_large_storage_travels_alone() -> None:
    huge = torch.arange(1_000_000)
    packed = payload.pack_value({"part": huge[10:20]}, by_value=False, run="")
    assert packed.size_bytes < 4096
    assert payload.unpack_value(packed.data, packed.buffers)["part"].tolist() == list(range(10, 20))
    two = payload.pack_value([huge[10:20], huge[15:25]], by_value=False, run="")
    assert two.size_bytes > huge.nbytes
    weight = torch.nn.Parameter(huge[10:20].float())
    assert payload.pack_value(weight, by_value=False, run="").size_bytes < 4096


def test_tensors_are_not_copied_to_pickle_nor_to_unpickle() -> None:
    tensor = torch.zeros(100_000)
    packed = payload.pack_inputs({"t": tensor}, {})
    tensor[0] = 5
    assert bytes(packed.buffers[0][:4]) == struct.pack("f", 5)
    namespace: dict[str, Any] = {}
    data, buffers = payload.from_parcel(*payload.to_parcel(packed))
    payload.unpack_inputs(data, buffers, namespace, device="cpu")
    namespace["t"][0] = 6
    assert bytes(buffers[0][:4]) == struct.pack("f", 6)
    assert tensor[0] == 5


def test_a_packed_tensor_outlives_the_tensor() -> None:
    packed = payload.pack_inputs({"t": torch.full((100_000,), 3.0)}, {})
    gc.collect()
    torch.full((100_000,), 9.0)
    assert bytes(packed.buffers[0][:4]) == struct.pack("f", 3)


def test_a_small_tensor_can_grow_in_place() -> None:
    tensor = round_trip(t=torch.ones(4))["t"]
    assert tensor.resize_(1000).shape == (1000,)


def test_a_default_device_does_not_disturb_what_arrives() -> None:
    packed = payload.pack_inputs({"s": torch.ones(4), "l": torch.ones(100_000)}, {})
    namespace: dict[str, Any] = {}
    with torch.device("meta"):
        payload.unpack_inputs(packed.data, packed.buffers, namespace, device="cpu")
    assert (namespace["s"].sum(), namespace["l"].sum()) == (4, 100_000)


def test_captured_tensors_of_an_accelerator_go_to_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no accelerator here: the rank's side alone, with `meta` as its device."""
    token = tensors.DEVICE.set("meta")
    try:
        assert tensors.rebuild_storage(bytearray(8), True).device.type == "meta"
        assert tensors.rebuild_storage(bytearray(8), False).device.type == "cpu"
    finally:
        tensors.DEVICE.reset(token)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_rebuilt_on_the_ranks_device_and_return_to_the_cpu() -> None:
    given = torch.arange(10, device="cuda")
    packed = payload.pack_inputs({"a": given, "b": given[2:]}, {})
    namespace: dict[str, Any] = {}
    payload.unpack_inputs(packed.data, packed.buffers, namespace, device="cuda:0")
    assert namespace["a"].device == torch.device("cuda:0")
    namespace["a"][2] = 50
    assert namespace["b"][0] == 50
    back = returned(namespace["a"])
    assert back.device.type == "cpu"


def test_sparse_tensors_leave_nothing_behind_in_torch(notebook: Notebook) -> None:
    returned([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()])
    assert torch._utils._sparse_tensors_to_validate == []


def test_a_model_and_its_optimizer_stay_connected(notebook: Notebook) -> None:
    notebook.namespace["torch"] = torch
    notebook.cell("""
        model = torch.nn.Sequential(torch.nn.Linear(2, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        def step():
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        step()
    """)
    before = [p.clone() for p in model_parameters(notebook)]
    model, optimizer = notebook.run("step(); [model, optimizer]")
    assert all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    assert next(iter(optimizer.state.values()))["step"] == 2
    assert not torch.equal(list(model.parameters())[-1], before[-1])
    assert all(torch.equal(a, b) for a, b in zip(model_parameters(notebook), before, strict=True))


def model_parameters(notebook: Notebook) -> list[Any]:
    return list(notebook["model"].parameters())


def test_tied_parameters_stay_tied(notebook: Notebook) -> None:
    a, b = torch.nn.Linear(50, 50, bias=False), torch.nn.Linear(50, 50, bias=False)
    b.weight = a.weight
    back = notebook.run("pair", pair=torch.nn.ModuleList([a, b]))
    assert back[0].weight is back[1].weight


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_comes_back_as_its_module(group: None) -> None:
    model = torch.nn.Linear(2, 2)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    value = returned({"model": parallel, "deep": [(parallel, optimizer)]})
    assert type(value["model"]) is torch.nn.Linear
    assert value["deep"][0][0] is value["model"]
    assert value["deep"][0][1].param_groups[0]["params"][0] is value["model"].weight


@pytest.mark.filterwarnings("ignore")
def test_a_replicated_module_comes_back_plain_and_the_ranks_own_stays_as_it_is(group: None) -> None:
    from torch.distributed._composable import replicate

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    hook = model.register_forward_hook(_user_hook)
    replicate(model)
    model(torch.ones(1, 2)).sum().backward()
    state_before, class_before = dict(vars(model)), type(model)
    value = returned([model, model])
    assert value[0] is value[1]
    assert type(value[0]) is torch.nn.Sequential
    assert not [name for name in vars(value[0]) if "composable" in name]
    assert list(value[0]._forward_hooks) == [hook.id]
    assert not value[0]._forward_pre_hooks
    assert torch.equal(value[0](torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert dict(vars(model)) == state_before
    assert type(model) is class_before
    assert len(model._forward_hooks) == 2


def _user_hook(module: Any, args: Any, output: Any) -> None:
    return None


@pytest.mark.filterwarnings("ignore")
def test_what_is_sharded_is_refused_with_advice_and_what_is_replicated_is_sent(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    whole = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    value = returned({"sharded": sharded, "whole": whole})
    assert "full_tensor" in value["sharded"].reason
    assert type(value["whole"]) is torch.Tensor


@pytest.mark.filterwarnings("ignore")
def test_a_process_group_is_not_returned(group: None) -> None:
    import torch.distributed as dist

    value = returned([dist.group.WORLD, 1])
    assert "between the ranks" in value[0].reason
    assert value[1] == 1


def test_torch_is_not_imported_by_packing() -> None:
    code = "import sys; from jupyter_distrib import payload as p; n = {};"
    code += "k = p.pack_inputs({'a': [1, 2], 'f': lambda: 3}, n); m = {}; p.unpack_inputs(k.data, k.buffers, m, device='cpu');"
    code += "v = p.pack_value(m, by_value=True, run='r'); p.unpack_value(v.data, v.buffers);"
    code += "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=Path(payload.__file__).parents[1])
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------ other buffers


def test_arrays_bytes_and_read_only_memory_survive(notebook: Notebook) -> None:
    numpy = pytest.importorskip("numpy")
    array, frozen = numpy.arange(50_000), numpy.arange(50_000)
    frozen.flags.writeable = False
    packed = payload.pack_inputs({"array": array}, {})
    assert len(packed.data) < 1000
    back = notebook.run("array[0] = 9; [array, frozen, text, frozen.flags.writeable]", array=array, frozen=frozen, text=b"x" * 3_000_000)
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


# ------------------------------------------------------------------------------------------ what cannot travel


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class WithSlots:
    __slots__ = ("lock",)

    def __init__(self, lock: Any) -> None:
        self.lock = lock


def generator() -> Iterator[int]:
    yield 1


def culprit_of(**inputs: Any) -> tuple[str, str, str]:
    namespace = dict(inputs)
    with pytest.raises(PayloadError):
        payload.pack_inputs(inputs, namespace)
    found = payload.culprit(inputs, namespace)
    assert found is not None
    assert found.reason
    return found.name, found.path, found.type_name


def test_a_culprit_is_named_with_its_path() -> None:
    lock = threading.Lock()
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].extra = lock
    assert culprit_of(a=1, loader=Holder(pool=Holder(_lock=lock))) == ("loader", "loader.pool._lock", "_thread.lock")
    assert culprit_of(lock=lock) == ("lock", "lock", "_thread.lock")
    assert culprit_of(x=[1, {"k": (lock,)}])[1] == "x[1]['k'][0]"
    assert culprit_of(x=WithSlots(lock))[1] == "x.lock"
    assert culprit_of(m=module)[1] == "m.0.extra"
    assert culprit_of(g=generator())[2] == "generator"
    assert culprit_of(e={"s": {lock: 1}})[1] == "e['s'] (a key)"


def test_a_culprit_is_found_in_functions_partials_and_bound_methods(notebook: Notebook) -> None:
    import functools

    notebook.cell("""
        import threading
        lock = threading.Lock()
        def uses(): return lock
        def calls(): return uses()
        def make():
            inside = threading.Lock()
            return lambda: inside
        closed = make()
        def defaulted(a=lock): return a
        class A:
            def __init__(self): self.lock = threading.Lock()
            def go(self): pass
        bound = A().go
        class B:
            hidden = threading.Lock()
    """)
    spaces = notebook.namespace
    spaces["part"] = functools.partial(print, spaces["lock"])

    def path(name: str) -> str:
        found = payload.culprit({name: spaces[name]}, spaces)
        assert found is not None
        assert found.type_name == "_thread.lock"
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
        assert culprit_of(f=[text])[1:] == ("f[0]", "_io.TextIOWrapper")
        assert culprit_of(f=binary)[2] == "_io.BufferedWriter"
        assert culprit_of(f=Holder(s=sock))[1:] == ("f.s", "socket.socket")
    database = sqlite3.connect(":memory:")
    assert culprit_of(db=database)[2] == "sqlite3.Connection"
    database.close()
    assert round_trip(out=sys.stdout)["out"] is sys.stdout
    assert round_trip(text=io.StringIO("a"))["text"].read() == "a"


def test_a_culprit_in_something_big_or_deep_is_found_within_a_second() -> None:
    deep: Any = threading.Lock()
    for _ in range(5000):
        deep = [deep]
    big = [list(range(1000)) for _ in range(1000)] + [threading.Lock()]
    for value in (deep, big, [Holder(n=n) for n in range(100_000)] + [threading.Lock()]):
        begun_s = time.monotonic()
        name, path, _ = culprit_of(ok=1, bad=value)
        assert name == "bad"
        assert path.startswith("bad")
        assert time.monotonic() - begun_s < 2.5  # two failed pickles of this value included


def test_a_variable_that_cannot_be_rebuilt_on_the_rank_is_named(notebook: Notebook) -> None:
    notebook.cell("class Bad:\n    def __reduce__(self): return int, ('x',)")
    kind, value = notebook.reply("bad", good=1, bad=notebook["Bad"]())
    assert "PayloadError: `bad` cannot be rebuilt on the rank: ValueError" in kind
    assert isinstance(value, PayloadError)


def test_the_rank_is_told_each_name_before_its_value_is_loaded() -> None:
    names: list[str] = []
    packed = payload.pack_inputs({"a": 1, "b": [2]}, {})
    payload.unpack_inputs(packed.data, packed.buffers, {}, device="cpu", loading=names.append)
    assert names == ["a", "b"]


def test_only_the_items_that_cannot_be_pickled_are_replaced(notebook: Notebook) -> None:
    value = notebook.run("import threading\n{'lock': threading.Lock(), 'gen': (i for i in ()), 'ok': [1], 'f': open('/dev/null')}")
    assert value["ok"] == [1]
    assert value["lock"].type_name == "_thread.lock"
    assert value["lock"].short.startswith("<unlocked _thread.lock")
    assert "pickle" in value["lock"].reason
    assert [type(value[name]) for name in ("gen", "f")] == [payload.Unreturned] * 2
    assert "not returned" in repr(value["gen"])


def test_a_value_that_cannot_be_pickled_at_all_is_a_placeholder(notebook: Notebook) -> None:
    value = notebook.run("class A:\n    def __reduce__(self): raise ValueError('no')\n    def __repr__(self): 1/0\nA()")
    assert isinstance(value, payload.Unreturned)
    assert (value.type_name, value.reason) == ("A", "no")
    assert value.short.startswith("<A")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert isinstance(returned((1, deep))[1], payload.Unreturned)


def test_a_value_that_fails_in_the_notebook_is_a_placeholder_too(notebook: Notebook) -> None:
    value = notebook.run("import sys, types\nm = sys.modules['only_here'] = types.ModuleType('only_here')\nexec('class A: pass', m.__dict__)\nm.A()")
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


# ------------------------------------------------------------------------------------------ exceptions


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("ValueError('v', 1)", "('v', 1)"),
        ("KeyError('k')", "'k'"),
        ("FileNotFoundError(2, 'no', 'file')", "[Errno 2] no: 'file'"),
        ("UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')", "'utf-8' codec can't decode byte 0x78 in position 0: bad"),
        ("Oops(3, hint='h')", "code 3"),
        ("Lying(3)", "failed 3"),
        ("Custom(1, 2)", "sum 3"),
        ("MyOS(2, 'no', 'file')", "[Errno 2] no: 'file'"),
    ],
)
def test_an_exception_comes_back_as_its_own_type(notebook: Notebook, raised: str, message: str) -> None:
    notebook.cell("""
        class Oops(Exception):
            def __init__(self, code, *, hint):
                super().__init__(f"code {code}")
                self.code, self.hint = code, hint
        class Lying(Exception):
            def __init__(self, n): super().__init__(f"failed {n}")
        class Custom(Exception):
            def __init__(self, a, b): self.a, self.b = a, b
            def __str__(self): return f"sum {self.a + self.b}"
        class MyOS(OSError):
            def __init__(self, *args, extra=1): super().__init__(*args); self.extra = extra
    """)
    _, error = notebook.reply(f"import threading\ntry:\n    1 / 0\nexcept Exception as e:\n    raise {raised} from e")
    assert type(error).__name__ == raised.partition("(")[0]
    assert str(error) == message
    assert type(error) is notebook.namespace.get(type(error).__name__, type(error))
    assert error.__cause__ is error.__context__ is error.__traceback__ is None
    if raised.startswith("Oops"):
        assert (error.code, error.hint) == (3, "h")


def test_an_exception_keeps_its_type_without_what_cannot_be_pickled(notebook: Notebook) -> None:
    _, error = notebook.reply("import threading\ne = OSError('text')\ne.lock = threading.Lock()\ne.n = 1\ne.add_note('see')\nraise e")
    assert (type(error), str(error), error.n, error.__notes__) == (OSError, "text", 1, ["see"])
    assert not hasattr(error, "lock")
    _, error = notebook.reply("import threading\nraise LookupError(threading.Lock())")
    assert type(error) is LookupError


def test_an_exception_of_the_cell_and_one_that_fails_in_str_come_back(notebook: Notebook) -> None:
    kind, error = notebook.reply("class Mine(RuntimeError): pass\nraise Mine('m')")
    assert (type(error).__name__, str(error)) == ("Mine", "m")
    error = ValueError("a")
    packed = payload.pack_exception(error, by_value=False, run="")
    assert packed is not None
    assert payload.unpack_exception(packed.data, packed.buffers).args == ("a",)
    bad = StrFails("a")
    assert payload.pack_exception(bad, by_value=False, run="") is not None


class StrFails(Exception):
    def __str__(self) -> str:
        raise RuntimeError("in str")


def test_an_exception_for_which_there_is_no_way_is_none() -> None:
    class NoWay(Exception):
        lock = threading.Lock()

    assert payload.pack_exception(NoWay(), by_value=False, run="") is None


# ------------------------------------------------------------------------------------------ cost


def test_sizes_are_those_of_the_data() -> None:
    numpy = pytest.importorskip("numpy")
    found = payload.sizes(
        {"t": torch.zeros(1000), "a": numpy.zeros(1000), "b": b"x" * 500, "m": torch.nn.Linear(100, 100), "bad": threading.Lock()}
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
    for _ in range(200):
        value = round_trip(t=torch.zeros(50_000), v=[torch.zeros(30_000)])
        value["t"] += 1
        del value
        returned(torch.zeros(50_000))
    gc.collect()
    assert _open_files_and_maps() == before


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
