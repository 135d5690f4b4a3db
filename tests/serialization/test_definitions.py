"""Functions and classes of a notebook on a rank, and on their way back."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from textwrap import dedent
from typing import Any

import cloudpickle
import pytest
from cloudpickle.cloudpickle import Pickler

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import definitions, payload
from jupyter_distrib.system import importable
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.versions


def test_a_notebook_function_and_the_cell_share_their_globals(kernel: Kernel) -> None:
    kernel.cell("""
        counter = 1
        def count():
            global counter
            counter += 1
            return counter
    """)
    cell = dedent("""\
        count()
        counter += 10
        (count(), counter)""")
    assert kernel.run(cell) == (13, 13)
    assert kernel["counter"] == 1


def test_a_function_brings_what_it_uses_through_other_functions_and_modules_under_their_names(kernel: Kernel) -> None:
    kernel.cell("""
        import collections as c, os.path as p
        table = [1, 2]
        def inner(): return c.Counter(table), p.join("a", "b")
        def outer(): return inner()
    """)
    assert kernel.run("outer()[1], 'table' in globals(), c.__name__, p.__name__") == (
        "a/b",
        True,
        "collections",
        "posixpath",
    )


def test_what_a_function_uses_is_the_object_that_the_cell_uses(kernel: Kernel) -> None:
    kernel.cell("shared = []\ndef add(x): shared.append(x)")
    assert kernel.run("add(1); add(2); shared") == [1, 2]


def test_functions_that_share_a_variable_of_another_function_share_it_on_the_rank_and_on_their_way_back(
    kernel: Kernel,
) -> None:
    source = """
        def counter():
            count = 0
            def add():
                nonlocal count
                count += 1
                return count
            def both(n): return count if n == 0 else both(n - 1)
            return add, both
        add, both = counter()
    """
    kernel.cell(source)
    kernel["add"]()
    assert kernel.run("(add(), both(2), add(), both(0))") == (2, 2, 3, 3)
    assert kernel.run("add") is kernel["add"]
    assert kernel["both"](1) == 1
    add, both = kernel.run(textwrap.dedent(source) + "(add, both)")
    assert (add(), both(1)) == (1, 1)


@pytest.mark.slow
def test_a_compiled_function_is_compiled_on_the_rank(kernel: Kernel) -> None:
    kernel.cell("""
        import torch
        factor, graphs = 3, []
        def backend(graph, _):
            graphs.append(graph)
            return graph.forward
        @torch.compile(backend=backend)
        def scaled(x): return x * factor
        assert scaled(torch.ones(1)).item() == 3
    """)
    cell = dedent("""\
        graphs.clear()
        factor = 4
        (scaled(torch.ones(2)).tolist(), len(graphs), scaled.__name__)""")
    assert kernel.run(cell) == ([4, 4], 1, "scaled")
    assert len(kernel["graphs"]) == 1


def test_typed_dicts_named_tuples_and_protocols_travel_with_what_uses_them(kernel: Kernel) -> None:
    kernel.cell("""
        import typing
        class Batch(typing.TypedDict, total=False):
            size: int
        class Sized(Batch):
            name: typing.Required[str]
        Old = typing.TypedDict("Old", {"key-1": int})
        class Point(typing.NamedTuple):
            x: int = 3
            def double(self): return self.x * 2
        class Model(typing.Protocol):
            def run(self, batch: Batch) -> int: ...
        Id = typing.NewType("Id", int)
        P, R, Ts = typing.ParamSpec("P"), typing.TypeVar("R"), typing.TypeVarTuple("Ts")
        def logged(f: typing.Callable[P, R]) -> typing.Callable[P, R]:
            def inner(*args: P.args, **kwargs: P.kwargs) -> R: return f(*args, **kwargs)
            return inner
        def last(*args: typing.Unpack[Ts]) -> int: return args[-1]
        @logged
        def count(batch: Batch, model: "Model | None" = None, key: Id = 0, old: Old = None) -> int: return batch["size"]
    """)
    kernel.namespace["plain"] = kernel.namespace["count"].__closure__[0].cell_contents
    cell = "hints = typing.get_type_hints(plain)\n(count({'size': 4}), Point().double(), hints['batch'] is Batch, "
    cell += "last(1, 5), logged(count)({'size': 6}), sorted(Sized.__optional_keys__), Sized.__required_keys__, typing.is_typeddict(Old), Old.__annotations__)"
    assert kernel.run(cell) == (4, 6, True, 5, 6, ["size"], {"name"}, True, {"key-1": int})
    assert kernel.run("Batch") is kernel["Batch"]
    assert kernel.run("Batch(size=2)") == {"size": 2}


def test_a_class_with_a_cached_property_travels_with_what_is_cached(kernel: Kernel) -> None:
    kernel.cell("""
        import functools
        class Lazy:
            computed = 0
            @functools.cached_property
            def value(self):
                "Say something."
                Lazy.computed += 1
                return 7
        used, unused = Lazy(), Lazy()
        assert used.value == 7
    """)
    cell = "(used.value, unused.value, unused.value, Lazy.computed, Lazy.value.__doc__)"
    assert kernel.run(cell) == (7, 7, 7, 2, "Say something.")


def test_another_name_of_the_environment_is_the_ranks_environment(kernel: Kernel) -> None:
    kernel.cell("import os\nenv = os.environ")
    assert kernel.run("env['SET_HERE'] = '1'\n(env is os.environ, os.environ.pop('SET_HERE'))") == (True, "1")


def test_two_names_of_one_object_stay_one_object(kernel: Kernel) -> None:
    kernel.cell("a = [1]\nb = a")
    assert kernel.run("a is b") is True


def test_a_rank_of_a_single_process_gives_way_in_functions_and_any_other_stays(kernel: Kernel) -> None:
    kernel.cell("rank, world_size, display = 0, 1, 'mine'\ndef who(): return rank, display")
    assert kernel.run("who()", rank=1) == (1, "mine")
    assert kernel.run("who()[0], rank", rank=1) == (0, 0), "an input of the cell"
    kernel.cell("rank = 8  # of LoRA")
    assert kernel.run("who()[0]", rank=1) == 8


def test_recursive_functions_closures_decorators_and_methods_travel(kernel: Kernel) -> None:
    kernel.cell("""
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
    assert kernel.run("fact(5), triple(2), cached(4), part()(2), bound()") == (120, 6, 24, 8, 5)


