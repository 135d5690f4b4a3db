"""What a rank draws at random when nobody has seeded anything."""

from __future__ import annotations

from ast import literal_eval
from textwrap import dedent

import pytest
import torch

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

DRAW = "import random, numpy, torch\n(torch.rand(1).item(), random.random(), float(numpy.random.rand()))"


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    """One whose ranks no test has seeded."""
    shared_notebook.ok("%%distributed --ranks 2 --fresh\npass")
    return shared_notebook


def drawn(book: Notebook, line: str) -> tuple[tuple[float, ...], ...]:
    """By rank."""
    book.ok(f"%%distributed --ranks 2 --out drawn {line}\n{DRAW}")
    return tuple(map(tuple, literal_eval(book.ok("[*drawn]").result)))


def test_ranks_draw_different_numbers_and_new_ones_each_time(book: Notebook) -> None:
    numbers = [*drawn(book, "--fresh"), *drawn(book, "--fresh")]

    for kind in zip(*numbers, strict=True):
        assert len(set(kind)) == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_train_together_draw_the_same_from_the_first_cell_on(book: Notebook, strategy: str) -> None:
    first, again = drawn(book, f"--fresh --strategy {strategy}"), drawn(book, f"--strategy {strategy}")

    assert first[0] == first[1]
    assert again[0] == again[1]
    assert not set(first[0]) & set(again[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "drifts",
    [
        "import torch\nif rank == 0: torch.rand(3)",
        "import random, numpy\nif rank == 1: random.random(); numpy.random.rand(5)",
        "import random, torch\ntorch.manual_seed(7 + rank)\nrandom.gauss(0, rank)",
    ],
)
def test_warm_ranks_that_have_drawn_apart_draw_the_same_in_the_next_training(
    book: Notebook, strategy: str, drifts: str
) -> None:
    """Else ranks that split data at random train on one another's validation data."""
    drawn(book, f"--fresh --strategy {strategy}")
    book.ok(f"%%distributed --ranks 2 --strategy {strategy}\n{drifts}")

    first, second = drawn(book, f"--strategy {strategy}")

    assert first == second


def test_what_was_seeded_goes_on_where_rank_0_is(book: Notebook) -> None:
    seeds = book.ok(
        dedent("""\
            %%distributed --ranks 2 --fresh
            import torch
            torch.manual_seed(rank);""")
    )

    outcome = book.ok(f"%%distributed --ranks 2 --out drawn --strategy ddp\n{DRAW}")
    numbers = literal_eval(book.ok("[*drawn]").result)

    assert "seed" not in seeds.view
    assert "an earlier cell had seeded the ranks differently" in outcome.view
    for rank in (0, 1):
        assert numbers[rank][0] == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


def test_after_the_loss_of_rank_0_nothing_is_said_of_seeds_that_were_alike(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --fresh
            import torch
            torch.manual_seed(3);""")
    )
    book.fails(
        dedent("""\
            %%distributed --ranks 2
            import os, signal, time
            if rank == 0: os.kill(os.getpid(), signal.SIGKILL)""")
    )

    outcome = book.ok(f"%%distributed --ranks 2 --out drawn --strategy ddp\n{DRAW}")

    assert "seeded" not in outcome.view
    assert book.ok("drawn[0] == drawn[1]").result == "True"


def test_a_seed_of_all_ranks_stays_and_nothing_is_said(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --fresh
            import torch
            torch.manual_seed(3);""")
    )

    outcome = book.ok(f"%%distributed --ranks 2 --out drawn --strategy ddp\n{DRAW}")

    assert "seeded" not in outcome.view
    assert (
        literal_eval(book.ok("drawn[1][0]").result) == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    )


def test_a_cell_that_seeds_by_rank_gets_what_it_says(book: Notebook) -> None:
    book.ok(
        f"%%distributed --ranks 2 --fresh --out drawn --strategy ddp\nimport torch\ntorch.manual_seed(rank)\n{DRAW}"
    )

    for rank in (0, 1):
        wanted = torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()
        assert literal_eval(book.ok(f"drawn[{rank}][0]").result) == wanted


