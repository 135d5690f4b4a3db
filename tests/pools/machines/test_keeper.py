"""The process that holds machines: when it starts them, and that it ends them whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.machines import commands
from jupyter_distrib.pools.machines import machine as machines
from jupyter_distrib.pools.machines.machine import Machine
from jupyter_distrib.pools.machines.record import ENDED, ENDING, STARTING, UP, Record, Use
from jupyter_distrib.system import reap
from jupyter_distrib.system.launch import began
from tests.pools.machines.cloud import Cloud, needs_namespaces
from tests.processes import is_alive, wait_until

pytestmark = needs_namespaces


@contextmanager
def needing(machine: Machine) -> Iterator[Use]:
    use = Use(machine.place)
    use.begin()
    try:
        yield use
    finally:
        use.end()
        use.close()


def obtain(machine: Machine, said: list[str] | None = None) -> Record:
    return machine.obtain((said if said is not None else []).append, threading.Event())


def session(pid: int) -> list[int]:
    """Living processes of this session."""
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [each for each in found if reap.session_of(each) == pid and is_alive(each)]


def state(machine: Machine) -> str:
    record = machine.record()
    return record.state if record else ""


@pytest.mark.slow
def test_it_starts_holds_and_ends_them(cloud: Cloud) -> None:
    slow = f"sh -c 'sleep 1; exec {cloud.folder}/up.sh'"  # what is waited for is said at the first look at it
    machine, said = Machine(cloud.options(up=slow, down_after="1s", price="3600")), list[str]()
    with needing(machine):
        record = obtain(machine, said)
        assert (record.state, record.hosts) == (UP, "box")
        assert cloud.calls() == ["up", "hosts"]
        assert cloud.runs()
        assert not wait_until(lambda: state(machine) != UP, 2), "ended while it was needed"
    assert wait_until(lambda: state(machine) == ENDED, 20)
    assert not cloud.runs()
    assert cloud.calls() == ["up", "hosts", "down"]
    record = machine.record()
    assert record is not None
    assert "nobody had used it for 1 s" in record.reason
    assert record.cost(0) == pytest.approx(record.ended_at_s - record.began_at_s)
    assert said[0].startswith("`up` starts the machines")


def test_the_intent_is_on_disk_before_up_runs(cloud: Cloud) -> None:
    machine = Machine(
        cloud.options(up=f"cp {Machine(cloud.options()).place.folder}/../*/record {cloud.folder}/seen; false")
    )
    with needing(machine), pytest.raises(PoolError, match="`up` ended with status 1"):
        obtain(machine)
    assert '"state": "starting"' in (cloud.folder / "seen").read_text()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("full", r"not started: `up` ended with status 3 \(no capacity in zone b\)\. `down` has been run"),
        ("nameless", "`hosts_from` has printed no hosts"),
    ],
)
def test_an_up_that_fails_is_followed_by_down(cloud: Cloud, fault: str, told: str) -> None:
    cloud.fault(fault)
    machine = Machine(cloud.options())
    with needing(machine):
        with pytest.raises(PoolError, match=told):
            obtain(machine)
        assert "down" in cloud.calls()
        assert not cloud.runs()
        cloud.fault(fault, on=False)
        assert obtain(machine).state == UP  # the next one may try again


def test_an_up_that_hangs_is_given_up(cloud: Cloud) -> None:
    cloud.fault("hang")
    machine = Machine(cloud.options(up_within="1s"))
    with needing(machine), pytest.raises(PoolError, match="`up` had not ended after 1 s"):
        obtain(machine)
    assert cloud.calls()[:2] == ["up", "down"]


def test_when_nobody_waits_any_more_up_is_ended_and_down_is_run(cloud: Cloud) -> None:
    cloud.fault("hang")
    machine, given_up = Machine(cloud.options()), threading.Event()

    def wait() -> None:
        with needing(machine), suppress(PoolError):
            machine.obtain(lambda text: None, given_up)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert wait_until(lambda: bool((now := machine.record()) and now.up_pid), 20)
    record = machine.record()
    assert record is not None
    given_up.set()
    waiting.join()
    assert wait_until(lambda: "down" in cloud.calls(), 20)
    assert wait_until(lambda: not session(record.up_pid), 5)


def test_a_keeper_that_is_killed_while_up_runs_leaves_nothing_once_it_is_found(cloud: Cloud) -> None:
    cloud.fault("hang")
    machine, given_up = Machine(cloud.options()), threading.Event()

    def wait() -> None:
        with needing(machine), suppress(PoolError):
            machine.obtain(lambda text: None, given_up)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert wait_until(lambda: bool((now := machine.record()) and now.up_pid), 20)
    record = machine.record()
    assert record is not None
    given_up.set()
    os.kill(record.keeper, signal.SIGKILL)
    waiting.join()
    assert wait_until(lambda: not machine.place.is_held(), 20)
    assert state(machine) == STARTING

    machines.end_left()

    assert wait_until(lambda: "down" in cloud.calls(), 20)
    assert wait_until(lambda: not session(record.up_pid), 5)


def test_a_command_of_a_killed_keeper_does_not_go_on_when_what_it_waits_for_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start machines that nobody knows."""
    after, others = tmp_path / "after", reap._others

    def children_first(chosen: Callable[[int], bool]) -> Iterator[int]:
        for pid in sorted(others(chosen), reverse=True):
            yield pid
            wait_until(after.exists, 1)

    monkeypatch.setattr(reap, "_others", children_first)
    with subprocess.Popen(["sh", "-c", "sleep 1000; touch after"], cwd=tmp_path, start_new_session=True) as up:
        assert wait_until(lambda: len(session(up.pid)) == 2)
        commands.end_left(up.pid, began(up.pid))
    assert not after.exists()


