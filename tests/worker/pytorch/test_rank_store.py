"""The store of a worker group: a rank that leaves early waits until the others no longer read it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jupyter_distrib.worker.pytorch import rank_store
from jupyter_distrib.worker.pytorch.rank_store import RankStore


@pytest.fixture
def ranks(torch_keeps_descriptors: None) -> Iterator[list[RankStore]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ranks = [RankStore(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.move("127.0.0.1", port, listener.detach() if rank.rank == 0 else -1)
    del rank
    yield ranks
    ranks.clear()


def looks(rank: RankStore, *, most: int = 2) -> int:
    """How often a rank that leaves has looked for the others; `most`, if it would go on."""
    count = 0

    def enough() -> bool:
        nonlocal count
        count += 1
        return count > most

    rank.wait_for_arrivals(enough)
    return count - 1


@pytest.mark.parametrize("run", ["a", "b"])
def test_a_rank_leaves_when_all_have_arrived(ranks: list[RankStore], run: str) -> None:
    for earlier in ("a", "b")[: "ab".index(run)]:  # what was said in an earlier run does not count
        exchange(ranks, earlier)
        for rank in ranks:
            rank.arrived()
    exchange(ranks, run)
    ranks[0].arrived()

    assert looks(ranks[0]) == 2
    ranks[1].arrived()
    assert looks(ranks[0]) == 0


def exchange(ranks: list[RankStore], run: str) -> None:
    for rank in ranks:
        rank.begin(run)
    with ThreadPoolExecutor() as threads:
        assert [*threads.map(lambda rank: rank.exchange(f"{rank.rank}"), ranks)] == [("0", "1")] * 2


def test_ranks_that_read_the_board_alone_are_waited_for_too(ranks: list[RankStore]) -> None:
    exchange(ranks, "a")
    for rank in ranks:
        rank.begin("b")
        assert rank.board() is not None
    ranks[0].arrived()

    assert looks(ranks[0]) == 2
    ranks[1].arrived()
    assert looks(ranks[0]) == 0


def test_a_rank_that_has_met_nobody_waits_for_nobody(ranks: list[RankStore], monkeypatch: pytest.MonkeyPatch) -> None:
    exchange(ranks, "a")
    ranks[0].begin("b")
    ranks[0].arrived()
    assert looks(ranks[0]) == -1

    monkeypatch.setattr(rank_store, "_ARRIVAL_S", 0.0)
    ranks[0].board()
    ranks[0].arrived()
    assert looks(ranks[0], most=100) <= 0, "and for no longer than that"
