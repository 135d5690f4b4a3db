from __future__ import annotations

from jupyter_distrib.kernel.record.native_frames import NativeFrames
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m

WARNING = (
    "[W1126 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=5): Connection was likely closed."
)
HEAD = "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:787 (most recent call first):"
FRAMES = [
    HEAD,
    "frame #0: c10::Error::Error() + 0x9d (0x7f in libc10.so)",
    "<omitting python frames>",
    "frame #55: _start",
    "",
]


def test_a_warning_of_c10d_is_one_line_also_if_it_comes_in_pieces() -> None:
    lines = ["before", WARNING, *FRAMES, "after", WARNING, *FRAMES, "end"]
    wanted = ["before", WARNING, "after", WARNING, "end"]
    assert NativeFrames().without(lines) == wanted
    pieces = NativeFrames()
    assert [kept for line in lines for kept in pieces.without([line])] == wanted


def test_frames_that_are_not_of_c10d_stay() -> None:
    for lines in (["RuntimeError: mine", *FRAMES], [HEAD, "x"], ["frame #0: mine", ""], [WARNING, "frame #1: mine"]):
        assert NativeFrames().without(lines) == lines


def test_the_record_of_a_run_leaves_them_out_for_each_rank() -> None:
    record = RunRecord(run="r", label="c", ranks=range(2), world_size=2)
    text = "\n".join([WARNING, *FRAMES, "after\n"])
    half = len(text) // 2
    for part in (text[:half], text[half:]):
        for rank in range(2):
            record.apply(m.Wrote(run="r", rank=rank, stream="stderr", text=part))
    assert sorted(line.text for line in record.lines_since()) == sorted([WARNING, WARNING, "after", "after"])
    record.apply(m.Wrote(run="r", rank=0, stream="stdout", text="\n".join([WARNING, *FRAMES, ""])))
    assert HEAD in [line.text for line in record.lines_since()]
