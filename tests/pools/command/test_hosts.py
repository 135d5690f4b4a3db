"""Hosts as the option names them, and how ranks are spread over them."""

from __future__ import annotations

import pytest

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.pools.command.hosts import Host, Room, plan, read_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host(name="a"),)),
        ("a,b:2", (Host(name="a"), Host(name="b", slots=2))),
        ("me@a.org:4 , [::1]:2", (Host(name="me@a.org", slots=4), Host(name="::1", slots=2))),
    ],
)
def test_hosts_are_read(text: str, hosts: tuple[Host, ...]) -> None:
    assert read_hosts("hosts", text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:b", "-oProxyCommand=x", "a b", "a,a", "a,a:2"])
def test_what_is_not_a_list_of_hosts_is_refused(text: str) -> None:
    """Also what ssh would take for an option."""
    with pytest.raises(OptionsError, match="hosts"):
        read_hosts("hosts", text)


def rooms(*ranks: int, elastic: bool = False) -> list[Room]:
    return [Room(host=f"h{number}", ranks=each, elastic=elastic) for number, each in enumerate(ranks)]


@pytest.mark.parametrize(
    ("size", "there", "nodes", "shape"),
    [
        (2, rooms(4, 4), 0, [2, 0]),
        (4, rooms(2, 4), 0, [0, 4]),
        (4, rooms(4, 4), 2, [2, 2]),
        (5, rooms(4, 4, 4), 0, [3, 2, 0]),
        (1, rooms(4, 4), 2, [1, 0]),
        (5, rooms(1, 4), 0, [1, 4]),
        (5, rooms(2, 0, 3), 0, [2, 0, 3]),
        (6, rooms(2, 2, elastic=True), 0, [3, 3]),
        (6, rooms(2, 2, elastic=True), 1, [6, 0]),
    ],
)
def test_ranks_are_on_as_few_hosts_as_can_be_and_evenly(
    size: int, there: list[Room], nodes: int, shape: list[int]
) -> None:
    assert plan(size, there, nodes) == shape


@pytest.mark.parametrize(
    ("size", "there", "nodes"),
    [(9, rooms(4, 4), 0), (9, rooms(4, 4), 2), (-1, rooms(4), 0), (1_000_000, rooms(4, elastic=True), 0), (1, [], 0)],
)
def test_what_has_no_room_is_refused_with_what_there_is(size: int, there: list[Room], nodes: int) -> None:
    with pytest.raises(PoolError, match=f"{size} ranks.*room for {sum(room.ranks for room in there)}"):
        plan(size, there, nodes)


def test_elastic_hosts_are_as_many_as_were_asked_for() -> None:
    """Cores are no limit, but ranks of two nodes on one are another run than the one that was meant."""
    one, two = (Room(host=name, ranks=2, elastic=True) for name in "ab")
    assert plan(6, [one, two], nodes=2) == [3, 3]
    assert plan(1, [one], nodes=2) == [1]
    with pytest.raises(PoolError, match="2 ranks on 2 hosts are asked for, and only a can be used: leave nodes out"):
        plan(2, [one], nodes=2)
