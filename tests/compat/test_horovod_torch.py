"""Horovod's interface for PyTorch on real ranks: the values that Horovod defines, in a notebook that has only the alias."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.pools.command.test_restarts import POOL as TWO_NODES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_compat horovod")
        yield book


@pytest.fixture
def book(shared: Notebook) -> Iterator[Notebook]:
    yield shared
    shared.forget()


START = """\
import torch
import horovod.torch as hvd
hvd.init()
r, n = hvd.rank(), hvd.size()
"""


def ranks(book: Notebook, code: str, count: int = 2) -> list[str]:
    """What the ranks' values are, by rank."""
    book.ok(f"%%distributed --ranks {count} --out values\n{START}{code}")
    return book.ok("print(*map(repr, values), sep='\\n')").stdout.splitlines()


def says(book: Notebook, code: str, count: int = 2) -> str:
    return book.fails(f"%%distributed --ranks {count}\n{START}{code}").text


# ------------------------------------------------------------------------------------------------------------- places


def test_ranks_have_their_places(book: Notebook) -> None:
    code = "hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()"
    assert ranks(book, code) == ["(0, 2, 0, 2, 0, 1)", "(1, 2, 1, 2, 0, 1)"]
    code = "hvd.is_homogeneous(), hvd.gloo_enabled(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.nccl_built()"
    assert ranks(book, code) == ["(True, True, False, False, 0)"] * 2


