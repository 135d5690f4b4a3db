"""Connections to hosts, over real pipes to a real Python: banners, refusals, lost pipes, and what is left behind."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jupyter_distrib.coordinator import relay, source_archive
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command import bootstrap
from jupyter_distrib.pools.command import channel as channels
from jupyter_distrib.pools.command import connect as connecting
from jupyter_distrib.pools.command.channel import PipeChannel
from jupyter_distrib.pools.command.connect import HostConnection, connect
from jupyter_distrib.pools.command.piped_relay import PipedRelay
from jupyter_distrib.pools.command.pool import CommandPool
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from tests.processes import listeners, tree, wait_until

START = {"label": "a test", "session": "s", "interface": "lo", "env": {}}


@cache
def archive() -> Future[bytes]:
    one: Future[bytes] = Future()
    one.set_result(source_archive.archive())
    return one


def reach(start: str, python: str = sys.executable, *, kind: str = "command", **more: object) -> HostConnection:
    command = type("Named", (CommandPool,), {"kind": kind})(start=start, python=python)
    return connect(command, "here", archive(), {**START, **more}, threading.Event())


@contextmanager
def reached(start: str, *, kind: str = "command") -> Iterator[HostConnection]:
    connection = reach(start, kind=kind)
    try:
        yield connection
    finally:
        connection.end()


@contextmanager
def looped(connection: HostConnection) -> Iterator[PipeChannel]:
    """A channel over the connection, whose loop runs in a thread."""
    loop = Loop()
    calls = CallSoon(loop)
    channel = PipeChannel(connection, loop, calls)
    calls.put(channel.open)
    thread = threading.Thread(target=loop._run)  # without the wakeup descriptor, which is the main thread's
    thread.start()
    try:
        yield channel
        channel.close()
    finally:
        calls.put(loop.stop)
        thread.join()
        calls.close()
        loop._selector.close()


def folders(kind: str) -> list[Path]:
    return list(Path("/tmp").glob(f"jupyter_distrib-{kind}-*"))


def relays(kind: str) -> list[int]:
    """The relays of connections of this kind, by the folder on their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(word.startswith(f"/tmp/jupyter_distrib-{kind}-") for word in words) and "-c" in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "env HOST={host} {python}",
        "sh -c 'echo Welcome to {host}; printf \"\\000:motd 3.11\"; exec {python}'",
    ],
    ids=["no banner", "a banner"],
)
def test_a_relay_starts_behind_whatever_is_printed_before_it_and_leaves_nothing(start: str) -> None:
    kind = f"leaves{os.getpid()}"
    with reached(start, kind=kind) as connection:
        assert connection.facts["address"] == "127.0.0.1"
        assert connection.facts["cpus"] > 0
        assert len(folders(kind)) == 1
        assert relays(kind)
    assert wait_until(lambda: not folders(kind) and not relays(kind), 15)


@pytest.mark.slow
def test_a_home_of_another_python_changes_nothing() -> None:
    """As `module load python/2.7` sets it in a start-up file."""
    kind = f"home{os.getpid()}"
    with reached("env HOST={host} PYTHONHOME=/nowhere {python}", kind=kind) as connection:
        assert connection.facts["cpus"] > 0
    assert wait_until(lambda: not folders(kind) and not relays(kind), 15)


def test_modules_of_another_python_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SyntaxError('for Python 2')")
    kind = f"path{os.getpid()}"
    with pytest.raises(PoolError) as caught:
        reach(f"env HOST={{host}} PYTHONPATH={tmp_path} {{python}}", kind=kind)
    assert str(caught.value) == (
        f"{sys.executable} on host here cannot import this package (SyntaxError: for Python 2; PYTHONPATH is "
        f"{tmp_path}): correct what the start-up files there set, or set python to another interpreter."
    )
    assert folders(kind) == []


def test_a_host_that_prints_without_end_is_told_apart_from_one_that_is_late() -> None:
    with pytest.raises(PoolError, match=r"^host here prints more than 1 MB before a Python answers: "):
        reach("sh -c 'head -c 2000000 /dev/zero; exec {python}' {host}")


def test_a_host_without_room_for_an_agent_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as `bind` does, without a path

    monkeypatch.setattr(relay, "Relay", full)
    with pytest.raises(PoolError) as caught:
        PipedRelay(cast("Any", SimpleNamespace(send=None)), "/tmp/f")._call(
            m.RelayCall(number=1, method="start", arguments=(START,))
        )
    assert str(caught.value) == (
        "no agent can be started in /tmp/f (No space left on device, of bytes or of inodes: see `df -h` and `df -i`)."
    )