def test_functions_of_the_shell_stay_in_the_kernel(kernel: Kernel) -> None:
    kernel.cell("def shell(): return get_ipython()\ndef op(): return open")
    ipython: dict[str, Any] = {"__name__": "IPython.core.interactiveshell", "lock": threading.Lock()}
    exec(
        dedent("""\
            class Shell:
                def get_ipython(self): return self
                def __reduce__(self): return lock"""),
        ipython,
    )
    kernel.namespace["get_ipython"] = ipython["Shell"]().get_ipython
    assert kernel.run("'get_ipython' in globals(), callable(shell)") == (False, True)


def test_a_function_of_the_kernel_comes_back_as_itself(kernel: Kernel) -> None:
    kernel.cell(
        dedent("""\
            x = 1
            def f(): return x
            g = lambda: f()""")
    )
    value = kernel.run("x = 99\n[f, g, {'f': f}]")
    assert value[0] is kernel["f"]
    assert value[1] is kernel["g"]
    assert value[2]["f"] is kernel["f"]
    assert kernel["f"]() == 1


def test_a_function_of_the_cell_has_globals_of_its_own(kernel: Kernel) -> None:
    kernel.cell("x = 1")
    function = kernel.run(
        dedent("""\
        x = 99
        y = 5
        def h():
            global x
            x += y
            return x
        h""")
    )
    assert function() == 104
    assert kernel["x"] == 1
    assert "y" not in kernel.namespace
    assert "h" not in kernel.namespace


