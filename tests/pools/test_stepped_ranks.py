"""Inline ranks that take turns: collectives work among them, each is a step that is shown, and a deadlock is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from textwrap import dedent

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.inline import steps
from jupyter_distrib.pools.inline.pool import InlinePool
from jupyter_distrib.pools.inline.steps import Arrow, Step, Value
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages

IMPORTS = "import torch, torch.distributed as dist\n"


@pytest.fixture
def client() -> Iterator[PoolClient]:
    one = PoolClient(InlinePool(step_through=True))
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("check", testing.checks(), ids=lambda check: check.__name__)
def test_the_contract_holds(check: testing.Check) -> None:
    check(lambda: InlinePool(step_through=True))


EVERY = """
ones = torch.ones(3)
x = torch.arange(3.) + 10 * rank; dist.all_reduce(x)
m = torch.tensor([float(rank)]); work = dist.all_reduce(m, op=dist.ReduceOp.MAX, async_op=True); work.wait()
r = torch.tensor([float(rank)]); dist.reduce(r, dst=1, op=dist.ReduceOp.AVG)
b = torch.tensor([float(rank)]); dist.broadcast(b, src=2)
s = torch.zeros(1); dist.scatter(s, [torch.tensor([5. + j]) for j in range(3)] if rank == 0 else None)
g = [torch.zeros(1) for _ in range(3)] if rank == 1 else None; dist.gather(s, g, dst=1)
a = [torch.zeros(1) for _ in range(3)]; dist.all_gather(a, s)
t = torch.zeros(3); dist.all_gather_into_tensor(t, s)
c = torch.zeros(1); dist.reduce_scatter(c, [torch.tensor([float(rank * j)]) for j in range(3)])
d = torch.zeros(1); dist.reduce_scatter_tensor(d, torch.arange(3.) * rank)
e = [torch.zeros(1) for _ in range(3)]; dist.all_to_all(e, [torch.tensor([10. * rank + j]) for j in range(3)])
f = torch.zeros(3); dist.all_to_all_single(f, 10 * rank + torch.arange(3.))
o = [{"from": rank}] ; dist.broadcast_object_list(o, src=1)
p = [None] * 3; dist.all_gather_object(p, rank)
pair = dist.new_group([0, 2]); q = torch.tensor([float(rank)])
if rank != 1: dist.all_reduce(q, group=pair)
n = torch.zeros(1); sending = dist.isend(torch.tensor([float(rank)]), (rank + 1) % 3); dist.recv(n, (rank - 1) % 3); sending.wait()
dist.barrier()
def flat(v): return v.tolist() if hasattr(v, 'tolist') else [flat(each) for each in v] if isinstance(v, list) else v
[flat(v) for v in (x, m, r, b, s, g, a, t, c, d, e, f, o, p, q, n)] + [dist.get_rank(), dist.get_world_size(), dist.is_initialized()]
"""


def test_every_collective_gives_what_torch_gives(client: PoolClient, capsys: pytest.CaptureFixture[str]) -> None:
    values = client.run(client.group(3), IMPORTS + EVERY).values
    for rank in range(3):
        x, m, r, b, s, g, a, t, c, d, e, f, o, p, q, n, *me = values[rank]
        assert (x, m, b) == ([30, 33, 36], [2], [2])
        assert r == [1.0 if rank == 1 else rank]
        assert (s, a, t) == ([5 + rank], [[5], [6], [7]], [5, 6, 7])
        assert g == ([[5], [6], [7]] if rank == 1 else None)
        assert c == d == [3 * rank]
        assert f == [rank, 10 + rank, 20 + rank] == [each for part in e for each in part]
        assert (o, p, q) == ([{"from": 1}], [0, 1, 2], [1.0 if rank == 1 else 2.0])
        assert n == [(rank - 1) % 3]
        assert me == [rank, 3, True]
    assert not sys.modules["torch.distributed"].is_initialized()

    shown = capsys.readouterr().out
    assert "step 1 of 19 · all_reduce (sum) · line 4" in shown
    assert "rank 1 sends [10 11 12] of shape [3] to ranks 0, 2" in shown
    assert "rank 2  [20 21 22]  ->  [30 33 36]" in shown


def test_each_rank_keeps_its_surroundings_while_others_run(client: PoolClient) -> None:
    source = IMPORTS + dedent("""\
        import os, random, jupyter_distrib
        os.environ['MINE'] = str(rank); torch.manual_seed(rank); random.seed(rank)
        mine = rank; dist.barrier()
        import __main__
        (os.environ['MINE'], os.environ['RANK'], __main__.mine, torch.rand(1).item(), random.random())""")
    values = client.run(client.group(2), source).values
    for rank in range(2):
        alone = {}
        exec(
            dedent(f"""\
                import torch, random
                torch.manual_seed({rank}); random.seed({rank})
                t = torch.rand(1).item(), random.random()"""),
            alone,
        )
        assert values[rank] == (str(rank), str(rank), rank, *alone["t"])


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("dist.barrier() if rank else dist.send(torch.ones(1), 1)", "no rank can continue: rank 0 waits in send to rank 1 (line 2); rank 1 waits in barrier (line 2) for 0."),
        ("if rank: dist.barrier()", "no rank can continue: rank 1 waits in barrier (line 2) for 0; ended: 0."),
        ("dist.barrier() if rank else dist.all_reduce(torch.ones(1))", "ranks call different collectives: rank 0 all_reduce (sum) in line 2, rank 1 barrier in line 2."),
        ("dist.all_reduce(torch.ones(1 + rank))", "all_reduce (sum) does not fit together (rank 0 [1]; rank 1 [2])"),
    ],
)  # fmt: skip
def test_what_would_hang_is_reported(client: PoolClient, cell: str, said: str) -> None:
    outcome = client.run(client.group(2), IMPORTS + cell)
    rank = next(
        rank
        for rank in range(2)
        if rank not in outcome.values and not any(event.rank == rank for event in outcome.of(messages.Interrupted))
    )
    assert said in outcome.failure(rank).message


def test_the_rank_that_fails_stops_those_that_wait_for_it(client: PoolClient) -> None:
    outcome = client.run(client.group(3), IMPORTS + "1 / 0 if rank == 1 else dist.barrier()")
    assert outcome.failure(1).type_name == "ZeroDivisionError"
    assert {event.rank for event in outcome.of(messages.Interrupted)} == {0, 2}


def test_a_step_is_a_picture_and_sentences_without_any_script() -> None:
    ones, twos = Value(("[1 1]",), "[2]"), Value(("[<2>]",), "[2]")
    step = Step(
        name="broadcast", detail="from rank 0", lines={0: 3, 1: 5}, before={0: (twos,), 1: (ones,)},
        after={0: (twos,), 1: (twos,)}, arrows=[Arrow(0, 1, twos)],
    )  # fmt: skip
    html = steps.as_html([step, step], [0, 1], left_out=1)
    assert "<script" not in html
    assert html.count("<section>") == html.count("<input") == 2
    assert "step 2 of 2 · broadcast (from rank 0) · lines 3, 5" in html
    assert "rank 0 sends [&lt;2&gt;] of shape [2] to rank 1" in html
    assert "1 further step not shown" in html
    assert "  rank 1  [1 1]  ->  [<2>]" in steps.as_text([step])