@pytest.mark.slow
def test_a_relay_opens_no_port_and_its_folder_is_the_users_alone() -> None:
    kind = f"private{os.getpid()}"
    before = os.umask(0)
    try:
        with reached("env HOST={host} {python}", kind=kind):
            [relay], [folder] = relays(kind), folders(kind)
            assert listeners(tree(relay)) == set()
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
            assert len(modes) > 1
            assert [path for path, mode in modes.items() if mode & 0o077] == []
    finally:
        os.umask(before)


@pytest.mark.slow
def test_when_the_command_is_killed_the_channel_says_so_and_nothing_is_left() -> None:
    """The relay reads the end of its input, whoever has closed it."""
    kind = f"killed{os.getpid()}"
    with reached("sh -c '{python}; echo never'", kind=kind) as connection, looped(connection) as channel:
        news = channel.ask("receive")
        connection.process.kill()
        connection.link.sock.shutdown(2)
        with pytest.raises(channels.ChannelLost, match="connection has ended"):
            news.result(5)
        late: Future[object] = channel.ask("describe", [], "/")
        with pytest.raises(channels.ChannelLost):
            late.result(5)
        assert wait_until(lambda: not folders(kind) and not relays(kind), 15)


@pytest.mark.slow
def test_a_host_that_is_silent_is_lost_within_ten_seconds() -> None:
    kind = f"silent{os.getpid()}"
    with reached("env {host}={host} {python}", kind=kind) as connection, looped(connection) as channel:
        [relay] = relays(kind)
        os.kill(relay, signal.SIGSTOP)
        try:
            with pytest.raises(channels.ChannelLost, match="nothing has come from it for 8 s"):
                channel.ask("receive").result(10)
        finally:
            os.kill(relay, signal.SIGCONT)


@pytest.mark.slow
def test_calls_are_answered_and_refusals_of_a_method_are_its_own() -> None:
    with reached("env {host}={host} {python}") as connection, looped(connection) as channel:
        assert '"python"' in channel.ask("describe", ["127.0.0.1"], "/").result(30)
        with pytest.raises(channels.RaisedOnHost, match="there is no call 'system'"):
            channel.ask("system", "rm").result(30)
        assert channel.ask("logs", "no run").result(30) == []


@pytest.mark.parametrize("mark", ["7282406c729c2fdc", "fa82406c729c2fdc"])
def test_a_mark_is_found_whatever_its_digits_are(mark: str) -> None:
    """Digits behind a zero must not become one escape with it."""
    code = bootstrap.line(mark, "command", "no_module").decode()
    done = subprocess.run([sys.executable, "-I", "-m", "code"], input=code, capture_output=True, text=True, check=False)
    assert f"\0:{mark} 3." in done.stdout
    assert bootstrap.found(mark, done.stdout.encode()) == sys.version_info[:2]


def test_no_such_command() -> None:
    with pytest.raises(PoolError, match="no-such-program cannot be started: No such file or directory"):
        reach("no-such-program {host} {python}")


def test_no_python_there() -> None:
    with pytest.raises(PoolError, match="there is no Python at /no/python on host here: set python"):
        reach("env HOST={host} {python}", "/no/python")


def test_a_python_that_is_too_old_is_reported(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text(
        f"#!{sys.executable}\nimport re, sys\nmark = re.search(r'0:([0-9a-f]{{16}}) ', sys.stdin.readline())[1]\n"
        "sys.stdout.write('\\0:' + mark + ' 3.9\\n'); sys.stdout.flush(); sys.stdin.read()\n"
    )
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(PoolError, match=r"host here has Python 3\.9, which is too old: set python to 3\.11 or newer"):
        reach("env HOST={host} {python}", str(old))


def test_a_program_that_is_not_python_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "ANSWER_S", 0.5)
    with pytest.raises(PoolError, match="no Python answered on host here in time"):
        reach("sh -c 'echo {host} >/dev/null; exec sleep 100' {python}")


def test_a_host_that_refuses_keeps_no_folder() -> None:
    kind = f"refuses{os.getpid()}"
    with pytest.raises(PoolError, match=r"host here: it has no network interface eth99 with an address, but .*lo"):
        reach("env HOST={host} {python}", kind=kind, interface="eth99")
    assert folders(kind) == []
