"""Loaders that are met again: in the next cell with a model that an evaluation has left in eval mode, made anew for each
epoch, and with a generator that the cell seeds, saves and restores. Real kernels, real ranks."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

SETUP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).view(64, 1))

def fit(model, loader, rest):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    steps = len(loader)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    model.train()
    for (x,) in loader:
        model(x).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        read = sum(len(x) for (x,) in rest)
    return steps, read, round(schedule.get_last_lr()[0] / 1e-4, 3)
"""
ON_TWO = "%%distributed --ranks 2 --strategy ddp"
MAKE = "model = torch.nn.Linear(1, 1)\nloader, rest = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)\n"


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(SETUP)
    return shared_notebook


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_kept_loader_is_as_long_as_it_was_though_the_kept_model_is_in_eval_mode(
    book: Notebook, strategy: str
) -> None:
    line = f"%%distributed --ranks 2 --strategy {strategy} --keep model,loader,rest\n"
    for cell in (f"{line}{MAKE}", line):
        again = book.ok(f"{cell}fit(model, loader, rest)")
        assert again.result == "ranks 0-1: (4, 64, 0.1)"
        assert "len()" not in again.view
        assert "steps" not in again.view


def test_a_length_that_was_asked_while_nothing_was_in_training_mode_is_told(book: Notebook) -> None:
    book.ok(f"{ON_TWO} --keep model\n{MAKE}model.eval()")
    told = book.ok(f"{ON_TWO}\n{MAKE.splitlines()[1]}\nfit(model, loader, rest)")

    assert told.result.startswith("ranks 0-1: (8, 64, ")
    assert "called on line 3 while no model was in training mode, was that of the whole loader; read" in " ".join(
        told.view.split()
    )
    assert "each rank has a share: call model.train() before" in " ".join(told.view.split())


def test_a_length_of_an_evaluation_is_not_told(book: Notebook) -> None:
    book.ok(f"{ON_TWO} --keep model\n{MAKE}model.eval()")
    outcome = book.ok(
        f"{ON_TWO}\n{MAKE.splitlines()[1]}\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\nwhole = len(loader)\n"
        "read = sum(len(x) for (x,) in loader)\nmodel.train()\nfor (x,) in loader:\n"
        "    model(x).mean().backward()\n    optimizer.step()\nwhole, read"
    )

    assert outcome.result == "ranks 0-1: (8, 64)"
    assert "len()" not in outcome.view


MADE_ANEW = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

def epoch():
    seen = []
    for batch in DataLoader(DATA, batch_size=8, shuffle=True):
        x = batch[0] if isinstance(batch, list) else batch
        model(x).mean().backward()
        optimizer.step()
        seen += x.flatten().tolist()
    return seen

first, second = epoch(), epoch()
first, second
"""


@pytest.mark.parametrize("made", ["rows", "TensorDataset(*data.tensors)"], ids=["a list", "a data set made anew"])
def test_a_loader_made_anew_for_each_epoch_reshuffles(book: Notebook, made: str) -> None:
    book.ok("rows = list(data.tensors[0])")
    cell = f"{ON_TWO} --out got{MADE_ANEW.replace('DATA', made)}"
    assert "sampler added" in book.ok(cell).view
    orders = "[one[number] for number in (0, 1) for one in got]"
    book.ok(f"before = {orders}\ntrue = [sorted(a + b) == list(range(64)) for a, b in (before[:2], before[2:])]")

    assert book.ok("true, before[:2] == before[2:]").result == "([True, True], False)"
    book.ok(cell)
    assert book.ok(f"before == {orders}").result == "True", "a cell that runs again does the same"


EPOCHS = dedent("""
    def generator(seed):
        return torch.Generator().manual_seed(seed)

    def epoch(*loaders, limit=99):
        seen = []
        for number, batches in enumerate(zip(*loaders)):
            if number == limit:
                break
            batches = [each[0] if isinstance(each, list) else each for each in batches]
            model(batches[0]).mean().backward()
            optimizer.step()
            seen += zip(*(each.flatten().tolist() for each in batches))
        return seen

    def epochs():
        x, y = data.tensors[0], data.tensors[0] + 100
        g = generator(0)
        a = DataLoader(x, 8, shuffle=True, generator=g)
        orders = [epoch(a), epoch(a)]
        g.manual_seed(0)
        orders += [epoch(a), epoch(DataLoader(x, 8, shuffle=True, generator=generator(0)))]
        state = g.get_state()
        orders += [epoch(a, limit=2)]
        g.set_state(state)
        orders += [epoch(a, limit=2), epoch(DataLoader(x, 8, shuffle=True, generator=g, num_workers=1))]
        a, b = (DataLoader(each, 8, shuffle=True, generator=generator(0)) for each in (x, y))
        orders += [epoch(a, b), epoch(a, b)]
        return orders, [y - x for x, y in orders[-2]]
