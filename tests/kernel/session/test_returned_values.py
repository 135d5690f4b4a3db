"""The values that ranks return, and an interrupt that comes while they are freed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

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