@pytest.mark.slow
def test_whoever_finds_machines_without_a_holder_ends_them(cloud: Cloud) -> None:
    machine = Machine(cloud.options())
    with needing(machine):
        record = obtain(machine)
        os.kill(record.keeper, signal.SIGKILL)
        assert wait_until(lambda: not machine.place.is_held(), 5)
    assert cloud.runs()

    machines.end_left()

    assert wait_until(lambda: state(machine) == ENDED, 20)
    assert not cloud.runs()


@pytest.mark.slow
def test_machines_of_a_killed_keeper_that_somebody_needs_are_held_on(cloud: Cloud) -> None:
    machine = Machine(cloud.options(down_after="1s"))
    with needing(machine):
        record = obtain(machine)
        os.kill(record.keeper, signal.SIGKILL)
        assert wait_until(lambda: not machine.place.is_held(), 5)
        machines.end_left()
        assert wait_until(lambda: bool((now := machine.record()) and now.keeper != record.keeper), 20)
        assert not wait_until(lambda: state(machine) != UP, 2)
        assert obtain(machine).life == record.life
    assert wait_until(lambda: state(machine) == ENDED, 20)
    assert cloud.calls("up") == ["up"]


@pytest.mark.slow
def test_a_down_that_fails_is_repeated_and_reported(cloud: Cloud) -> None:
    cloud.fault("stuck")
    machine = Machine(cloud.options(down_after="1s"))
    with needing(machine):
        obtain(machine)
    assert wait_until(lambda: bool((now := machine.record()) and now.failures), 20)
    record = machine.record()
    assert record is not None
    assert (record.state, record.failure) == (ENDING, "`down` ended with status 4 (the API is away)")
    with (
        needing(machine),
        pytest.raises(
            PoolError, match=r"the API is away.*may still be running: they have existed since .*run `.*down.sh` by hand"
        ),
    ):
        obtain(machine)
    cloud.fault("stuck", on=False)
    assert wait_until(lambda: state(machine) == ENDED, 20)
    assert len(cloud.calls("down")) >= 2
    assert not cloud.runs()


@pytest.mark.slow
def test_at_most_ends_them_although_they_are_needed(cloud: Cloud) -> None:
    machine = Machine(cloud.options(at_most="3s"))
    with needing(machine):
        record = obtain(machine)
        assert record.ends_at_s == pytest.approx(record.began_at_s + 3)
        assert wait_until(lambda: state(machine) == ENDED, 30)
    assert not cloud.runs()


def test_two_that_need_them_get_the_same(cloud: Cloud) -> None:
    one, other = Machine(cloud.options()), Machine(cloud.options(price="2"))
    with needing(one), needing(other):
        found: list[Record] = []
        threads = [threading.Thread(target=lambda each=each: found.append(obtain(each))) for each in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {record.life for record in found} == {found[0].life}
    assert cloud.calls("up") == ["up"]
