"""Nodes of a Ray cluster that ranks cannot use. No Ray."""

from __future__ import annotations

from jupyter_distrib.pools.ray import placement


def test_nodes_of_several_machines_that_have_only_loopback_are_named() -> None:
    one, other = {"host": "10.0.0.1", "interface": "eth0", "machine": "a"}, {"host": "10.0.0.2", "machine": "b"}
    assert placement.no_way([one, {**other, "interface": "eth1"}]) == ""
    assert placement.no_way([one, {**other, "interface": "lo"}]).startswith(
        "node 10.0.0.2 has no network interface by which it reaches the other nodes, so that ranks will not meet"
    )
    assert placement.no_way([{**one, "interface": "lo"}, {**other, "machine": "a", "interface": "lo"}]) == ""