def test_a_function_of_an_earlier_cell_can_be_captured_again(kernel: Kernel) -> None:
    kernel.namespace["h"] = kernel.run(
        dedent("""\
            y = 5
            def h(): return y
            h""")
    )
    assert kernel.run("h() + 1") == 6
    assert kernel.run("h") is kernel["h"]


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
def test_an_instance_of_a_notebook_class_comes_back_as_one(kernel: Kernel, name: str, by_value: bool) -> None:
    kernel.namespace["torch"] = torch
    kernel.cell(textwrap.dedent(CLASSES))
    before = dict(vars(kernel[name]))
    value = kernel.run(INSTANCES[name], by_value=by_value)
    assert type(value) is kernel[name]
    after = dict(vars(kernel[name]))
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_notebook_classes_work_on_the_rank_as_in_the_notebook(kernel: Kernel) -> None:
    kernel.namespace["torch"] = torch
    kernel.cell(textwrap.dedent(CLASSES))
    value = kernel.run("""
        [Color("b") is Color.BLUE, Color.RED.shout(), Flag.A | Flag.B, Point(1) == Point(1), Slotted(1), Pair(2).b,
         isinstance(Square(), Shape), Box[int](3).item, Outer.Inner.__qualname__, WithMeta.tag, Outer.Inner, T,
         Net()(torch.zeros(1, 2)).shape == (1, 2), Point.__module__, Proto.__name__]
    """)
    assert value[:4] == [True, "RED!", kernel["Flag"](3), True]
    assert value[4] == kernel["Slotted"](1)
    assert value[5:10] == ["b", True, 3, "Outer.Inner", "m"]
    assert value[10] is kernel["Outer"].Inner
    assert value[11] is kernel["T"]
    assert value[12:] == [True, "__main__", "Proto"]


def test_cloudpickle_alone_would_change_the_notebooks_class(kernel: Kernel) -> None:
    """The reason for `origins`: if this fails, cloudpickle has learned not to, and `origins` may go."""
    import cloudpickle

    kernel.cell("class Plain:\n    def f(self): return 1")
    method = kernel["Plain"].f
    pickle.loads(cloudpickle.dumps(kernel["Plain"]))
    assert kernel["Plain"].f is not method


def test_methods_and_bound_methods_of_notebook_classes_come_back_as_its_own(kernel: Kernel) -> None:
    kernel.cell(
        dedent("""\
            class A:
                def f(self): return 'old'
                @classmethod
                def c(cls): return cls""")
    )
    method, bound, klass = kernel.run("A.f = A.f; [A.f, A().f, A.c]")
    assert method is kernel["A"].f
    assert bound.__func__ is kernel["A"].f
    assert klass() is kernel["A"]


def test_a_class_patched_on_the_rank_is_whole_again_in_the_next_run(kernel: Kernel) -> None:
    kernel.cell(
        dedent("""\
            class A:
                size = 1
                def f(self): return 'f'""")
    )
    kernel.run("A.size = 7; A.extra = 1; keep = payload_kept(A); del A.f", payload_kept=notebook_kept)
    assert kernel.run("(A.size, hasattr(A, 'extra'), A().f())") == (1, False, "f")
    assert kernel["A"].size == 1


def notebook_kept(cls: type) -> bool:
    """Runs on the rank: keeps the class alive beyond the run."""
    payload.kept_values["class"] = cls
    return True


def test_a_class_changed_in_the_notebook_is_sent_as_it_is_now(kernel: Kernel) -> None:
    kernel.cell(
        dedent("""\
            class A:
                def f(self): return 'old'
                gone = 1""")
    )
    kernel.run("payload_kept(A)", payload_kept=notebook_kept)
    kernel.cell("A.f = lambda self: 'new'\ndel A.gone")
    assert kernel.run("(A().f(), hasattr(A, 'gone'))") == ("new", False)


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


def test_a_class_of_the_cell_is_one_class_for_all_ranks(kernel: Kernel) -> None:
    one, two = kernel.run_on_both(CELL_CLASSES)
    assert one == two
    assert type(one[0]) is type(two[0])
    assert one[1] is two[1]
    assert type(one[2]) is type(two[2])
    assert one[0].double() == 6
    assert "twice" not in kernel.namespace


def test_the_second_rank_does_not_change_the_class_that_the_first_brought(kernel: Kernel) -> None:
    one = kernel.run(
        dedent("""\
            class A:
                n = 1
            A()""")
    )
    type(one).n = 2
    two = kernel.run(
        dedent("""\
            class A:
                n = 1
            A()"""),
        rank=1,
        same_run=True,
    )
    assert type(two) is type(one)
    assert type(one).n == 2


