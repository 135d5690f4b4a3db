"""Loaders that make their iterators themselves are divided as torch's own are, and go on at their position."""

from __future__ import annotations

from ast import literal_eval
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

SETUP = """
import torch, jupyter_distrib
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(24.0).view(24, 1))

class Own(DataLoader):
    made = 0
    def _get_iterator(self):
        self.made += 1
        return super()._get_iterator()

class Direct(DataLoader):
    def __iter__(self):
        return self._get_iterator()

def train(loader, steps=99, save=None):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen = []
    for (x,) in loader:
        seen.append([int(each) for each in x])
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == steps:
            if save is not None:
                jupyter_distrib.save(save, loader=loader)
            break
    return seen
"""
DDP = "%%distributed --ranks 2 --strategy ddp --out seen\n"


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(SETUP)
    return shared_notebook


@pytest.mark.parametrize("kind", ["Own", "Direct"])
def test_loaders_with_an_iterator_of_their_own_are_divided(book: Notebook, kind: str) -> None:
    read = book.ok(f"{DDP}loader = {kind}(data, batch_size=4)\ntrain(loader), len(loader), getattr(loader, 'made', 1)")
    assert "sampler added" in read.text
    shares = book.ok("print([sorted(sum(each[0], [])) for each in seen], [each[1:] for each in seen])").stdout
    assert shares.strip() == f"{[list(range(0, 24, 2)), list(range(1, 24, 2))]} [(3, 1), (3, 1)]"


def test_a_class_that_is_defined_after_the_optimizer_is_divided_too(book: Notebook) -> None:
    code = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
class Later(DataLoader):
    def __iter__(self):
        return self._get_iterator()
count = 0
for (x,) in Later(data, batch_size=4):
    count += len(x)
    model(x).pow(2).mean().backward()
    optimizer.step()
count"""
    book.ok(DDP + code)
    assert book.ok("list(seen)").result == "[12, 12]"


def test_the_position_of_a_loader_with_an_iterator_of_its_own_is_kept(book: Notebook) -> None:
    code = """
torch.manual_seed({})
loader = Own(data, batch_size=2, shuffle=True)
jupyter_distrib.resume("position", loader=loader)
train(loader, {}, "position")"""
    book.ok(f"{DDP}torch.manual_seed(1)\ntrain(Own(data, batch_size=2, shuffle=True))")
    book.ok("whole = list(seen)")
    book.ok(DDP + code.format(1, 2))
    book.ok(DDP + code.format(1, 99))
    assert book.ok("[each[2:] for each in whole] == list(seen)").result == "True"


STEPS = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

def train_step(x):
    model.train()
    model(x).pow(2).mean().backward()
    optimizer.step()

@torch.no_grad()
def test_step(x):
    model.eval()
    return model(x)

def epoch(loader, step):
    count = 0
    for (x,) in loader:
        step(x)
        count += len(x)
    return count

train, test = DataLoader(data, batch_size=4), DataLoader(data, batch_size=4)
"""


def test_a_loop_whose_steps_set_the_mode_is_read_as_it_was_used_before(book: Notebook) -> None:
    book.ok(f"{DDP}{STEPS}[(epoch(train, train_step), epoch(test, test_step)) for _ in range(3)]")
    first, *others = literal_eval(book.ok("list(seen)[0]").result)
    assert first == (12, 12), "the first time the mode is all that is known"
    assert others == [(12, 24), (12, 24)]


BUFFERED = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = DataLoader(data, batch_size=4)
batches = {kept}
for (x,) in {read}:
    model(x).pow(2).mean().backward()
    optimizer.step()
sum(len(x) for (x,) in batches)"""


@pytest.mark.parametrize("kept", ["list(loader)", "[each for each in loader]", "(list(loader), list(loader))[1]"])
def test_batches_that_are_kept_and_trained_with_are_not_taken_for_an_evaluation(book: Notebook, kept: str) -> None:
    """Who followed the note would have trained with all batches on every rank."""
    untrained = "where nothing was trained"

    assert untrained not in book.ok(DDP + BUFFERED.format(kept=kept, read="batches")).view
    assert book.ok("list(seen)").result == "[12, 12]"
    assert untrained in book.ok(DDP + BUFFERED.format(kept=kept, read="loader")).view


def test_steps_over_two_loaders_at_once_count_once(book: Notebook) -> None:
    both = BUFFERED.format(kept="list(loader)", read="zip(loader, loader)").replace(
        "for (x,) in zip", "for (x,), _ in zip"
    )
    cell = both + dedent("""
        for (x,) in batches:
            model(x).pow(2).mean().backward()
            optimizer.step()""")

    assert "where nothing was trained" not in book.ok(DDP + cell).view


def test_two_loops_over_one_loader_are_told_apart(book: Notebook) -> None:
    """Both loops are in one function, which one line calls; in a decorated function, all lines had been one."""
    book.ok(f"{DDP}{STEPS}[(epoch(train, train_step), epoch(train, test_step)) for _ in range(3)]")
    assert literal_eval(book.ok("list(seen)[0]").result)[1:] == [(12, 24), (12, 24)]


def test_a_share_stays_one_for_a_library_whose_metrics_add_up(book: Notebook) -> None:
    loaded = "import sys, types\nsys.modules['ignite'] = types.ModuleType('ignite')\n"
    count = "counts = [(epoch(train, train_step), epoch(test, test_step)) for _ in range(2)]\n"
    book.ok(f"{DDP}{STEPS}{loaded}{count}del sys.modules['ignite']\ncounts")
    assert literal_eval(book.ok("list(seen)[0]").result) == [(12, 12), (12, 12)]


def test_a_loop_that_does_not_set_the_mode_follows_it(book: Notebook) -> None:
    code = "[(model.train(), epoch(train, lambda x: model(x).sum().backward()))[1], (model.eval(), epoch(train, model))[1]]"
    book.ok(f"{DDP}{STEPS}[{code} for _ in range(2)]")
    assert book.ok("list(seen)[0]").result == "[[12, 24], [12, 24]]"


ENDLESS = """
import random
class Endless(torch.utils.data.Sampler):
    \"\"\"As those of trainers that count iterations: it has a length, and does not end.\"\"\"
    def __len__(self):
        return 24
    def __iter__(self):
        while True:
            yield random.randrange(24)
