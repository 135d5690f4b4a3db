"""Exceptions of cells, from real ranks to a real kernel process."""

from __future__ import annotations

from textwrap import dedent

import pytest

from jupyter_distrib.serialization import exceptions
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel


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
def test_an_exception_comes_back_as_its_own_type(kernel: Kernel, raised: str, message: str) -> None:
    kernel.cell("""
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
    _, error = kernel.reply(
        dedent(f"""\
            import threading
            try:
                1 / 0
            except Exception as e:
                raise {raised} from e""")
    )
    assert type(error).__name__ == raised.partition("(")[0]
    assert str(error) == message
    assert type(error) is kernel.namespace.get(type(error).__name__, type(error))
    assert error.__cause__ is error.__context__ is error.__traceback__ is None
    if raised.startswith("Oops"):
        assert (error.code, error.hint) == (3, "h")


def test_an_exception_keeps_its_type_without_what_cannot_be_pickled(kernel: Kernel) -> None:
    _, error = kernel.reply(
        dedent("""\
            import threading
            e = OSError('text')
            e.lock = (i for i in ())
            e.n = 1
            e.add_note('see')
            raise e""")
    )
    assert (type(error), str(error), error.n, error.__notes__) == (OSError, "text", 1, ["see"])
    assert not hasattr(error, "lock")
    _, error = kernel.reply("import threading\nraise LookupError((i for i in ()))")
    assert type(error) is LookupError


def test_a_group_keeps_the_types_of_its_parts_without_what_cannot_be_pickled(kernel: Kernel) -> None:
    _, error = kernel.reply(
        "inner = ExceptionGroup('inner', [KeyError(i for i in ())])\nraise ExceptionGroup('g', [OSError('text'), inner])"
    )
    assert (type(error), error.message) == (ExceptionGroup, "g")
    first, inner = error.exceptions
    assert (repr(first), inner.message, type(inner.exceptions[0])) == ("OSError('text')", "inner", KeyError)


def test_an_exception_of_the_cell_and_one_that_fails_in_str_come_back(kernel: Kernel) -> None:
    _, error = kernel.reply("class Mine(RuntimeError): pass\nraise Mine('m')")
    assert (type(error).__name__, str(error)) == ("Mine", "m")
    error = ValueError("a")
    packed = exceptions.pack_exception(error, by_value=False, run="")
    assert packed is not None
    assert exceptions.unpack_exception(packed.data, packed.buffers).args == ("a",)
    bad = StrFails("a")
    assert exceptions.pack_exception(bad, by_value=False, run="") is not None


class StrFails(Exception):
    def __str__(self) -> str:
        raise RuntimeError("in str")


def test_an_exception_whose_text_needs_what_cannot_be_pickled_is_none() -> None:
    assert exceptions.pack_exception(NeedsAll("node-3"), by_value=False, run="") is None


class NeedsAll(Exception):
    def __init__(self, host: str) -> None:
        self.connection = (each for each in [host])

    def __str__(self) -> str:
        return f"lost the {self.connection.__name__}"


def test_an_exception_for_which_there_is_no_way_is_none() -> None:
    class NoWay(Exception):
        lock = (i for i in ())

    assert exceptions.pack_exception(NoWay(), by_value=False, run="") is None
