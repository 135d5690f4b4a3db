"""What a rank and its children use of memory and processor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from textwrap import dedent
from types import SimpleNamespace
from typing import cast

from jupyter_distrib.agent.ranks import usage
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.agent.runs.watch import UsageSampler
from jupyter_distrib.system import reap
from tests.processes import wait_until


def test_memory_and_time_of_a_process_and_its_children() -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'b = bytearray(80_000_000); print(); input()'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = usage.read(process.pid)
        alone = reap.rss_bytes(process.pid)
        process.communicate(b"\n")
    assert used is not None
    assert used.rss_bytes > alone + 80_000_000
    assert used.cpu_s > 0
    assert used.state in "RS"
    assert not used.stopped


def test_a_stopped_process_is_seen_to_be() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        used = usage.read(process.pid)
        assert used is not None
        assert used.stopped
        process.kill()
    assert usage.read(process.pid) is None


def test_where_there_is_no_proc_the_process_itself_is_reported() -> None:
    used = usage._from_psutil(os.getpid())
    assert used is not None
    assert used.rss_bytes > 10_000_000
    assert used.cpu_s > 0


def test_a_signal_is_sent_only_to_who_handles_it() -> None:
    assert usage.catches(os.getpid(), signal.SIGINT)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not usage.catches(process.pid, signal.SIGRTMIN + 10)
        process.kill()


CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the child, so its time is lost with it
child = os.fork()
if not child:
    while time.process_time() < 0.3:
        pass
    print("used", flush=True)
    signal.pause()
input()
os.kill(child, signal.SIGKILL)
try:
    os.wait()
except ChildProcessError:
    print("ended", flush=True)
input()
"""


def test_a_child_that_ends_makes_no_negative_processor_time() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"used\n"
        sampler, rank = UsageSampler("r-1", {}), cast(Rank, SimpleNamespace(pid=process.pid))
        first = usage.read(process.pid)
        sampler.sample(0, rank)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ended\n"
        sampled, then = sampler.sample(0, rank), usage.read(process.pid)
        process.communicate(b"\n")
    assert first is not None
    assert then is not None
    assert then.cpu_s < first.cpu_s
    assert sampled is not None
    assert sampled.cpu_percent == 0


def test_a_process_with_a_thread_that_computes_is_told_from_one_that_sleeps() -> None:
    spins = dedent("""\
        import threading, signal
        def spin():
            print(flush=True)
            while True: pass
    """)
    for code, runnable in (
        (f"{spins}threading.Thread(target=spin, daemon=True).start()\nsignal.pause()", True),
        ("import signal\nprint(flush=True)\nsignal.pause()", False),
    ):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                assert wait_until(lambda pid=process.pid, is_so=runnable: usage.has_runnable_thread(pid) is is_so, 10)
            finally:
                process.kill()
    assert not usage.has_runnable_thread(process.pid), "it has gone"
