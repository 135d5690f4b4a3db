"""Entries of torch's log keep their first line, and lines of the cell are left as they are."""

from __future__ import annotations

import pytest

from jupyter_distrib.agent.ranks import exit_info
from jupyter_distrib.agent.ranks.torch_log import without_stacks

BROKEN = (
    "[rank1]:[E1127 17:05:09.269540721 ProcessGroupNCCL.cpp:2119] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group "
    "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
)
ADVICE = """Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

"""
REMOTE = """[rank0]:[E1127 17:01:35.209234625 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=2, \
OpType=ALLREDUCE) raised the following async exception: NCCL error: unhandled cuda error, NCCL version 2.28.9
"""
NCCL = "ncclRemoteError: A call failed possibly due to a network error.\nLast error:\nsocket closed\n"
STACK = """Exception raised from ExchangeDevice at /pytorch/c10/cuda/CUDAFunctions.cpp:280 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x9d (0x7f14 in libc10.so)
frame #1: <unknown function> + 0xc114 (0x7f14042bf114 in libc10_cuda.so)

"""
ENDED = "terminate called after throwing an instance of 'c10::DistBackendError'\n"
WHAT = "  what():  [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error\n"


@pytest.mark.parametrize(
    ("written", "left"),
    [
        (BROKEN + ADVICE + STACK, BROKEN),
        (f"before\n{REMOTE}{NCCL}\n{STACK}after\n", f"before\n{REMOTE}after\n"),
        (ENDED + WHAT + ADVICE + STACK, ENDED + WHAT),
        (2 * (BROKEN + ADVICE + STACK) + "end", 2 * BROKEN + "end"),
    ],
)
def test_an_entry_keeps_its_first_line(written: str, left: str) -> None:
    assert without_stacks(written.encode()).decode() == left


@pytest.mark.parametrize(
    "written",
    [
        BROKEN,
        BROKEN + "frame #7: loss 0.3\n",
        f"{BROKEN}my own line\n{STACK}",
        f"in the cell\n{STACK}",
        "1\nframe #1: of my video\nframe #2: of my video\n",
    ],
)
def test_other_lines_stay(written: str) -> None:
    assert without_stacks(written.encode()).decode() == written


def test_the_last_lines_of_a_rank_tell_the_error_and_not_the_stack() -> None:
    frames = "".join(f"frame #{number}: of C++\n" for number in range(40))
    written = ENDED + WHAT + ADVICE + STACK.replace("\n\n", f"\n{frames}\n") + "Fatal Python error: Aborted\n"
    assert exit_info.last_lines(written.encode()) == tuple((ENDED + WHAT).splitlines())