def test_ranks_that_define_different_classes_of_one_name_get_two(kernel: Kernel) -> None:
    cell = dedent("""\
        class A:
            def f(self): return 'zero'
        if rank:
            class A:
                def f(self): return 'one'
        A()""")
    one, two = kernel.run_on_both(cell)
    assert (one.f(), two.f()) == ("zero", "one")


def test_classes_of_one_definition_made_twice_stay_two(kernel: Kernel) -> None:
    one, two = kernel.run(
        dedent("""\
            def make():
                class A: pass
                return A
            make(), make()""")
    )
    assert one is not two


def test_a_class_of_the_cell_can_be_captured_and_returned_again(kernel: Kernel) -> None:
    kernel.namespace["thing"] = kernel.run(
        dedent("""\
            class A:
                n = 1
            A()""")
    )
    again = kernel.run("thing", rank=1)
    assert type(again) is type(kernel["thing"])
    assert type(kernel.run("thing")) is type(kernel["thing"])


def test_init_subclass_of_a_notebook_class_is_not_run_again_for_what_is_known(kernel: Kernel) -> None:
    kernel.cell(
        dedent("""\
            class Base:
                seen = []
                def __init_subclass__(cls): Base.seen.append(cls.__name__)""")
    )
    kernel.run_on_both("class Sub(Base): pass\nSub()")
    assert kernel["Base"].seen == ["Sub"]


def test_a_class_made_with_keywords_arrives_without_its_base_being_asked_again(kernel: Kernel) -> None:
    kernel.cell("""
        import abc, typing
        T = typing.TypeVar("T")
        registry = []
        class Outer:
            def __init_subclass__(cls, **options):
                super().__init_subclass__(**options)
                registry.append(("outer", cls.__name__))
        class Base(Outer, typing.Generic[T]):
            def __init_subclass__(cls, key=None, **options):
                super().__init_subclass__(**options)
                registry.append((cls.__name__, key))
                cls.key = key
        class Strict(Base):
            def __init_subclass__(cls, *, need, **options):
                super().__init_subclass__(**options)
                registry.append((cls.__name__, need))
        class Sub(Base[int], key="s"): pass
        class SubStrict(Strict, need=3): pass
        seen = list(registry)
    """)
    asked = "[each for each in registry if each[0] != 'outer'] == [each for each in seen if each[0] != 'outer']"
    assert kernel.run(f"Sub.key, SubStrict.key, {asked}, Sub.__orig_bases__ == (Base[int],)") == ("s", None, True, True)
    assert kernel.run("class New(Base, key='n'): pass\n(New.key, registry[-1])") == ("n", ("New", "n"))
    assert kernel.run("class New(Base, key='n'): pass\nNew()").key == "n"
    assert ("New", None) not in kernel["registry"]
    assert "__init_subclass__" in vars(kernel["Base"])


def test_a_class_whose_metaclass_takes_keywords_arrives(kernel: Kernel) -> None:
    kernel.cell("""
        import abc
        made = []
        class Both(type):
            def __new__(cls, name, bases, names, tag):
                made.append(name)
                return super().__new__(cls, name, bases, names | {"tag": tag})
            def __init__(self, name, bases, names, tag): super().__init__(name, bases, names)
        class Abstract(abc.ABCMeta):
            def __new__(cls, name, bases, names, *, tag): return super().__new__(cls, name, bases, names)
            def __init__(self, name, bases, names, *, tag): self.tag = tag
        class Prepared(type):
            @classmethod
            def __prepare__(cls, name, bases, *, tag): return {"tag": tag}
            def __new__(cls, name, bases, names, **options): return super().__new__(cls, name, bases, dict(names))
            def __init__(self, name, bases, names, **options): super().__init__(name, bases, names)
        class One(metaclass=Both, tag=1): pass
        class Two(metaclass=Abstract, tag=2):
            @abc.abstractmethod
            def go(self): pass
        class Three(Two, tag=3):
            def go(self): return 4
        class Four(metaclass=Prepared, tag=4): pass
        three = Three()
    """)
    assert kernel.run("One.tag, Two.tag, three.tag, three.go(), Four.tag, made") == (1, 2, 3, 4, 4, ["One"])
    assert kernel.run("isinstance(three, Two), type(One) is Both, Two.__abstractmethods__") == (True, True, {"go"})
    made = kernel.run("class Five(metaclass=Both, tag=5): pass\nFive()")
    assert (made.tag, kernel["made"]) == (5, ["One"])