def test_ranks_of_two_nodes_have_their_places_and_train_together(book: Notebook) -> None:
    code = f"""%%distributed {TWO_NODES} --ranks 4 --out places
import os
{START}
places = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), os.environ["HOST"]
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.full((1, 2), float(r))).sum().backward()
optimizer.step()
[tuple(place) for place in hvd.allgather_object(places)], hvd.allgather(model.weight).unique(dim=0).shape[0]"""
    book.ok(code)
    places = [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert book.ok(f"[[each[:4] for each in found] == {places} for found, _ in places]").result == str([True] * 4)
    assert (
        book.ok("[len({place[4] for place in found}) for found, _ in places], {same for _, same in places}").result
        == "([2, 2, 2, 2], {1})"
    )


def test_each_cell_begins_without_it(book: Notebook) -> None:
    ranks(book, "hvd.init()")
    code = dedent("""\
        %%distributed --ranks 2
        import horovod.torch as hvd
        assert not hvd.is_initialized()
        hvd.size()""")
    assert "horovod.torch is not ready on this rank: call hvd.init() first." in book.fails(code).text
    code = dedent("""\
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        hvd.allreduce(torch.ones(1)).item()""")
    assert ranks(book, code) == ["1.0", "1.0"]


def test_a_notebook_s_own_process_is_one_rank(book: Notebook) -> None:
    code = f"{START}n, hvd.allreduce(torch.ones(2)).tolist(), hvd.broadcast_object({{1: 2}}), hvd.allgather_object(3)"
    assert book.ok(code).result == "(1, [1.0, 1.0], {1: 2}, [3])"
    book.ok(
        dedent("""\
            import torch.distributed as dist
            hvd.shutdown()
            dist.destroy_process_group()""")
    )


def test_a_group_that_the_cell_has_made_is_used(book: Notebook) -> None:
    code = dedent("""\
        %%distributed --ranks 2
        import torch.distributed as dist
        dist.init_process_group('gloo')
    """)
    value = book.ok(code + START + "hvd.allreduce(torch.tensor([float(r)])).item()").result
    assert value == "ranks 0-1: 0.5"


# -------------------------------------------------------------------------------------------------------- collectives


def test_allreduce_has_horovod_s_values(book: Notebook) -> None:
    code = """
x = torch.tensor([1.0, 2.0]) * (r + 1)
[hvd.allreduce(x).tolist(), *(hvd.allreduce(x, op=op).tolist() for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product)),
 hvd.allreduce(x, average=False).tolist(), hvd.allreduce(torch.tensor(r + 2)).item(),
 hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25).tolist()]"""
    values = "[[1.5, 3.0], [3.0, 6.0], [1.0, 2.0], [2.0, 4.0], [2.0, 8.0], [3.0, 6.0], 2, [1.5, 3.0]]"
    assert ranks(book, code) == [values] * 2


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
def test_every_type_of_numbers_is_reduced(book: Notebook, dtype: str) -> None:
    code = f"x = torch.tensor([1, 2, 4], dtype=torch.{dtype})\nhvd.allreduce(x + r, op=hvd.Sum).double().tolist()"
    assert ranks(book, code) == ["[3.0, 5.0, 9.0]"] * 2


def test_in_place_and_grouped_forms(book: Notebook) -> None:
    code = """
x, y = torch.ones(2, 2) * r, torch.ones(3, dtype=torch.int64)
whole = hvd.grouped_allreduce([x, y], op=hvd.Sum, name="both")
assert hvd.allreduce_(x) is x
hvd.grouped_allreduce_([x, y], op=hvd.Sum)
z = torch.tensor([r])
assert hvd.broadcast_(z, 1) is z
[each.tolist() for each in whole], x.tolist(), y.tolist(), z.tolist()"""
    value = "([[[1.0, 1.0], [1.0, 1.0]], [2, 2, 2]], [[1.0, 1.0], [1.0, 1.0]], [2, 2, 2], [1])"
    assert ranks(book, code) == [value] * 2


def test_allgather_takes_different_numbers_of_rows(book: Notebook) -> None:
    code = """
x = torch.full((r + 1, 2), r, dtype=torch.bool)
many = hvd.grouped_allgather([torch.arange(2 * r), torch.tensor([[r, r]])])
hvd.allgather(x).tolist(), [each.tolist() for each in many], hvd.allgather(torch.empty(0, 3)).shape"""
    value = "([[False, False], [True, True], [True, True]], [[0, 1], [[0, 0], [1, 1]]], torch.Size([0, 3]))"
    assert ranks(book, code) == [value] * 2


def test_broadcast_alltoall_and_reducescatter(book: Notebook) -> None:
    code = """
rows, received = hvd.alltoall(torch.arange(3) + 10 * r, splits=torch.tensor([1, 2]))
equal = hvd.alltoall(torch.arange(4).view(2, 2) + 10 * r)
part = hvd.reducescatter(torch.arange(6.0).view(3, 2) * (r + 1), op=hvd.Sum)
parts = hvd.grouped_reducescatter([torch.ones(2), torch.ones(4)])
(hvd.broadcast(torch.tensor([5 + r]), 1).item(), rows.tolist(), received.tolist(), equal.tolist(), part.tolist(),
 [each.tolist() for each in parts])"""
    assert ranks(book, code) == [
        "(6, [0, 10], [1, 1], [[0, 1], [10, 11]], [[0.0, 3.0], [6.0, 9.0]], [[1.0], [1.0, 1.0]])",
        "(6, [1, 2, 11, 12], [2, 2], [[2, 3], [12, 13]], [[12.0, 15.0]], [[1.0], [1.0, 1.0]])",
    ]  # fmt: skip


def test_objects(book: Notebook) -> None:
    code = "hvd.broadcast_object({'of': r}, root_rank=1, name='state'), hvd.allgather_object('x' * (r + 1))"
    assert ranks(book, code) == ["({'of': 1}, ['x', 'xx'])"] * 2


def test_gradients_flow_back_as_horovod_defines_them(book: Notebook) -> None:
    code = """
def gradient(function, rows=2):
    x = torch.ones(rows, requires_grad=True)
    y = function(x)
    (y * (r + 1.0)).sum().backward()
    return x.grad.tolist()
[gradient(hvd.allreduce), gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)),
 gradient(lambda x: hvd.allgather(x), r + 1), gradient(lambda x: hvd.broadcast(x, 1)),
 gradient(lambda x: hvd.alltoall(x)), gradient(lambda x: hvd.alltoall(x, splits=[2 - r, r])[0]),
 gradient(lambda x: hvd.reducescatter(x)), gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum))]"""
    assert ranks(book, code) == [
        "[[1.5, 1.5], [3.0, 3.0], [1.5], [0.0, 0.0], [1.0, 2.0], [1.0, 1.0], [1.0, 2.0], [2.0, 4.0]]",
        "[[1.5, 1.5], [3.0, 3.0], [1.5, 1.5], [1.5, 1.5], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [2.0, 4.0]]",
    ]  # fmt: skip


def test_sparse_tensors_are_averaged(book: Notebook) -> None:
    code = """
x = torch.sparse_coo_tensor([[r, 2]], [1.0, 2.0], (4,))
hvd.synchronize(hvd.sparse_allreduce_async(x, "sparse", hvd.Average)).to_dense().tolist()"""
    assert ranks(book, code) == ["[0.5, 0.5, 2.0, 0.0]"] * 2


# ------------------------------------------------------------------------------------------------------ names, handles


def test_two_ranks_that_issue_names_in_opposite_order_get_their_values(book: Notebook) -> None:
    code = """
names = ["a", "b", "c"] if r == 0 else ["c", "b", "a"]
handles = {name: hvd.allreduce_async(torch.tensor([float("abc".index(name) + r)]), name=name) for name in names}
[hvd.synchronize(handles[name]).item() for name in names]"""
    assert ranks(book, code) == ["[0.5, 1.5, 2.5]", "[2.5, 1.5, 0.5]"]


def test_a_handle_is_polled_until_it_is_done(book: Notebook) -> None:
    code = """
handle = hvd.allgather_async(torch.tensor([r]))
while not hvd.poll(handle):
    pass
value = hvd.synchronize(handle).tolist()
assert hvd.synchronize(handle) is None
value"""
    assert ranks(book, code) == ["[0, 1]"] * 2
    assert "synchronize has taken its result" in says(book, "hvd.poll(4711)")


def test_a_rank_may_leave_results_untaken(book: Notebook) -> None:
    code = dedent("""\
        x = torch.ones(1) * r
        handle = hvd.allreduce_async_(x, name='x')
        if r: hvd.synchronize(handle)
        x.item()""")
    assert ranks(book, code) == ["0.0", "0.5"]


def test_many_long_names_are_reported_at_once(book: Notebook) -> None:
    code = """
order = [*range(300)] if r == 0 else [*reversed(range(300))]
for step in range(2):
    handles = {k: hvd.allreduce_async(torch.tensor([float(k)]), name=f"{'layer.' * 10}{k}") for k in order}
    values = [hvd.synchronize(handles[k]).item() for k in range(300)]
    assert values == [float(k) for k in range(300)]
len(values)"""
    assert ranks(book, code) == ["300", "300"]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("hvd.allreduce(torch.ones(2 + r), name='x')",
         "allreduce 'allreduce.x' differs between ranks: shape is (2,) on rank 0 and (3,) on rank 1"),
        ("hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.float64][r]), name='x')",
         "dtype is float32 on rank 0 and float64 on rank 1"),
        ("hvd.allreduce(torch.ones(2), name='x', op=[hvd.Sum, hvd.Min][r])", "op is Sum on rank 0 and Min on rank 1"),
        ("hvd.broadcast(torch.ones(2), r, name='x')", "root is 0 on rank 0 and 1 on rank 1"),
        ("hvd.allgather(torch.ones(2, 2 + r), name='x')", "shape is (2, 2) on rank 0 and (2, 3) on rank 1"),
    ],
)  # fmt: skip
def test_ranks_that_differ_about_a_name_are_reported(book: Notebook, code: str, sentence: str) -> None:
    text = says(book, code)
    assert sentence in text
    assert "HorovodInternalError" in text


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("hvd.allreduce(torch.ones(1), op=hvd.Adasum)", "op=hvd.Adasum is not supported by jupyter_distrib"),
        ("hvd.allreduce(torch.ones(1), op='Mean')", "op must be one of hvd.Average, hvd.Sum, hvd.Min"),
        ("hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)", "average= and op= exclude each other"),
        ("hvd.broadcast(torch.ones(1), 7)", "root_rank 7 is not one of the ranks [0, 1]"),
        ("hvd.alltoall(torch.ones(3))", "alltoall without splits needs a number of rows divisible by 2; got (3,)"),
        ("hvd.alltoall(torch.ones(3), splits=[1, 1])", "splits must have 2 numbers with the sum 3; got [1, 1]"),
        ("hvd.allgather_async(torch.tensor(1))", "allgather needs a tensor with at least one dimension"),
        ("hvd.reducescatter(torch.ones(2), op=hvd.Max)", "reducescatter takes hvd.Average and hvd.Sum; got hvd.Max"),
        ("hvd.allreduce_async(torch.ones(1), name='x')\nhvd.allreduce_async(torch.ones(1), name='x')",
         "allreduce 'allreduce.x' was issued again before it was done"),
        ("x = torch.ones(1, requires_grad=True)\nhvd.allreduce(x, op=hvd.Max).sum().backward()",
         "there is no gradient of an allreduce with hvd.Max"),
        ("hvd.start_timeline('t')", "no Horovod timeline: use torch.profiler"),
        ("hvd.shutdown()\nhvd.init(comm=[0])", "hvd.init takes all ranks"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said_in_a_sentence(book: Notebook, code: str, sentence: str) -> None:
    assert sentence in says(book, code)


# ----------------------------------------------------------------------------------------------------------- optimizer

TRAIN = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel
def made():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
torch.manual_seed(0)
features, targets = torch.randn(80, 4)[r::2], torch.randn(80, 2)[r::2]
def train(model, optimizer, forward=None, passes=1):
    for step in range(10):
        optimizer.zero_grad()
        for part in range(passes):
            rows = slice(4 * step + part * 4 // passes, 4 * step + (part + 1) * 4 // passes)
            (nn.functional.mse_loss((forward or model)(features[rows]), targets[rows]) / passes).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()
def by_hand(kind, **settings):
    model = made()
    return train(model, kind(model.parameters(), **settings), DistributedDataParallel(model))
def difference(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()
"""


@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), lr=0.1, momentum=0.9)", "Adam(model.parameters(), lr=0.01)"]
)
@pytest.mark.parametrize("more", ["", ", gradient_predivide_factor=2.0", ", backward_passes_per_step=2"])
def test_the_optimizer_trains_as_ddp(book: Notebook, optimizer: str, more: str) -> None:
    kind, _, settings = optimizer.rstrip(")").partition("(model.parameters(), ")
    passes = 2 if "passes" in more else 1
    code = f"""{TRAIN}
model = made()
optimizer = hvd.DistributedOptimizer(torch.optim.{optimizer}, named_parameters=model.named_parameters(){more})
assert isinstance(optimizer, torch.optim.{kind})
mine = train(model, optimizer, passes={passes})
difference(mine, by_hand(torch.optim.{kind}, {settings})) < 1e-6"""
    assert ranks(book, code) == ["True", "True"]


@pytest.mark.parametrize("passes", [1, 2])
def test_fp16_is_close_and_equal_on_all_ranks(book: Notebook, passes: int) -> None:
    code = f"""{TRAIN}
model = made()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.fp16, groups=2,
    backward_passes_per_step={passes})
mine = train(model, optimizer, passes={passes})
off = difference(mine, by_hand(torch.optim.SGD, lr=0.1))
0 < off < 1e-2, torch.equal(hvd.broadcast(mine, 0), mine), hvd.allreduce(torch.ones(1), compression=hvd.Compression.fp16).dtype"""
    assert ranks(book, code) == ["(True, True, torch.float32)"] * 2


def test_unused_parameters_count_as_zeros(book: Notebook) -> None:
    code = """
a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b, c], lr=1.0))
(a * 2 + (b * 4 if r else 0)).backward()
optimizer.step()
a.item(), b.item(), c.item(), c.grad.item()"""
    assert ranks(book, code) == ["(-2.0, -2.0, 0.0, 0.0)"] * 2


def test_gradients_can_be_clipped_between_synchronize_and_step(book: Notebook) -> None:
    code = """
