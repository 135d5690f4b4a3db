"""What others have chosen, on its way to a page: names of processes, users and jobs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import threading

import pytest

from jupyter_distrib.agent.gpus.devices import GpuProcess
from jupyter_distrib.agent.groups import gpu_allocation
from jupyter_distrib.system import outside_text
from jupyter_distrib.wire import messages as m


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train", "train"),
        ("a\nb\r\nc\td", "a b c d"),
        ("\x1b[31mred\x1b]0;t\x07\x9b2J", "[31mred ]0;t 2J"),
        ("a\u202eb\u2066c\u200fd\ufeff", "a b c d"),
        ("\u2028\u2029\x85\x0b", ""),
        ("\ud800x\udfff", "x"),
        ("é 日本 🙂", "é 日本 🙂"),
        ("x" * 5000, "x" * 199 + "…"),
        ("\n" * 5000 + "x", "…"),
        ("\x00\x7f", ""),
    ],
)
def test_a_text_becomes_part_of_one_line(text: str, shown: str) -> None:
    assert outside_text.shown(text) == shown


def test_a_user_has_a_name_or_else_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outside_text.user_name(0) == "root"
    assert outside_text.user_name(54_321) == "54321"
    assert outside_text.user_name(1 << 80) == str(1 << 80)

    def broken(uid: int) -> object:
        raise OSError("the directory is away")

    monkeypatch.setattr(pwd, "getpwuid", broken)
    assert outside_text.user_name(54_322) == "54322"


def test_a_directory_of_users_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = threading.Event(), []

    def slow(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        answer.wait(60)
        return pwd.struct_passwd(("slow\n", "x", uid, uid, "", "/", ""))

    monkeypatch.setattr(pwd, "getpwuid", slow)
    monkeypatch.setattr(outside_text, "NAME_S", 0.01)
    assert [outside_text.user_name(54_323) for _ in range(20)] == ["54323"] * 20
    assert asked == [54_323]
    (asking,) = [each for each in threading.enumerate() if each.name == "jupyter_distrib-user"]
    answer.set()
    asking.join(60)
    assert outside_text.user_name(54_323) == "slow"
    del outside_text._names[54_323]


NAMED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.prctl(15, bytes.fromhex(sys.argv[2]), 0, 0, 0)  # PR_SET_NAME
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: its folder in /proc becomes root's
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(
    ("name", "shown"), [(b"\xff\xfe evil", "\ufffd\ufffd evil"), (b"a\n\x1b[2J), root", "a [2J), root")]
)
def test_a_process_of_another_user_is_named_as_it_is(name: bytes, shown: str) -> None:
    """Also if it has chosen a name of no text, and one that looks as if root had it."""
    command = [sys.executable, "-c", NAMED, "12345", name.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert outside_text.owner_of(process.pid) == 12345
        hello = m.Hello(protocol=m.PROTOCOL, session="x", pid=1, label="x", python="", torch="", cloudpickle="")
        told = gpu_allocation._process_name(GpuProcess(pid=process.pid, used_bytes=1), hello)
        assert told == f"process {process.pid} ({shown}, user 12345)"
        process.communicate()
    assert outside_text.owner_of(process.pid) is None
    assert outside_text.program_of(process.pid) == ""
