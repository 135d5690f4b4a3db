"""What a parent ignores or blocks does not reach processes that start ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT

INHERITED = """
import signal, subprocess, sys
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
sys.exit(subprocess.run([sys.executable, "-c", '''
import signal
from jupyter_distrib.system import signals
signals.reset()
left = {each.name for each in set(signal.Signals) if signal.getsignal(each) == signal.SIG_IGN}
assert left == {"SIGPIPE", "SIGXFSZ"}, left
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
''']).returncode)
"""


@pytest.mark.parametrize("names", [("SIGINT",), ("SIGTERM", "SIGHUP"), ("SIGUSR1", "SIGPIPE", "SIGXFSZ"), ()])
def test_nothing_is_ignored_or_blocked_after_a_reset(names: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INHERITED, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tests_take_interrupts() -> None:
    """`sh .ci/test &` in a script starts pytest with SIGINT ignored."""
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.slow
def test_tests_that_are_started_with_interrupts_ignored_take_them(tmp_path: Path) -> None:
    this = f"{__file__}::{test_tests_take_interrupts.__name__}"
    folder = f"--basetemp={tmp_path / 'tests'}"
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", folder, this]
    ignored = dedent("""\
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.execv(sys.argv[1], sys.argv[1:])""")
    done = subprocess.run(
        [sys.executable, "-c", ignored, *pytest_run], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