LEAK = """
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
data = TensorDataset(torch.arange(400).float().unsqueeze(1), torch.zeros(400, 1))
order = torch.randperm(400).tolist()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
trained = []
for x, y in DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(order[:320])):
    trained += x.flatten().int().tolist()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    validated = [int(i) for x, _ in DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(order[320:])) for i in x]
trained, validated
"""


def test_no_sample_of_an_unseeded_split_is_both_trained_on_and_validated_on(book: Notebook) -> None:
    drawn(book, "--fresh --strategy ddp")
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch
            if rank == 0: torch.rand(3);""")
    )
    book.ok(f"%%distributed --ranks 2 --strategy ddp --out seen\n{LEAK}")

    leaked = book.ok(
        "len({i for trained, _ in seen for i in trained} & {i for _, validated in seen for i in validated})"
    )

    assert leaked.result == "0"


MODEL = """
import random, numpy, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split
class Noise(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor([torch.rand(1).item(), random.random(), float(numpy.random.rand())], dtype=torch.float)
order = torch.randperm(100).tolist()
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
weights = model[0].weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
DRAWS = """
def draws(workers=0):
    noise = torch.cat([*DataLoader(Noise(), batch_size=2, num_workers=workers)])
    return (
        model(torch.ones(8, 4)).eq(0).tolist(), torch.randint(10**6, (4,)).tolist(), random.random(),
        float(numpy.random.rand()), *noise.T.tolist(),
    )
"""  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_begin_alike_and_draw_apart_once_they_have_an_optimizer(
    book: Notebook, strategy: str, workers: int
) -> None:
    """As under torchrun, where dropout and augmentation differ between ranks: else it counts as lost accuracy."""
    line = f"%%distributed --ranks 2 --strategy {strategy} --out both"
    book.ok(f"{line}\n{MODEL}{DRAWS}\norder, weights, draws({workers})")

    assert book.ok("both[0][0] == both[1][0], bool((both[0][1] == both[1][1]).all())").result == "(True, True)"
    assert book.ok("[a == b for a, b in zip(both[0][2], both[1][2])]").result == f"{[False] * 7}"


def test_batches_that_a_cell_draws_itself_are_other_ones_on_each_rank_from_the_first_on(book: Notebook) -> None:
    book.ok(
        f"%%distributed --ranks 2 --strategy ddp --out first\n{MODEL}\n"
        "first = torch.randint(10**6, (16,)).tolist()\nmodel(torch.rand(4, 4)).sum().backward()\n"
        "optimizer.step()\nfirst"
    )

    assert book.ok("len({*first[0], *first[1]}) > 30").result == "True"


def test_ranks_draw_apart_when_they_train_on_with_an_optimizer_of_an_earlier_cell(book: Notebook) -> None:
    line = "%%distributed --ranks 2 --strategy ddp"
    book.ok(f"{line} --keep model,optimizer\n{MODEL}")
    book.ok(
        f"{line} --out both\nimport random, numpy, torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        f"{MODEL[MODEL.index('class Noise') : MODEL.index('order')]}{DRAWS}\n"
        "split, drawn = torch.randperm(9).tolist(), draws()\noptimizer.step()\nsplit, drawn"
    )

    assert book.ok("both[0][0] == both[1][0]").result == "True"
    assert book.ok("any(a == b for a, b in zip(both[0][1], both[1][1]))").result == "False"


def test_random_splits_are_alike_also_after_the_optimizer_is_made(book: Notebook) -> None:
    split = "random_split(range(50), [30, 20])[0].indices"
    book.ok(f"%%distributed --ranks 2 --fresh --strategy ddp --out both\n{MODEL}\n[{split}, {split}]")

    assert book.ok("both[0] == both[1], both[0][0] == both[0][1]").result == "(True, False)"


FIRST_VALUES = """
def first_values(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
        module.bias.data.fill_(random.random() + numpy.random.rand())
def drawn():
    model.apply(first_values)
    return [model[0].weight.tolist(), model[0].bias.tolist()]
before = torch.initial_seed()
values = [drawn(), drawn()]
[*values, torch.initial_seed() == before, torch.rand(1).item()]"""


def test_first_values_of_weights_are_alike_also_after_the_optimizer_is_made(book: Notebook) -> None:
    """`model.apply(weights_init)` stands after the optimizer in many a notebook."""
    book.ok(f"%%distributed --ranks 2 --fresh --strategy ddp --out both\n{MODEL}{FIRST_VALUES}")

    alike = "[a == b for a, b in zip(*both)], both[0][0] == both[0][1], both[0][2]"
    assert book.ok(alike).result == "([True, True, True, False], False, True)"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "draws",
    [
        "model[0].reset_parameters()",
        "for part in model: nn.init.xavier_normal_(part.weight)",
        "nn.init.orthogonal_(tensor=model[0].weight)",
        "nn.MultiheadAttention(4, 2)\nnn.init.trunc_normal_(model[0].weight)",
    ],
)
def test_weights_that_are_drawn_again_are_alike_and_other_tensors_differ(
    book: Notebook, draws: str, strategy: str
) -> None:
    """As in `for name, part in model.named_children(): part.reset_parameters()` behind the optimizer."""
    cell = f"""
import torch
from torch import nn
model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
noise = nn.init.normal_(torch.empty(3)).tolist()
{draws}
before = torch.rand(2).tolist()
{draws}
model(torch.ones(2, 6)).sum().backward()
optimizer.step()
noise, before, model.state_dict() if {strategy == "ddp"} else 0"""
    book.ok(f"%%distributed --ranks 2 --fresh --strategy {strategy} --out both\n{cell}")

    assert book.ok("[a == b for a, b in zip(both[0][:2], both[1][:2])]").result == "[False, False]"