def test_a_value_of_a_detached_run_can_be_read_by_a_kernel_that_never_knew_its_classes(kernel: Kernel) -> None:
    kernel.cell("""
        import enum
        class Color(enum.Enum):
            RED = 1
        class A:
            n = 3
            def f(self): return g(self.n)
        def g(x): return x + 1
    """)
    kernel.run("payload_kept(A)", payload_kept=notebook_kept)
    code = "import sys; from jupyter_distrib.serialization import payload; v = payload.unpack_value(sys.stdin.buffer.read(), []);"
    code += "w = payload.unpack_value(payload.pack_value(v, by_value=False, run='').data, []);"
    code += "print(v[0].f(), v[1](1), type(v[0]).__name__, v[2] is type(v[0]).__init__, v[3].name)"
    data = kernel.run("payload_packed([A(), g, A.__init__, Color.RED])", payload_packed=packed_by_value)
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, check=True, cwd=Path(payload.__file__).parents[2]
    )
    assert done.stdout.split() == [b"4", b"2", b"A", b"True", b"RED"]


def packed_by_value(value: object) -> bytes:
    return payload.pack_value(value, by_value=True, run="detached").data


def test_a_value_whose_class_is_gone_from_the_notebook_says_so(kernel: Kernel) -> None:
    kernel.cell("class Gone: pass")
    packed = payload.pack_inputs({"Gone": kernel["Gone"]}, kernel.namespace)
    key = definitions.tracker_id(kernel["Gone"])
    assert packed.sent == (kernel["Gone"],)
    assert definitions.resolve(key, "Gone", None) is kernel["Gone"]
    with pytest.raises(PayloadError, match="`Gone` of the notebook"):
        definitions.resolve("unknown", "Gone", None)


def test_a_cached_function_is_cached_on_the_rank_and_comes_back_as_itself(kernel: Kernel) -> None:
    kernel.cell("""
        import functools, json
        @functools.lru_cache(maxsize=7)
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        parse = functools.cache(json.loads)
    """)
    value, cell_made = kernel.run("""
        @functools.cache
        def mine(x): return x + 1
        [fib(30), fib.cache_info().currsize, fib, functools, parse("1")][:3] + [parse("1")], mine
    """)
    assert value[:2] == [832040, 7]
    assert value[2] is kernel["fib"]
    assert value[3] == 1
    assert cell_made(1) == 2
    assert kernel["fib"].cache_info().currsize == 0


def test_kernel_and_rank_in_one_process_share_the_class_unchanged(kernel: Kernel) -> None:
    kernel.cell("class A:\n    def f(self): return 1")
    before, namespace = dict(vars(kernel["A"])), {}
    packed = payload.pack_inputs({"a": kernel["A"]()}, kernel.namespace)
    payload.unpack_inputs(packed.data, packed.buffers, namespace, device="cpu")
    value = payload.pack_value(namespace["a"], by_value=False, run="r")
    assert type(payload.unpack_value(value.data, value.buffers)) is kernel["A"]
    assert all(vars(kernel["A"])[name] is value for name, value in before.items())