""")
MAKE_MODEL = "model = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-9)\n"


def test_the_order_of_a_loader_with_a_generator_is_that_of_one_process(book: Notebook) -> None:
    book.ok(EPOCHS)
    book.ok(f"{MAKE_MODEL}whole, _ = epochs()")
    outcome = book.ok(f"{ON_TWO} --batch global --out got\n{MAKE_MODEL}epochs()")
    assert "sampler added" in outcome.view
    assert "different states" not in outcome.view
    book.ok(
        dedent("""
        def batches(parts, size):
            return [sorted(sum((part[at : at + size] for part in parts), [])) for at in range(0, len(parts[0]), size)]
        ranks = [got[rank][0] for rank in (0, 1)]
        alike = [batches(parts, 4) == batches([one], 8) for *parts, one in zip(*ranks, whole)]
        pairs = {each for rank in (0, 1) for each in got[rank][1]}
        """)
    )
    assert book.ok("alike, pairs").result == f"({[True] * 9}, {{100.0}})"
    assert book.ok("whole[0] == whole[2] == whole[3] != whole[1] and whole[4] == whole[5]").result == "True"


def test_loaders_without_generators_that_are_read_in_step_have_orders_of_their_own(book: Notebook) -> None:
    book.ok(EPOCHS)
    make = "(DataLoader(each, 8, shuffle=True) for each in (list(data.tensors[0]), list(data.tensors[0])))"
    book.ok(f"{ON_TWO} --out got\n{MAKE_MODEL}[epoch(*{make}) for _ in range(2)]")
    book.ok("firsts = [[x for x, _ in each] for each in got[0]]")
    book.ok("pairs = [each for rank in got for both in rank for each in both]")
    assert book.ok("sum(x == y for x, y in pairs) < len(pairs) / 4, firsts[0] != firsts[1]").result == "(True, True)"


def test_a_generator_that_is_seeded_by_rank_shuffles_alike_on_all_ranks(book: Notebook) -> None:
    book.ok(EPOCHS)
    loader = "DataLoader(data.tensors[0], 8, shuffle=True, generator=generator(rank))"
    outcome = book.ok(f"{ON_TWO} --out got\n{MAKE_MODEL}epoch({loader})")
    assert "has different states on different ranks" in " ".join(outcome.view.split())
    assert book.ok("sorted(x for r in (0, 1) for (x,) in got[r]) == [*range(64)]").result == "True"


def test_a_pass_that_one_rank_began_alone_leaves_the_next_one_whole(book: Notebook) -> None:
    book.ok(EPOCHS)
    loader = "loader = DataLoader(data.tensors[0], 8, shuffle=True, generator=generator(0))"
    alone = "first = next(iter(loader)) if rank == 0 else None"
    outcome = book.ok(f"{ON_TWO} --out got\n{MAKE_MODEL}{loader}\n{alone}\nepoch(loader)")
    assert "has different states on different ranks" in " ".join(outcome.view.split())
    assert book.ok("sorted(x for r in (0, 1) for (x,) in got[r]) == [*range(64)]").result == "True"


def test_ranks_of_one_model_read_the_same_batches_though_one_has_drawn_more(book: Notebook) -> None:
    book.ok(EPOCHS)
    loader = "g = generator(0)\nif rank == 0: torch.randint(8, (2,), generator=g)\n"
    cell = f"{MAKE_MODEL}{loader}epoch(DataLoader(data.tensors[0], 8, shuffle=True, generator=g))"
    book.ok(f"{ON_TWO.replace('ddp', 'tp')} --out got\n{cell}")
    assert book.ok("got[0] == got[1], len(got[0])").result == "(True, 64)"


def test_a_loader_with_a_generator_can_be_run_dry(book: Notebook) -> None:
    book.ok(EPOCHS)
    cell = f"{MAKE_MODEL}epoch(DataLoader(data.tensors[0], 8, shuffle=True, generator=generator(0)))"
    assert "fits" in book.ok(f"{ON_TWO} --dry-run\n{cell}").text


@pytest.mark.parametrize("made", ["data", "[(x,) for x in data.tensors[0]]"])
def test_a_pass_that_one_rank_began_alone_leaves_the_ranks_in_step(book: Notebook, made: str) -> None:
    book.ok(EPOCHS)
    cell = dedent(f"""\
        mine = {made}

        def batches(limit=None):
            for number, batch in enumerate(DataLoader(mine, 8, shuffle=True)):
                if number == limit:
                    return
                yield batch[0]

        if rank == 0:
            next(batches(1))
        [epoch(batches()) for _ in range(2)]""")
    book.ok(f"{ON_TWO} --out got\n{MAKE_MODEL}{cell}")
    book.ok("seen = [sorted(x for r in (0, 1) for (x,) in got[r][number]) for number in (0, 1)]")
    assert book.ok("[each == [*range(64)] for each in seen]").result == "[True, True]"


def test_what_is_read_and_not_trained_with_is_told_though_another_reading_is_open(book: Notebook) -> None:
    book.ok(SETUP)
    cell = dedent("""\
        LINE
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        loader = DataLoader(data, batch_size=8)
        PROBE
        READ
        for x in kept:
            model(x).mean().backward()
            optimizer.step()""")
    cell = cell.replace("LINE", ON_TWO)
    told = "where nothing was trained"
    totals = "kept = [data.tensors[0][:4]] * 3\nfor (x,) in loader: x.sum().item()"
    assert told in " ".join(book.ok(cell.replace("PROBE", "").replace("READ", totals)).view.split())
    for probe in ("", "probe = iter(loader); first = next(probe)"):
        kept = book.ok(cell.replace("PROBE", probe).replace("READ", "kept = [x.add_(1) for (x,) in loader]"))
        assert told not in " ".join(kept.view.split())


def test_a_look_at_other_data_on_one_rank_leaves_evaluations_alike(book: Notebook) -> None:
    book.ok(SETUP)
    cell = dedent("""\
        LINE --out got
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        model.eval()
        with torch.no_grad():
            if rank == 0:
                next(iter(DataLoader(data, shuffle=True)))
            seen = [x.item() for (x,) in DataLoader(data, shuffle=True)]
        seen""")
    book.ok(cell.replace("LINE", ON_TWO))
    assert book.ok("got[0] == got[1], sorted(got[0]) == [*range(64)]").result == "(True, True)"
