"""The server that Spark tasks send their lines to, asked by those who know the run's token and by strangers."""

from __future__ import annotations

import queue
import secrets
import socket
import struct
from collections.abc import Iterator

import pytest

from jupyter_distrib.compat.spark import lines, log_server
from jupyter_distrib.compat.spark.log_server import LogServer

TOKEN = secrets.token_hex(8)


class Taken:
    """The reader of the lines, which keeps them."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.knows = lines.Reader(token=TOKEN).knows

    def read(self, line: str, rank: int = 0) -> int:
        self.lines.put(line)
        return rank


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def server(taken: Taken) -> Iterator[LogServer]:
    one = LogServer(taken)
    one.start("127.0.0.1")
    yield one
    one.shutdown()


def connected(server: LogServer) -> socket.socket:
    assert server.port is not None
    return socket.create_connection(("127.0.0.1", server.port), 20)


def frame(line: str) -> bytes:
    data = line.encode()
    return struct.pack(">i", len(data)) + data


def marked(text: str) -> str:
    (line,) = lines.of_text(TOKEN, 0, "stdout", f"{text}\n")
    return line.rstrip("\n")


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_lines_come_in_their_order_once_the_token_has_come(server: LogServer, taken: Taken) -> None:
    sent = ["from torchrun", "", "more", marked("one"), "plain", marked("two")]
    with connected(server) as sock:
        sock.sendall(b"".join(map(frame, sent)))
        assert [taken.lines.get(timeout=20) for _ in sent] == sent


@pytest.mark.parametrize("size", [log_server.MOST_BYTES + 1, (1 << 31) - 1, -1, -(1 << 31)])
@pytest.mark.parametrize("known", [False, True])
def test_a_line_of_no_honest_length_is_not_read(server: LogServer, taken: Taken, size: int, known: bool) -> None:
    """Only its head has come, so that the server closes the connection without a look at more."""
    with connected(server) as sock:
        sock.sendall((frame(marked("x")) if known else b"") + struct.pack(">i", size))
        assert is_closed(sock)
    assert taken.lines.qsize() == known


def test_nothing_of_a_stranger_is_taken(server: LogServer, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_server, "FIRST_S", 0.3)
    wrong = marked("x").replace(TOKEN, secrets.token_hex(8))
    for line in (
        "hello",
        wrong,
        f" {marked('x')}",
        marked("x").replace(TOKEN, ""),
        marked("x").replace(TOKEN, TOKEN[:-1]),
    ):
        with connected(server) as sock:
            sock.sendall(frame(line))
            assert is_closed(sock)
    assert taken.lines.empty()


@pytest.mark.parametrize("begins", [b"", b"\0", struct.pack(">i", 1000), struct.pack(">i", 1000) + b"x"])
def test_a_silent_stranger_is_sent_away(
    server: LogServer, taken: Taken, begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_server, "FIRST_S", 0.2)
    with connected(server) as sock:
        sock.sendall(begins)
        assert is_closed(sock)
    assert taken.lines.empty()


def test_a_stranger_who_sends_a_byte_now_and_then_is_sent_away(
    server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes sooner than the limit, all of them do not."""
    monkeypatch.setattr(log_server, "FIRST_S", 0.5)
    with connected(server) as sock:
        sock.sendall(struct.pack(">i", 1000))
        sock.settimeout(0.1)
        for _ in range(100):
            try:
                sock.sendall(b"x")
                assert sock.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        else:
            pytest.fail("it has not been sent away")


def test_a_line_that_does_not_end_is_given_up(server: LogServer, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_server, "LINE_S", 0.2)
    with connected(server) as sock:
        sock.sendall(frame(marked("x")) + struct.pack(">i", 10) + b"half")
        assert is_closed(sock)
    assert taken.lines.qsize() == 1


def test_of_many_lines_before_the_token_few_are_held(
    server: LogServer, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_server, "HELD_BYTES", 10)
    with connected(server) as sock:
        sock.sendall(frame("12345678") * 1000 + frame(marked("x")))
        assert [taken.lines.get(timeout=20) for _ in range(2)] == ["12345678", marked("x")]
    assert taken.lines.empty()


def test_strangers_do_not_take_all_threads(server: LogServer, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have sent the token do not count."""
    monkeypatch.setattr(log_server, "MOST_UNKNOWN", 2)
    with connected(server) as rank, connected(server) as one:
        rank.sendall(frame(marked("x")))
        assert taken.lines.get(timeout=20) == marked("x")
        with connected(server) as other, connected(server) as third:
            for each in (one, other):
                each.sendall(frame("x"))
            assert is_closed(third)
            rank.sendall(frame(marked("y")))
            assert taken.lines.get(timeout=20) == marked("y")


def test_its_end_sends_strangers_away(server: LogServer) -> None:
    with connected(server) as sock:
        sock.sendall(frame("x"))
        with connected(server) as known:
            known.sendall(frame(marked("x")))
            server._lines.lines.get(timeout=20)  # type: ignore[attr-defined]
            server.shutdown()
            assert is_closed(sock)
