"""Leases of GPUs between processes: one has a GPU at a time, and who asks is told who has it."""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections.abc import Iterator

import pytest

from jupyter_distrib.agent import gpu_leases
from jupyter_distrib.agent.devices import Gpu
from jupyter_distrib.agent.gpu_leases import Leases
from jupyter_distrib.system.event_loop import Loop
from tests.agent.lease_holder import Holder
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
    assert not mine.take(one, "me")
    assert mine.holder(one) == f"other.ipynb (kernel 7) since {time.strftime('%H:%M')}"
    assert mine.take(other, "me")
    assert not holder.hold(other)
    holder.process.kill()
    holder.process.wait()
    assert mine.holder(one) == ""
    assert mine.take(one, "me")
    mine.give_back(one)
    mine.give_back(one)
    mine.give_back(other)
    assert mine.holder(other) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root has processes of other users")
def test_c13_a_lease_is_between_users(loop: Loop) -> None:
    one, other, mine = gpu(), gpu(), Leases(loop)
    with Holder(uid=65534) as theirs:
        assert theirs.hold(one)
        assert not mine.take(one, "me")
        assert re.match(r"(user )?nobody\b.* since \d\d:\d\d", mine.holder(one)), mine.holder(one)
        assert mine.take(other, "me")
        assert not theirs.hold(other)
    assert wait_until(lambda: mine.take(one, "me"))
    mine.give_back(one)
    mine.give_back(other)


def test_two_in_one_process_exclude_each_other_too(loop: Loop) -> None:
    one, first, second = gpu(), Leases(loop), Leases(loop)
    assert first.take(one, "first")
    assert not first.take(one, "first again")
    assert not second.take(one, "second")
    assert first.holder(one).startswith("first since ")
    first.give_back(one)
    assert second.take(one, "second")
    second.give_back(one)


def test_a_holder_that_does_not_answer_is_named_by_the_system(loop: Loop, holder: Holder) -> None:
    one = gpu()
    holder.hold(one)
    holder.process.send_signal(signal.SIGSTOP)
    assert Leases(loop).holder(one).endswith(f" (process {holder.process.pid})")
    holder.process.send_signal(signal.SIGCONT)


def test_another_user_is_not_told_the_notebook(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of somebody's notebooks are nobody else's business; since when they have a GPU is."""
    one, mine, other = gpu(), Leases(loop), Leases(loop)
    mine.take(one, "secret.ipynb (kernel 7)")
    monkeypatch.setattr(gpu_leases, "peer_uid", lambda sock: os.getuid() + 1)
    told: list[str] = []

    def ask() -> None:
        told.append(other.holder(one))

    answer = mine._answer
    monkeypatch.setattr(gpu_leases, "ANSWER_S", 5.0)
    import threading

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive() and not loop._selector.select(0.1):
        pass
    answer(one.uuid)
    asking.join()
    assert "secret" not in told[0]
    assert f"(process {os.getpid()}) since " in told[0]
    mine.give_back(one)