a = torch.nn.Parameter(torch.zeros(1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0), op=hvd.Sum)
(a * 3).backward()
optimizer.synchronize()
torch.nn.utils.clip_grad_norm_([a], 1.0)
with optimizer.skip_synchronize():
    optimizer.step()
round(a.item(), 4)"""
    assert ranks(book, code) == ["-1.0", "-1.0"]


def test_sparse_gradients(book: Notebook) -> None:
    code = """
def trained(**more):
    table = torch.nn.Embedding(4, 1, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), **more)
    table(torch.tensor([r, 2])).sum().backward()
    optimizer.step()
    return table.weight.detach().flatten().tolist()
trained(), trained(sparse_as_dense=True)"""
    assert ranks(book, code) == ["([-0.5, -0.5, -1.0, 0.0], [-0.5, -0.5, -1.0, 0.0])"] * 2


def test_a_scheduler_and_a_state_dict_go_through_it(book: Notebook) -> None:
    code = """
a = torch.nn.Parameter(torch.zeros(1))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam([a], lr=1.0))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
(a * 2).backward()
optimizer.step()
schedule.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.param_groups[0]["lr"], len(optimizer.state)"""
    assert ranks(book, code) == ["(0.5, 1)"] * 2


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("(a * b).backward()\no().zero_grad()", None),
        ("x = o()\n(a * b).backward()\nx.zero_grad()", "zero_grad() would clear gradients that are still being reduced"),
        ("x = o()\n(a * b).backward()\n(a * b).backward()", "more often than backward_passes_per_step"),
        ("o(named_parameters=[('a', a)])", "named_parameters has no name for 1 of the optimizer's 2 parameters"),
        ("o(named_parameters=[('a', a), ('a', b)])", "names in named_parameters have to be unique; there twice: a"),
        ("o(named_parameters=[a, b])", "named_parameters has to be a sequence of tuples (name, parameter)"),
        ("o(op=hvd.Sum, gradient_predivide_factor=2.0)", "gradient_predivide_factor goes with op=hvd.Average only"),
        ("o(op=hvd.Adasum)", "op=hvd.Adasum is not supported"),
        ("o(backward_passes_per_step=0)", "backward_passes_per_step has to be 1 or more; got 0"),
    ],
)  # fmt: skip
def test_misuse_is_an_error(book: Notebook, code: str, sentence: str | None) -> None:
    start = """
