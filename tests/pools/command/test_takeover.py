"""Who may take a broken connection up: the same user with the secret, through a folder that is the user's own."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jupyter_distrib.pools.command import bootstrap, takeover
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link, encode

SECRET = "5" * 64
MARK = "0123456789abcdef"
STRANGER = 65534
RELAY = f"""
import sys
from jupyter_distrib.pools.command import takeover
from jupyter_distrib.wire.pipe_link import PipeLink
link = PipeLink(0, 1)
link.outlives_its_pipes = True
takeover.listen(sys.argv[1], {SECRET!r}, link)
print("ready", file=sys.stderr, flush=True)
while True:
    print(link.receive().method, file=sys.stderr, flush=True)
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="a second user needs root")


def become(user: int | None) -> str:
    """A line by which a Python becomes a user's; its files may be in a folder that is root's alone."""
    if user is None:
        return "\n"
    return f"import array, os, socket, stat, struct, sys; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"


class Relay:
    """A link that waits for other pipes, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", RELAY, str(folder)], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
            )
        assert self.says() == "ready"

    def says(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.readline().decode().strip()

    def hears(self, method: str) -> bool:
        """Whether a message of the first owner arrives."""
        self._ours.sendall(encode(m.RelayCall(number=0, method=method)))
        return self.says() == method

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._ours.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    one = Path(tempfile.mkdtemp(dir="/tmp"))
    yield one
    shutil.rmtree(one)


@pytest.fixture
def relay(folder: Path) -> Iterator[Relay]:
    one = Relay(folder)
    yield one
    one.close()


class Bringer:
    """A process that brings its input and output to a relay, as the command on a host does."""

    def __init__(self, folder: Path, secret: str = SECRET, *, heard: int = 0, user: int | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *bootstrap.WORDS], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
            )
        self.sock.sendall(become(user).encode() + takeover.line(MARK, str(folder), secret, heard))
        said = b""
        while (version := bootstrap.found(MARK, said)) is None:
            said += self.sock.recv(1)
        self.version = version
        self.link = Link(self.sock)

    def gets(self) -> m.Message | None:
        """What the relay sends first; nothing if it does not take the pipes."""
        assert select.select([self.sock], [], [], 20)[0]
        try:
            return self.link.receive()[0]
        except EOFError:
            return None

    def close(self) -> None:
        self.sock.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture
def bringers() -> Iterator[list[Bringer]]:
    some: list[Bringer] = []
    yield some
    for each in some:
        each.close()


def test_the_owner_with_the_secret_goes_on_where_the_connection_broke(relay: Relay, bringers: list[Bringer]) -> None:
    assert relay.hears("one")
    bringers.append(Bringer(relay.folder))
    assert bringers[0].gets() == m.RelayResumed(heard=1)
    bringers[0].link.send(m.RelayCall(number=0, method="two"))
    assert relay.says() == "two"


@pytest.mark.parametrize(("secret", "heard"), [("", 0), ("6" * 64, 0), (SECRET, 1), (SECRET, -1)])
def test_whoever_says_something_else_gets_nothing_and_disturbs_nothing(
    relay: Relay, bringers: list[Bringer], secret: str, heard: int
) -> None:
    bringers.append(Bringer(relay.folder, secret, heard=heard))
    assert bringers[0].gets() is None
    assert relay.hears("one"), "the first connection is still in use"


@pytest.mark.parametrize("words", [b"", b"[]", b"\xff" * 2000, b'{"secret": 5}'])
def test_a_process_that_brings_nonsense_disturbs_nothing(relay: Relay, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as strange:
        strange.connect(str(relay.folder / takeover.NAME))
        strange.sendall(words)
        strange.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # it has not read all
            assert strange.recv(1) == b""
    assert relay.hears("one")


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_another_user_is_refused_even_with_the_secret(relay: Relay, bringers: list[Bringer], mode: int) -> None:
    """The folder keeps others out; where somebody has opened it, the relay does."""
    relay.folder.chmod(mode)
    (relay.folder / takeover.NAME).chmod(mode)
    bringers.append(Bringer(relay.folder, user=STRANGER))
    assert bringers[0].version == takeover.NO_RELAY
    assert raw_answer(relay.folder, STRANGER) == ("refused" if mode == 0o700 else "b''")
    relay.folder.chmod(0o700)
    assert relay.hears("one")


RAW = """
import socket, sys
found = socket.socket(socket.AF_UNIX)
try:
    found.connect(sys.argv[1])
except PermissionError:
    sys.exit(print("refused"))
found.settimeout(20)
try:
    socket.send_fds(found, [sys.argv[2].encode()], [0, 0])
    print(found.recv(1))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""


def raw_answer(folder: Path, user: int) -> str:
    """What a user gets that does without the program, and so without its checks."""
    words = [sys.executable, "-c", become(user) + RAW, str(folder / takeover.NAME), takeover.hello(SECRET, 0).decode()]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@as_root
@pytest.mark.parametrize("trap", ["folder", "socket", "link", "open"])
def test_nothing_is_told_to_whoever_has_put_something_in_the_relays_place(
    folder: Path, bringers: list[Bringer], trap: str
) -> None:
    """The relay has ended, and another user makes a folder of its name: the secret and the pipes stay here."""
    place = folder / "relay"
    own = folder / "own"
    made = own if trap == "link" else place
    made.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        if trap == "socket":
            listener.close()
            stranger = subprocess.Popen(
                [sys.executable, "-c", LISTENS, str(folder), str(place / takeover.NAME)], stdout=subprocess.PIPE
            )
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"listens\n"
            bringers.append(Bringer(place))
            heard, _ = stranger.communicate()
            assert heard == b"b''\n"
        else:
            listener.bind(str(made / takeover.NAME))
            listener.listen()
            listener.settimeout(0)
            if trap == "folder":
                os.chown(made, STRANGER, STRANGER)
            elif trap == "link":
                place.symlink_to(own)
            else:
                made.chmod(0o770)
            bringers.append(Bringer(place))
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert bringers[0].version == takeover.NO_RELAY


LISTENS = f"""
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
os.setuid({STRANGER})
listener.listen()
print("listens", flush=True)
print(listener.accept()[0].recv(1000))
"""