@pytest.mark.parametrize(
    ("seed", "draws"),
    [
        ("", "model.apply(lambda part: isinstance(part, nn.Linear) and nn.init.normal_(part.weight))"),
        ("torch.manual_seed(0)", "model[0].reset_parameters()"),
        ("torch.manual_seed(0)", "nn.init.trunc_normal_(model[0].weight)"),
        ("", "model.apply(lambda part: isinstance(part, nn.Linear) and part.weight.data.normal_(0, 0.1))"),
    ],
)
def test_shards_of_weights_that_are_drawn_again_are_those_of_one_draw(book: Notebook, seed: str, draws: str) -> None:
    """Each rank would fill its shard with the same numbers."""
    cell = f"""
import torch
from torch import nn
{seed}
model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{draws}
weight = model[0].weight.detach()
getattr(weight, "full_tensor", lambda: weight)()"""
    book.ok(f"%%distributed --ranks 2 --fresh --strategy fsdp --out sharded\n{cell}")
    book.ok(f"%%distributed --ranks 2 --fresh --strategy ddp --out whole\n{cell}")

    assert book.ok("len(sharded[0].unique())").result == "36"
    if seed:
        assert book.ok("(sharded[0] == whole[0]).all().item()").result == "True"


def test_a_seed_that_first_values_set_stays_set(book: Notebook) -> None:
    cell = f"{MODEL}\nmodel.apply(lambda _: torch.manual_seed(3))\n[torch.initial_seed(), torch.rand(1).item()]"
    book.ok(f"%%distributed --ranks 2 --fresh --strategy ddp --out both\n{cell}")

    assert book.ok("both[0] == both[1], both[0][0]").result == "(True, 3)"


def test_streams_that_the_ranks_share_do_not_count_as_a_seed_of_the_user(book: Notebook) -> None:
    cell = f"""{MODEL}
sampler = torch.utils.data.WeightedRandomSampler([1.0] * 9, 9)
for batch in DataLoader(range(9), batch_size=2, sampler=sampler): pass
model.apply(lambda part: random.seed(1))
random_split(range(50), [30, 20])
from jupyter_distrib.worker.pytorch import randomness
randomness.same_draws(), sorted(randomness._seeded), randomness._shared is not None"""
    book.ok(f"%%distributed --ranks 2 --fresh --strategy ddp --out both\n{cell}")

    assert book.ok("[*both]").result == "[(('', ''), [], True), (('', ''), [], True)]"


