"""Messages over the pipes of a command, as they come through one that passes on little at a time."""

from __future__ import annotations

import os
import threading

import pytest

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import encode
from jupyter_distrib.wire.pipe_link import PipeLink


def test_large_frames_come_whole_however_they_are_cut_and_each_read_is_counted() -> None:
    reading, writing = os.pipe()
    link = PipeLink(reading, os.open(os.devnull, os.O_WRONLY))
    part = os.urandom(300_000)
    calls = [m.RelayCall(number=number, method="take", arguments=(part, number, 7)) for number in (1, 2)]

    def write() -> None:
        frames = b"".join(map(encode, calls))
        for at in range(0, len(frames), 1000):
            os.write(writing, frames[at : at + 1000])
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    came, reads = [], []
    for _ in calls:
        came.append(link.receive())
        reads.append(link.reads)
    assert came == calls
    assert reads[1] > reads[0] > 1, "a large value on its way is no silence"
    with pytest.raises(EOFError):
        link.receive()
    thread.join()
    link.close()