a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
o = lambda **more: hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), **more)
"""
    if sentence is None:
        ranks(book, start + code)
    else:
        assert sentence in says(book, start + code)


def test_a_strategy_that_trains_is_one_too_many(book: Notebook) -> None:
    code = "hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))"
    failed = book.fails(f"%%distributed --ranks 2 --strategy ddp\n{START}{code}")
    assert "hvd.DistributedOptimizer reduces gradients itself, and the cell's strategy does so, too" in failed.text


def test_the_state_of_one_rank_is_brought_to_all(book: Notebook) -> None:
    code = """
torch.manual_seed(r)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (r + 1))
for _ in range(r + 1):
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
hvd.broadcast_parameters(model.state_dict(), root_rank=1)
hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
hvd.broadcast_optimizer_state(optimizer, root_rank=1)
whole = [*model.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]
equal = all(torch.equal(hvd.broadcast(t, 1), t) for t in whole)
equal, optimizer.param_groups[0]["lr"], int(model[1].num_batches_tracked), len(whole)"""
    assert ranks(book, code) == ["(True, 0.2, 2, 19)"] * 2
    assert "broadcast_parameters takes model.state_dict()" in says(book, "hvd.broadcast_parameters([1], 0)")


# -------------------------------------------------------------------------------------------------- sets, barrier, join


def test_an_operation_can_be_limited_to_some_ranks(book: Notebook) -> None:
    code = """