@pytest.mark.parametrize(
    ("seeds", "alike"),
    [
        ("torch.manual_seed(3)", [True] * 7),
        ("torch.manual_seed(3); random.seed(3); numpy.random.seed(3)", [True] * 7),
        ("random.seed(3)", [False, False, True, False, False, True, False]),
        ("numpy.random.seed(3)", [False, False, False, True, False, False, True]),
    ],
)
def test_a_cell_that_seeds_before_its_optimizer_gets_what_it_says(
    book: Notebook, seeds: str, alike: list[bool]
) -> None:
    cell = f"import random, numpy, torch\n{seeds}\n{MODEL}{DRAWS}\ndraws()"
    book.ok(f"%%distributed --ranks 2 --fresh --strategy ddp --out both\n{cell}")

    assert book.ok("[a == b for a, b in zip(both[0], both[1])]").result == f"{alike}"


def test_streams_of_one_rank_do_not_count_as_a_seed_of_the_user(book: Notebook) -> None:
    for _ in range(3):
        outcome = book.ok(f"%%distributed --ranks 2 --strategy ddp --out both\n{MODEL}{DRAWS}\norder, draws()")
        assert "seeded" not in outcome.view
        assert book.ok("both[0][0] == both[1][0]").result == "True"
        assert book.ok("any(a == b for a, b in zip(both[0][1], both[1][1]))").result == "False"


RESUMED = """
import random, numpy, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
import jupyter_distrib
class Noise(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(1).item(), random.random(), float(numpy.random.rand())], dtype=torch.float)
def train(path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Noise(), batch_size=2, sampler={sampler})
    plain = jupyter_distrib.resume(path, model=model, optimizer=optimizer, loader=loader)
    seen = []
    for epoch in range(plain.get("epoch", 0), 3):
        for batch in loader:
            loss = model(batch).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append((epoch, batch.tolist(), loss.item(), random.random()))
            jupyter_distrib.save("ckpt", keep=100, model=model, optimizer=optimizer, loader=loader, epoch=epoch)
        torch.rand(3)
    return seen, [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in model.parameters()]
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "sampler", ["WeightedRandomSampler(torch.ones(24), 24)", "torch.utils.data.RandomSampler(range(24))"]
)
@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_resumed_training_draws_on_every_rank_what_an_undisturbed_one_draws(
    book: Notebook, strategy: str, sampler: str, step: int
) -> None:
    cell = RESUMED.replace("{sampler}", sampler)
    line = f"%%distributed --ranks 2 --strategy {strategy}"
    book.ok("import shutil\nshutil.rmtree('ckpt', ignore_errors=True)")
    book.ok(f"{line} --out whole\n{cell}\ntrain('nowhere')")
    book.ok(f"{line} --out rest\n{cell}\ntrain('ckpt/save-{step:06}')")

    assert book.ok("[len(seen) for seen, _ in whole]").result == "[18, 18]"
    assert book.ok("whole[0][0][0] == whole[1][0][0]").result == "False"
    assert book.ok(f"[a[0][{step}:] == b[0] for a, b in zip(whole, rest)]").result == "[True, True]"
    same = "[all(map(torch.equal, a[1], b[1])) for a, b in zip(whole, rest)]"
    assert book.ok(f"import torch\n{same}").result == "[True, True]"


@pytest.mark.parametrize("how", ["sampler=S(chosen)", "batch_sampler=BatchSampler(S(chosen), 8, False)"])
def test_samplers_whose_indices_differ_between_ranks_are_named(book: Notebook, how: str) -> None:
    cell = LEAK.replace("trained = []", "order = {order}\ntrained = []").replace(
        "batch_size=8, sampler=SubsetRandomSampler(order[:320])", how
    )
    cell = cell.replace("for x, y in", "S, chosen = SubsetRandomSampler, order[:320]\nfor x, y in").replace(
        "import torch\n", "import torch\nfrom torch.utils.data import BatchSampler\n"
    )
    if "batch_sampler" not in how:
        cell = cell.replace(how, f"batch_size=8, {how}")
    line = "%%distributed --ranks 2 --strategy ddp"

    apart = book.ok(f"{line}\n{cell.replace('{order}', 'torch.randperm(400).tolist()')}")
    alike = book.ok(f"{line}\n{cell.replace('{order}', 'order if rank else order[319::-1] + order[320:]')}")

    said = "has different indices on different ranks, and all ranks have read those of rank 0"
    assert said in apart.view
    assert said not in alike.view
