"""Ranks that tell one another texts over plain sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from jupyter_distrib.worker import address_exchange
from jupyter_distrib.worker.address_exchange import PlainGroups


@pytest.fixture
def ranks() -> Iterator[list[PlainGroups]]:
    """Three ranks of one group."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ranks = [PlainGroups(rank, 3) for rank in range(3)]
        for rank, groups in enumerate(ranks):
            groups.reset("127.0.0.1", port, listener.detach() if rank == 0 else -1)
            groups.begin("run")
        yield ranks
        for groups in ranks:
            groups.reset("127.0.0.1", 0, -1)


def exchanged(ranks: list[PlainGroups], word: str) -> list[tuple[str, ...]]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: ranks[rank].exchange(f"{word} {rank}"), range(3)))


def test_every_rank_has_all_texts_by_rank(ranks: list[PlainGroups]) -> None:
    assert exchanged(ranks, "first") == [("first 0", "first 1", "first 2")] * 3
    assert exchanged(ranks, "näxt\n") == [("näxt\n 0", "näxt\n 1", "näxt\n 2")] * 3


def test_a_process_that_is_not_a_rank_of_this_run_is_not_heard(ranks: list[PlainGroups]) -> None:
    port = int(ranks[0].environment()["MASTER_PORT"]) - 1
    said = [
        json.dumps(["run before/1", 1, "old"]),
        "GET / HTTP/1.1",
        json.dumps(["run/1", "1", "x"]),
        json.dumps(7),
        json.dumps(["run/1", 99, "x"]),
        "[" * 100_000,
    ]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in said]
    for stranger, words in zip(strangers, said, strict=True):
        stranger.sendall(f"{words}\n".encode())

    assert exchanged(ranks, "now") == [("now 0", "now 1", "now 2")] * 3
    for stranger in strangers:
        assert b"now" not in stranger.recv(100)
        stranger.close()


@pytest.mark.parametrize("words", [b"", b"x", b"x" * 100])
def test_a_stranger_who_does_not_end_a_line_is_not_waited_for(
    ranks: list[PlainGroups], words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if a byte comes now and then, nor if there are ever more of them."""
    monkeypatch.setattr(address_exchange, "_FIRST_WORD_S", 0.3)
    monkeypatch.setattr(address_exchange, "_LINE_BYTES", 50)
    port, over = int(ranks[0].environment()["MASTER_PORT"]) - 1, threading.Event()
    with socket.create_connection(("127.0.0.1", port)) as stranger:

        def speak() -> None:
            with suppress(OSError):
                stranger.sendall(words)
                while len(words) == 1 and not over.wait(0.05):
                    stranger.sendall(words)

        speaking = threading.Thread(target=speak)
        speaking.start()
        began_s = time.monotonic()
        assert exchanged(ranks, "now") == [("now 0", "now 1", "now 2")] * 3
        assert time.monotonic() - began_s < 2
        over.set()
        speaking.join()


def test_many_strangers_who_say_nothing_are_not_waited_for(
    ranks: list[PlainGroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its time, and all of them together no more, nor more descriptors than there are."""
    monkeypatch.setattr(address_exchange, "_FIRST_WORD_S", 60.0)
    monkeypatch.setattr(address_exchange, "_MOST_WAITING", 20)
    port = int(ranks[0].environment()["MASTER_PORT"]) - 1
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    try:
        began_s = time.monotonic()
        assert exchanged(ranks, "now") == [("now 0", "now 1", "now 2")] * 3
        assert exchanged(ranks, "then") == [("then 0", "then 1", "then 2")] * 3
        assert time.monotonic() - began_s < 10
        for stranger in strangers:
            assert stranger.recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_waits_is_freed_when_its_socket_is_cut(ranks: list[PlainGroups]) -> None:
    listener = ranks[0]._listener
    assert listener is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].exchange, "x")
        listener.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError, match="Invalid argument"):
            waiting.result(10)


def test_a_rank_that_has_not_met_the_others_says_so() -> None:
    with pytest.raises(ConnectionError, match="run the cell again"):
        PlainGroups(0, 2).exchange("x")
