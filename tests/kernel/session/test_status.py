"""The status as data: of a made-up server, and of a real inline pool. No process, no kernel."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from jupyter_distrib.kernel.notebook.status import Status
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.session.status import PoolStatus, RankStatus
from jupyter_distrib.wire import messages as m


def group(session: str, *workers: m.WorkerInfo) -> m.GroupStatus:
    return m.GroupStatus(group=f"group of {session}", holder=f"{session}.ipynb", session=session, workers=workers)


def test_ranks_of_this_notebook_are_reported_with_their_machine() -> None:
    session = Session()
    own = [m.WorkerInfo(rank=rank, pid=10 + rank, device="cpu", node=f"10.0.0.{rank}") for rank in (1, 2)]
    nodes = tuple(m.NodeStatus(name=f"10.0.0.{number}", cpus=4, memory_bytes=1) for number in (1, 2, 3))
    groups = (group(session.identity.name, *own), group("other", m.WorkerInfo(rank=0, pid=1, device="cpu")))
    pool = PoolStatus.of("lab", m.ServerStatus(state="joined", nodes=nodes, groups=groups), session)

    assert [(rank.rank, rank.pid, rank.pool, rank.usage) for rank in pool.ranks] == [
        (1, 11, "lab", None),
        (2, 12, "lab", None),
    ]
    assert [pool.ranks_on(node) for node in nodes] == [[1], [2], []]


def test_ranks_of_a_pool_with_one_machine_are_on_it() -> None:
    session = Session()
    node = m.NodeStatus(name="node", cpus=4, memory_bytes=1)
    groups = (group(session.identity.name, m.WorkerInfo(rank=0, pid=1, device="cpu")),)
    pool = PoolStatus.of("local", m.ServerStatus(state="ready", nodes=(node,), groups=groups), session)
    assert pool.ranks_on(node) == [0]


def test_a_rank_is_reported_with_every_field_that_its_agent_tells() -> None:
    assert {field.name for field in fields(m.WorkerInfo)} <= {field.name for field in fields(RankStatus)}


def test_the_whole_status_is_json_under_the_names_of_its_fields() -> None:
    session = Session()
    session.pools.connect("inline")
    status = Status.of(session)

    told = json.loads(json.dumps(asdict(status)))

    assert told["pools"][0]["name"] == "inline"
    assert told["pools"][0]["server"]["state"] == "no forkserver needed"
    assert told["pools"][0]["server"]["pid"] == status.pools[0].server.pid
    assert "agent " in repr(status)