class Unsized:
    def __iter__(self):
        while True:
            yield int(torch.randint(24, ()))
class Batches:
    def __len__(self):
        return 10**9
    def __iter__(self):
        while True:
            yield torch.randint(24, (4,)).tolist()
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield (torch.tensor([float(torch.randint(24, ()))]),)
"""


@pytest.mark.parametrize("batch", ["", "--batch global "])
@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(data, batch_size=4, sampler=torch.utils.data.RandomSampler(data, True, int(1e10)))",
        "DataLoader(data, batch_size=4, sampler=torch.utils.data.RandomSampler(data, True, int(1e10)), num_workers=1)",
        "DataLoader(data, batch_size=4, sampler=Endless())",
        "DataLoader(data, batch_size=4, sampler=Unsized())",
        "DataLoader(data, batch_sampler=Batches())",
        "DataLoader(Stream(), batch_size=4)",
        "DataLoader(Stream(), batch_size=4, num_workers=1)",
    ],
)
def test_what_never_ends_is_drawn_piece_by_piece_and_dealt_in_rank_0s_order(
    book: Notebook, loader: str, batch: str
) -> None:
    book.ok(
        f"%%distributed --ranks 2 --strategy ddp {batch}--out seen\n{ENDLESS}\n"
        f"loader = {loader}\nseen = train(loader, steps=5)\nseen"
    )
    shares = [[each for step in steps for each in step] for steps in literal_eval(book.ok("[*seen]").result)]
    assert {len(share) for share in shares} == ({10} if batch else {20})
    assert shares[0] != shares[1], "drawn once, and not by each rank alike"


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(data, batch_size=4, sampler=Recorded(Endless()))",
        "DataLoader(data, batch_size=4, sampler=Unsized())",
        "DataLoader(Stream(), batch_size=4)",
    ],
)
def test_ranks_draw_alike_what_they_deal_though_their_dropout_differs(book: Notebook, loader: str) -> None:
    recorded = ENDLESS.replace("int(torch.randint(24, ()))", "note(int(torch.randint(24, ())))").replace(
        "float(torch.randint(24, ()))", "note(float(torch.randint(24, ())))"
    )
    book.ok(
        f"%%distributed --ranks 2 --fresh --strategy ddp --out seen\ndrawn = []\n"
        "def note(it):\n    drawn.append(int(it))\n    return it\n"
        f"{recorded}\n"
        "class Recorded(Endless):\n    def __init__(self, of):\n        self.of = of\n"
        "    def __iter__(self):\n        return map(note, iter(self.of))\n"
        f"seen = train({loader}, steps=5)\nsum(seen, []), drawn[:40], torch.rand(1).item()"
    )
    first, second = literal_eval(book.ok("[*seen]").result)

    assert first[1] == second[1] or "Endless" in loader, "of a sampler with a length the order of rank 0 is sent"
    assert first[0] == first[1][0::2]
    assert second[0] == first[1][1::2]
    assert first[2] != second[2]


@pytest.mark.parametrize("seed", ["", "torch.manual_seed(rank)\n"])
@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(data, batch_size=5, shuffle=True, drop_last=True)",
        "DataLoader(data, batch_size=5, shuffle=True, num_workers=1, persistent_workers=True)",
        "DataLoader(data, batch_size=5, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 24, 24))",
        "DataLoader(data, batch_size=None, sampler=torch.utils.data.RandomSampler(data))",
        "DataLoader(data, batch_sampler=Shuffled())",
    ],
)
def test_an_evaluation_reads_in_the_same_order_on_all_ranks(book: Notebook, loader: str, seed: str) -> None:
    book.ok(
        f"""%%distributed --ranks 2 --fresh --strategy ddp --out seen
import random
class Shuffled:
    def __len__(self):
        return 12
    def __iter__(self):
        return iter(random.sample([[each, each + 12] for each in range(12)], 12))
def evaluate(loader):
    with torch.no_grad():
        return [int(each) for x, in loader for each in x.view(-1)]
train_loader = DataLoader(data, batch_size=4, shuffle=True)
val_loader = {loader}
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
{seed}orders, shares = [], []
for epoch in range(3):
    shares.append([])
    for x, in train_loader:
        shares[-1] += [int(each) for each in x]
        model(x).mean().backward()
        optimizer.step()
    if rank == 0: evaluate(val_loader)
    orders.append(None)
    for x, in train_loader:
        model(x).mean().backward()
    orders[-1] = evaluate(val_loader), evaluate(val_loader)
orders, shares, torch.rand(1).item(), random.random()"""
    )
    first, second = literal_eval(book.ok("[*seen]").result)

    assert (first[0] == second[0]) is not bool(seed), "a seed of the user's own is not overruled"
    assert all(one != two for one, two in first[0]), "each pass has its own order"
    assert first[0][0] != first[0][1]
    assert all(sorted(a + b) == list(range(24)) for a, b in zip(first[1], second[1], strict=True)), "shares fit"
    assert first[2] != second[2]
    assert first[3] != second[3]
