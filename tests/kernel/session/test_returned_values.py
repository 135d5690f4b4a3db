"""The values that ranks return, and an interrupt that comes while they are freed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jupyter_distrib.kernel.session.runs.results import ReturnedValues
from jupyter_distrib.system import interrupts
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


class Pressed(Descriptors):
    def close(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().close()


@pytest.fixture
def as_in_a_kernel() -> Iterator[None]:
    end = interrupts.repeat_swallowed()
    yield
    end()


@pytest.mark.usefixtures("as_in_a_kernel")
def test_an_interrupt_that_comes_while_values_are_freed_is_not_lost() -> None:
    reading, writing = os.pipe()
    values = ReturnedValues()
    values.keep_value(m.Returned(run="r", rank=0, value=m.Parcel(data=b""), at_s=0.0), Pressed((reading,)))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes in any of these steps
        del values
        while True:
            time.sleep(0.05)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)


class Rebuilt:
    """A value whose unpickling calls a function of the test."""

    call: Callable[[], object]

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, ()


def _rebuild() -> str:
    Rebuilt.call()
    return "rebuilt"


def test_a_thread_that_shows_a_run_and_one_that_asks_for_its_result_get_the_same_values() -> None:
    values, seen = ReturnedValues(), []
    for rank in (0, 1):
        parcel = m.Parcel(data=pickle.dumps(Rebuilt()))
        values.keep_value(m.Returned(run="r", rank=rank, value=parcel, at_s=0.0), Descriptors())

    def ask() -> None:
        seen.append(values.unpacked([0, 1], keep=True))

    def ask_meanwhile() -> None:
        Rebuilt.call = lambda: None
        other.start()
        other.join(0.1)  # it ends first unless it has to wait

    other, Rebuilt.call = threading.Thread(target=ask), ask_meanwhile
    ask()
    other.join()

    assert seen[0] is seen[1]
    assert dict(seen[0].items()) == {0: "rebuilt", 1: "rebuilt"}