even, odd = hvd.ProcessSet([0, 2]), hvd.add_process_set([1, 3])
hvd.add_process_set(even)
mine = odd if r % 2 else even
value = hvd.allreduce(torch.tensor([float(r)]), op=hvd.Sum, process_set=mine).item()
hvd.barrier()
told = value, mine.rank(), mine.size(), even.ranks, odd.included()
found = hvd.get_process_set_ids_and_ranks()
assert hvd.remove_process_set(even) and not hvd.remove_process_set(hvd.global_process_set)
(*told, len(found))"""
    assert ranks(book, code, 4) == [
        "(2.0, 0, 2, [0, 2], False, 3)", "(4.0, 0, 2, [0, 2], True, 3)",
        "(2.0, 1, 2, [0, 2], False, 3)", "(4.0, 1, 2, [0, 2], True, 3)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("hvd.allreduce(torch.ones(1), process_set=hvd.add_process_set([0]))", "rank 1 is not in ProcessSet(process_set_id=1"),
        ("hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0, 1]))", "has not been added"),
        ("hvd.add_process_set([0, 5])", "a process set must contain ranks from 0 to 1; got [0, 5]"),
        ("hvd.add_process_set([1, 0])", "there is a process set of the ranks [0, 1] already"),
    ],
)  # fmt: skip
def test_sets_that_cannot_be_are_refused(book: Notebook, code: str, sentence: str) -> None:
    assert sentence in says(book, code)


def test_ranks_with_unequal_batches_join(book: Notebook) -> None:
    code = """
a = torch.nn.Parameter(torch.zeros(1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0))
for batch in range([3, 5, 2, 4][r]):
    optimizer.zero_grad()
    (a * 4).backward()
    optimizer.step()
last = hvd.join()
again = hvd.join() >= 0
last, again, a.item(), hvd.broadcast(a.detach(), 1).item(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()"""
    values = ranks(book, code, 4)
    assert [value.split(", ")[0] for value in values] == ["(1"] * 4
    assert "-14.0, -14.0, 4.0)" in values[1]  # 4 + 4 + 3 + 2 + 1


def test_what_needs_all_ranks_is_an_error_once_one_has_joined(book: Notebook) -> None:
    code = "if r: hvd.join()\nelse: hvd.broadcast(torch.ones(1), 0, name='late')"
    assert "broadcast 'broadcast.late' needs all ranks, and some have called hvd.join()" in says(book, code)