def test_a_function_keeps_the_name_of_its_file_whatever_cloudpickle_sends(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_file(code: types.CodeType) -> tuple[Any, ...]:
        """cloudpickle's form of code since 3.1.3, under every version of it."""
        make, arguments = of_cloudpickle(code)[:2]
        return make, tuple("<dynamic-code>" if each == code.co_filename else each for each in arguments)

    of_cloudpickle = Pickler.dispatch_table[types.CodeType]
    monkeypatch.setitem(Pickler.dispatch_table, types.CodeType, without_file)
    kernel.cell("""
        def outer():
            return (lambda: [n for n in (1,)]), outer.__code__
        class Model:
            def forward(self): ...
    """)
    files = kernel.run("""
        inner, code = outer()
        [code.co_filename, inner.__code__.co_filename, Model.forward.__code__.co_filename]
    """)
    assert files == [kernel["outer"].__code__.co_filename] * 3
    assert files[0] != "<dynamic-code>"


def test_exceptions_are_sent_whatever_their_class_needs_to_make_one(kernel: Kernel) -> None:
    kernel.cell("""
        class Refused(Exception):
            def __init__(self, who, why):
                super().__init__(f"{who}: {why}")
                self.who = who
        class Missing(FileNotFoundError):
            def __init__(self, path, *, hint):
                super().__init__(2, "missing", path)
                self.hint = hint
        errors = Refused("a", "b"), Missing("/x", hint="h"), ValueError(1, 2)
        errors[0].cause = errors
    """)
    cell = (
        "(str(errors[0]), errors[0].who, errors[0].cause is errors, errors[1].filename, errors[1].hint, errors[2].args)"
    )
    assert kernel.run(cell) == ("a: b", "a", True, "/x", "h", (1, 2))


def test_weak_containers_have_their_members_on_the_rank(kernel: Kernel) -> None:
    kernel.cell("""
        import weakref
        class Node: pass
        nodes = [Node(), Node()]
        by_name = weakref.WeakValueDictionary(a=nodes[0])
        names = weakref.WeakKeyDictionary({nodes[0]: "a"})
        group = weakref.WeakSet(nodes)
        nodes[0].group = group
    """)
    assert kernel.run("(by_name['a'] is nodes[0], names[nodes[0]], len(group), nodes[1] in group)") == (
        True,
        "a",
        2,
        True,
    )
    assert kernel.run("(len(group), list(names.values()), list(by_name))") == (2, ["a"], ["a"])


def test_wrappers_with_getattr_arrive(kernel: Kernel) -> None:
    kernel.cell("""
class Wrapper:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
class Slots:
    __slots__ = ("inner",)
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return self.inner[name]
class Config(dict):
    __getattr__ = dict.__getitem__
    def __setattr__(self, name, value): self[name] = value
wrapped, slots, config = Wrapper([1, 2, 1]), Slots({"a": 3}), Config(lr=0.5)
config.width = 4
""")
    assert kernel.run("(wrapped.count(1), slots.a, config.lr, config.width, wrapped.inner)") == (
        2,
        3,
        0.5,
        4,
        [1, 2, 1],
    )


def test_context_variables_and_thread_locals_bring_their_values(kernel: Kernel) -> None:
    kernel.cell("""
import contextvars, threading
unset, default = contextvars.ContextVar("unset"), contextvars.ContextVar("default", default=3)
changed = contextvars.ContextVar("changed", default=3)
changed.set([4])
local = threading.local()
local.x = 5
def told(): return unset.get(0), default.get(), changed.get(), contextvars.Context().run(changed.get), local.x, default.name
""")
    assert kernel.run("told()") == (0, 3, [4], 3, 5, "default")


def test_weak_references_lead_to_the_copy(kernel: Kernel) -> None:
    kernel.cell("""
import weakref
class Part: pass
part, gone = Part(), Part()
alone = weakref.ref(gone.__dict__.setdefault("held", Part()))
live, dead = weakref.ref(part), weakref.ref(Part())
""")
    assert kernel.run("(live() is part, dead(), type(alone()).__name__)") == (True, None, "Part")


def test_classes_derived_from_weak_references_and_containers_arrive_with_their_attributes(kernel: Kernel) -> None:
    kernel.cell("""
import weakref
class Part: pass
class Ref(weakref.ref):
    def __new__(cls, part, tag): return super().__new__(cls, part)
    def __init__(self, part, tag):
        super().__init__(part)
        self.tag = tag
class Values(weakref.WeakValueDictionary):
    def __init__(self, tag):
        super().__init__()
        self.tag = tag
class Keys(weakref.WeakKeyDictionary): pass
class Members(weakref.WeakSet): pass
part = Part()
ref, values, keys, members = Ref(part, 1), Values(2), Keys(), Members([part])
values["a"], keys[part], keys.tag, members.tag = part, 5, 3, 4
""")
    same = "ref() is part, values['a'] is part, keys[part], part in members, type(values) is Values"
    assert kernel.run(f"({same}, ref.tag, values.tag, keys.tag, members.tag)") == (
        *(True, True, 5, True, True),
        *(1, 2, 3, 4),
    )


def test_a_class_whose_metaclass_answers_by_an_error_arrives(kernel: Kernel) -> None:
    kernel.cell("""
class Answers(type):
    def __getattr__(cls, name): raise RuntimeError(f"no {name}")
class Part(metaclass=Answers):
    v = 1
""")
    assert kernel.run("Part.v, type(Part).__name__") == (1, "Answers")


def test_a_library_of_c_is_loaded_again_with_the_types_of_its_functions(kernel: Kernel) -> None:
    kernel.cell("""
import ctypes
libc = ctypes.CDLL(None)
libc.labs.argtypes, libc.labs.restype = [ctypes.c_long], ctypes.c_long
""")
    assert kernel.run(f"libc.labs({-(2**40)}), libc.abs(-3)") == (2**40, 3)


def test_classes_derived_from_locals_and_libraries_of_c_arrive(kernel: Kernel) -> None:
    kernel.cell("""
import ctypes, threading
class Local(threading.local):
    kind = "own"
    def __init__(self, x): self.x = x
class Library(ctypes.CDLL):
    def __init__(self, note):
        super().__init__(None)
        self.note = note
    def positive(self, number): return self.abs(number)
local, library, python = Local(5), Library("mine"), ctypes.PyDLL(None)
local.y = 6
""")
    told = kernel.run("local.x, local.y, local.kind, library.positive(-3), library.note, python.Py_IsInitialized()")
    assert told == (5, 6, "own", 3, "mine", 1)


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in a folder in which nothing is looked for. It is not loaded."""
    file = tmp_path / "only_here.py"
    file.write_text(
        dedent("""\
            import math
            BASE = 5
            def add(x): return math.floor(x) + BASE
            class Part:
                v = 7
                def add(self, x): return add(x) + self.v
        """)
    )
    monkeypatch.setitem(sys.modules, "only_here", types.ModuleType("only_here"))
    return file


LOAD = """
import importlib.machinery, importlib.util, pathlib, sys, types
spec = importlib.util.spec_from_file_location("only_here", {file!r})
"""
BY_SPEC = "module = sys.modules['only_here'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)"
BY_LOADER = "module = importlib.machinery.SourceFileLoader('only_here', {file!r}).load_module()"
BY_HAND = """
module = sys.modules["only_here"] = types.ModuleType("only_here")
exec(compile(pathlib.Path({file!r}).read_text(), "only_here", "exec"), vars(module))
"""


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@pytest.mark.parametrize("how", [BY_SPEC, BY_LOADER, BY_HAND])
def test_a_module_that_only_the_notebook_has_arrives_with_what_it_defines(
    kernel: Kernel, module_file: Path, how: str
) -> None:
    kernel.cell((LOAD + how).format(file=str(module_file)))
    kernel.cell("part, function = module.Part(), module.add\nmodule.BASE = 50")

    assert kernel.run("module.add(1), part.add(1), function(1), module.BASE, type(part) is module.Part") == (
        *(51, 58, 51, 50),
        True,
    )
    assert kernel.run("part").__class__ is kernel["module"].Part
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_a_module_that_an_import_finds_is_sent_by_its_name(
    kernel: Kernel, module_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(module_file.parent)
    monkeypatch.delitem(sys.modules, "only_here")
    kernel.cell("import only_here, math")

    packed = payload.pack_inputs({"only_here": kernel["only_here"], "math": kernel["math"]}, kernel.namespace)

    assert b"floor" not in packed.data


def test_no_module_of_a_library_counts_as_the_notebooks_own() -> None:
    library = types.ModuleType("made_by_a_compiler")  # as Cython makes one for its types
    library.generator = type(_ for _ in ())  # type: ignore[attr-defined]
    loaded = {**sys.modules, "made_by_a_compiler": library}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "made_by_a_compiler", library)
        assert [name for name in loaded if name.partition(".")[0] != "tests" and importable.is_only_here(name)] == []
