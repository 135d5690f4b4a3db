"""What the agent reads from a dead rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from jupyter_distrib.agent.ranks import exit_info
from jupyter_distrib.wire import messages as m


def test_a_crash_report_gives_the_lines() -> None:
    text = dedent("""\
        import faulthandler, ctypes
        faulthandler.enable()
        def inner():
            ctypes.string_at(0)

        inner()
    """)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert exit_info.is_crash(done.returncode)
    frames = exit_info.crash_frames(b"earlier words\n" + done.stderr)
    assert [(frame.line, frame.function) for frame in frames if frame.filename == "<string>"] == [
        (6, "<module>"),
        (4, "inner"),
    ]


def test_our_own_lines_are_left_out_of_a_crash_report() -> None:
    ours = os.path.join(os.path.dirname(os.path.dirname(exit_info.__file__)), "worker", "main.py")
    report = "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
    report += f'  File "Cell In[3]", line 7 in f\n  File "{ours}", line 1 in serve\n'
    assert exit_info.crash_frames(report.encode()) == (m.Frame(filename="Cell In[3]", line=7, function="f"),)
    assert exit_info.crash_frames(b'  File "x", line 1 in f\n') == (), "no crash, no frames"
    assert exit_info.crash_frames(report.replace("line 7 ", f"line {'7' * 5000} ").encode()) == (), "no line"


@pytest.mark.parametrize(
    ("code", "crash"),
    [(-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGKILL, False), (0, False), (11, False)],
)
def test_which_signals_are_crashes(code: int, crash: bool) -> None:
    assert exit_info.is_crash(code) is crash


def test_last_lines_are_few_and_readable() -> None:
    tail = b"".join(b"%d\n" % i for i in range(100)) + b"\xff end"
    assert exit_info.last_lines(tail) == (*(str(i) for i in range(81, 100)), "\ufffd end")


def test_the_error_of_a_gpu_is_found_in_what_a_rank_wrote() -> None:
    written = b"Traceback\n  File\ntorch.AcceleratorError: CUDA error: unknown error\nSearch for `cudaError' in\n"
    assert exit_info.device_error(written) == "CUDA error: unknown error"
    assert (
        exit_info.device_error(b"The GPU cannot be used: No CUDA GPUs are available\n") == "No CUDA GPUs are available"
    )
    assert not exit_info.device_error(b"ImportError: CUDA\n")
