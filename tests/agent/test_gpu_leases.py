"""Leases of GPUs between processes: one has a GPU at a time, and who asks is told who has it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from jupyter_distrib.agent.gpus import leases
from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.gpus.leases import Leases
from jupyter_distrib.system import outside_text
from jupyter_distrib.system.event_loop import Loop
from tests.agent.lease_holder import Holder, Stranger
from tests.processes import wait_until


def gpu() -> Gpu:
    return Gpu(index=0, uuid=f"GPU-{secrets.token_hex(8)}", name="", memory_bytes=1, used_bytes=0)


@pytest.fixture
def loop() -> Iterator[Loop]:
    here = Loop()
    yield here
    here._selector.close()


def test_a_lease_is_between_processes_and_ends_with_its_holder(loop: Loop, holder: Holder) -> None:
    one, other, mine = gpu(), gpu(), Leases(loop)
    assert holder.hold(one)
    assert not mine.lease(one, "me")
    assert mine.holder(one) == f"other.ipynb (kernel 7) since {time.strftime('%H:%M')}"
    assert mine.lease(other, "me")
    assert not holder.hold(other)
    holder.process.kill()
    holder.process.wait()
    assert mine.holder(one) == ""
    assert mine.lease(one, "me")
    mine.give_back(one)
    mine.give_back(one)
    mine.give_back(other)
    assert mine.holder(other) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root has processes of other users")
def test_a_lease_is_between_users(loop: Loop) -> None:
    one, other, mine = gpu(), gpu(), Leases(loop)
    with Holder(uid=65534) as theirs:
        assert theirs.hold(one)
        assert not mine.lease(one, "me")
        assert mine.holder(one) == f"user nobody (uid 65534, process {theirs.process.pid})"
        assert mine.lease(other, "me")
        assert not theirs.hold(other)
    assert wait_until(lambda: mine.lease(one, "me"))
    mine.give_back(one)
    mine.give_back(other)


def test_two_in_one_process_exclude_each_other_too(loop: Loop) -> None:
    one, first, second = gpu(), Leases(loop), Leases(loop)
    assert first.lease(one, "first")
    assert not first.lease(one, "first again")
    assert not second.lease(one, "second")
    assert first.holder(one).startswith("first since ")
    first.give_back(one)
    assert second.lease(one, "second")
    second.give_back(one)


def test_a_holder_that_does_not_answer_is_named_by_the_system(loop: Loop, holder: Holder) -> None:
    one = gpu()
    holder.hold(one)
    holder.process.send_signal(signal.SIGSTOP)
    assert Leases(loop).holder(one).endswith(f" (process {holder.process.pid})")
    holder.process.send_signal(signal.SIGCONT)


def test_who_has_bound_the_name_and_does_not_listen_has_the_gpu(loop: Loop) -> None:
    """Else the cell and the status say that a GPU is free which nobody can lease."""
    one, mine = gpu(), Leases(loop)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(leases._address(one))

        assert not mine.lease(one, "me")
        assert mine.holder(one) == "another process"

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as harmless:
        harmless.bind(leases._address(one))
        assert mine.holder(one) == ""
        assert mine.lease(one, "me")
    mine.give_back(one)


PROGRAM = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect("\\0jupyter_distrib-" + sys.argv[2])
print(sock.recv(4096).decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("uid", "is_told"), [(12345, False), (0, True)])
def test_only_the_same_user_is_told_the_notebook(holder: Holder, uid: int, is_told: bool) -> None:
    """The names of somebody's notebooks are nobody else's business."""
    one = gpu()
    assert holder.hold(one)
    asking = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(uid), one.uuid], capture_output=True, text=True, timeout=30, check=True
    )
    assert ("other.ipynb" in asking.stdout) == is_told
    assert is_told or asking.stdout == "\n"


# ------------------------------------------------------------------------------------------------ whatever listens there


NOW = time.time()
SPOOFS = {
    "a name of one's own": json.dumps({"holder": "alice.ipynb (kernel 7)", "since": NOW}).encode(),
    "line ends and codes": json.dumps({"holder": "x\n\x1b[31mGPU 1: free\u202e\u2028y", "since": NOW}).encode(),
    "far away": b'{"holder": "x", "since": 1e30}',
    "long ago": b'{"holder": "x", "since": 1}',
    "no number": b'{"holder": "x", "since": NaN}',
    "no end": b'{"holder": "x", "since": -Infinity}',
    "long number": b'{"holder": "x", "since": 1' + b"0" * 4000 + b"}",
    "deep": b"[" * 4000,
    "deep objects": b'{"a":' * 800,
    "half a character": b'{"holder": "\\ud800", "since": 1}',
    "no text": bytes(range(256)),
    "null": b"null",
    "nothing": b"",
    "other shape": b'{"holder": ["x"], "since": "now"}',
    "long": json.dumps({"holder": "x" * 4000, "since": NOW}).encode(),
}


@pytest.mark.parametrize("answer", SPOOFS.values(), ids=SPOOFS)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_words_of_another_user_are_never_shown(loop: Loop, answer: bytes) -> None:
    one, mine = gpu(), Leases(loop)
    with Stranger(one, 12345, answer) as stranger:
        assert not mine.lease(one, "me")
        assert mine.holder(one) == f"user 12345 (uid 12345, process {stranger.process.pid})"


@pytest.mark.parametrize("answer", SPOOFS.values(), ids=SPOOFS)
@pytest.mark.parametrize("in_parts", [False, True])
def test_words_of_ones_own_process_are_cleaned(loop: Loop, answer: bytes, in_parts: bool) -> None:
    one, mine = gpu(), Leases(loop)
    with Stranger(one, os.getuid(), answer, in_parts=in_parts) as stranger:
        said = mine.holder(one)
        assert said.isprintable()
        assert len(said) < 300
        by_system = f"user {outside_text.user_name(os.getuid())} (process {stranger.process.pid})"
        clock = time.strftime("%H:%M", time.localtime(NOW))
        assert said == by_system or (said.endswith(f" since {clock}") and json.loads(answer)["since"] == NOW)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_who_never_answers_is_not_waited_for(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while there is room in the queue of its socket, nor afterwards."""
    monkeypatch.setattr(leases, "ANSWER_S", 60.0)
    one, mine, waiting = gpu(), Leases(loop), []
    with Stranger(one, 12345, b"") as stranger:
        stranger.process.send_signal(signal.SIGSTOP)
        for _ in range(30):
            assert mine.holder(one) in (f"user 12345 (uid 12345, process {stranger.process.pid})", "another process")
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            sock.connect_ex(f"\0jupyter_distrib-{one.uuid}")
            waiting.append(sock)
        assert mine.holder(one) == "another process"
    for sock in waiting:
        sock.close()
