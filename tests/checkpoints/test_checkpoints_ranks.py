"""A checkpoint does not depend on who wrote it: 4 ranks, 2 ranks, or the notebook itself. Real kernels."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

DEFINITIONS = """
import torch, jupyter_distrib
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
    return model

def optimizer_for(model):
    body, head = list(model[0].parameters()), list(model[2].parameters())
    return torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.02}], lr=0.01)

def sharded(model):
    from torch.distributed.fsdp import fully_shard
    fully_shard(model[0])
    return fully_shard(model)

def train(model, optimizer, steps=3):
    for _ in range(steps):
        loss = model(torch.arange(20.).reshape(4, 5) / 20).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
"""
SAVE = """model = sharded(build())
optimizer = optimizer_for(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
train(model, optimizer)
jupyter_distrib.save("ckpt", model=model, optimizer=optimizer, scheduler=scheduler, epoch=3)
train(model, optimizer, 2)"""
LOAD = """model = {made}
for parameter in model.parameters():
    parameter.data.zero_()
optimizer = optimizer_for(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
epoch = jupyter_distrib.load("ckpt", model=model, optimizer=optimizer, scheduler=scheduler)["epoch"]
print("epoch", epoch, "step size", scheduler.step_size)
train(model, optimizer, 2)"""


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(DEFINITIONS)
    return shared_notebook


def value(text: str) -> float:
    return float(text.rpartition(":")[2])


@pytest.mark.versions
def test_what_4_ranks_have_saved_goes_on_with_2_ranks_and_without_any(book: Notebook) -> None:
    went_on = value(book.ok(f"%%distributed --ranks 4 --strategy ddp\n{SAVE}").result)

    with_2 = book.ok(f"%%distributed --ranks 2 --strategy ddp\n{LOAD.format(made='sharded(build())')}")
    alone = book.ok(LOAD.format(made="build()"))

    assert value(with_2.result) == pytest.approx(went_on, rel=1e-5)
    assert value(alone.result) == pytest.approx(went_on, rel=1e-5)
    assert "epoch 3 step size 2" in with_2.text
    assert "epoch 3 step size 2" in alone.text


@pytest.mark.versions
def test_what_the_notebook_has_saved_is_sharded_by_2_ranks(book: Notebook) -> None:
    went_on = value(book.ok(SAVE.replace("sharded(build())", "build()").replace("ckpt", "plain")).result)

    with_2 = book.ok(
        f"%%distributed --ranks 2 --strategy ddp\n{LOAD.format(made='sharded(build())').replace('ckpt', 'plain')}"
    )

    assert value(with_2.result) == pytest.approx(went_on, rel=1e-5)


def test_of_what_every_rank_has_rank_0s_is_written(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            model = build()
            for parameter in model.parameters():
                parameter.data.fill_(rank + 7)
            jupyter_distrib.save('replicas', model=model, who=rank)""")
    )

    found = book.ok(
        "read = jupyter_distrib.load('replicas'); read['who'], {v.unique().item() for v in read['model'].values()}"
    )

    assert found.result == "(0, {7.0})"


def test_a_folder_that_one_rank_cannot_write_is_one_sentence_from_all(book: Notebook) -> None:
    failed = book.fails("%%distributed --ranks 2 --strategy ddp\njupyter_distrib.save('/proc/nowhere', a=rank)")

    assert failed.ename == "DistributedError"
    assert "/proc/nowhere cannot be written" in failed.evalue
    assert book.ok("%%distributed --ranks 2 --strategy ddp\nrank").result == "rank 0: 0\nrank 1: 1"


def test_without_a_group_only_rank_0_may_write(book: Notebook) -> None:
    failed = book.fails("%%distributed --ranks 2\njupyter_distrib.save('alone', a=rank)")
    assert "was called on rank 1, and the ranks have no process group to write together" in failed.evalue

    book.ok(
        dedent("""\
            %%distributed --ranks 2
            if rank == 0:
                jupyter_distrib.save('alone', a=rank)""")
    )
    assert book.ok("jupyter_distrib.load('alone')").result == "{'a': 0}"


def test_a_save_that_is_interrupted_leaves_the_earlier_checkpoint_and_the_next_one_is_good(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --strategy ddp\njupyter_distrib.save('often', a=torch.zeros(3))")
    book.start(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import time
            from jupyter_distrib.checkpoints import folder
            def write(self, *_):
                print('writing')
                time.sleep(60)
            folder.Writer._write_data, own = write, folder.Writer._write_data
            try:
                jupyter_distrib.save('often', a=torch.ones(3))
            finally:
                folder.Writer._write_data = own""")
    )
    book.until("writing")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"
    assert book.ok("jupyter_distrib.load('often')['a'].sum().item()").result == "0.0"

    book.ok("%%distributed --ranks 2 --strategy ddp\njupyter_distrib.save('often', a=torch.ones(3))")

    assert book.ok("jupyter_distrib.load('often')['a'].sum().item()").result == "3.0"
    assert book.ok("import os; len(os.listdir('often'))").result == "2"  # .metadata, and rank 0's file


def test_rank_0_alone_writes_what_is_not_sharded_and_ranks_that_call_it_too_find_it_written(book: Notebook) -> None:
    line = "%%distributed --ranks 2 --strategy ddp\n"
    body = "model = build()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    call = 'jupyter_distrib.save("alone", model=model)'
    look = "import os\nos.path.exists('alone/.metadata')"

    assert book.ok(f"{line}{body}if rank == 0: {call}\nrank").result == "rank 0: 0\nrank 1: 1"
    assert book.ok(f"{line}{body}{call.replace('alone', 'both')}\n{look.replace('alone', 'both')}").result.endswith(
        "True"
    )
    wrong = book.fails(f"{line}{body}if rank == 1: {call}")
    assert "rank 0, which writes, has ended its cell without a call" in wrong.traceback


def test_shards_that_only_rank_0_saves_are_named_at_once(book: Notebook) -> None:
    body = "model = build()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    wrong = book.fails(
        f'%%distributed --ranks 2 --strategy fsdp\n{body}if rank == 0: jupyter_distrib.save("part", model=model)'
    )
    assert "jupyter_distrib.save() was called on rank 0, and not on rank 1" in wrong.traceback
    assert "if rank == 0: jupyter_distrib.save" in wrong.traceback


def test_a_series_that_rank_0_does_not_save_is_named(book: Notebook) -> None:
    line = "%%distributed --ranks 2 --strategy ddp\nimport time\n"
    for call in (
        "if rank == 1: jupyter_distrib.save('only-1', keep=3, n=1)",
        "jupyter_distrib.save(f'only-{rank}', keep=3, n=1)",
    ):
        wrong = book.fails(line + call)
        assert "jupyter_distrib.save('only-1') was called on rank 1, and not on rank 0, which writes" in wrong.traceback
    book.ok(f"{line}if rank == 0: time.sleep(0.5)\njupyter_distrib.save('late', keep=3, n=1)")
    assert book.ok("jupyter_distrib.load('late')").result == "{'n': 1}"


@pytest.mark.parametrize("keep", ["", "keep=2, "])
def test_shards_that_the_ranks_save_into_different_folders_are_named(book: Notebook, keep: str) -> None:
    line = "%%distributed --ranks 2 --strategy fsdp --timeout 30\n"
    body = "model = build()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"

    wrong = book.fails(f"{line}{body}jupyter_distrib.save(f'of-{{rank}}', {keep}model=model)")
    alone = book.fails(f"{line}{body}if rank == 1: jupyter_distrib.save('of-1', {keep}model=model)")

    assert "jupyter_distrib.save() was called for 'of-0' on rank 0 and for 'of-1' on rank 1, and all" in wrong.traceback
    assert "jupyter_distrib.save() was called on rank 1, and " in alone.traceback
    assert "rank 0" in alone.evalue


AVERAGE = """
class Average:
    def __init__(self, model):
        self.values = {key: value.detach().clone() for key, value in model.state_dict().items()}

    def state_dict(self):
        return dict(self.values)

def average_of():
    model = build()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = Average(model)
    {save}
"""


def test_shards_in_an_object_of_the_users_are_written_by_the_ranks_that_have_them(book: Notebook) -> None:
    calls_by_name = {
        "alone": "jupyter_distrib.save('only-alone', keep=1, model=average)",
        "late": "[jupyter_distrib.save('only-late', keep=1, n=1), jupyter_distrib.save('only-late', keep=1, n=2, model=average)]",
        "model": "[jupyter_distrib.save('only-model', keep=1, n=1), jupyter_distrib.save('only-model', keep=1, model=model)]",
    }
    for calls in calls_by_name.values():
        book.ok(f"%%distributed --ranks 2 --strategy fsdp\n{AVERAGE.replace('{save}', calls)}\naverage_of()")
    book.ok("m = build(); train(m, torch.optim.SGD(m.parameters(), lr=0.1)); expected = m.state_dict()")
    for name in calls_by_name:
        found = book.ok(
            f"found = jupyter_distrib.load('only-{name}')['model']\n"
            "all(torch.allclose(found[key], value) for key, value in expected.items())"
        )
        assert found.result == "True", name


def test_a_series_that_is_saved_between_a_forward_and_a_backward_pass_is_sharded(book: Notebook) -> None:
    body = dedent("""\
        model = build()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 5))
    """)
    book.ok(f"%%distributed --ranks 2 --strategy fsdp\n{body}jupyter_distrib.save('between', keep=1, model=model)")
    book.ok(
        "m = build(); train(m, torch.optim.SGD(m.parameters(), lr=0.1)); found = jupyter_distrib.load('between')['model']"
    )
    assert book.ok("all(torch.allclose(found[key], value) for key, value in m.state_dict().items())").result == "True"


def test_shards_that_come_after_the_first_call_are_named(book: Notebook) -> None:
    wrong = book.fails(
        f"%%distributed --ranks 2 --strategy fsdp\n{AVERAGE.replace('{save}', 'return average')}\n"
        "full = average_of()\nvalues, full.values = full.values, {'n': torch.ones(1)}\n"
        "jupyter_distrib.save('grown', keep=1, average=full)\n"
        "full.values = values\njupyter_distrib.save('grown', keep=1, average=full)"
    )
    assert "`average` has sharded tensors now, and had none at its first jupyter_distrib.save()" in wrong.traceback


SERIES = """
def go_on(folder, steps, keep=2):
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(5)
    data = TensorDataset(torch.arange(240.).reshape(48, 5) / 240)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = jupyter_distrib.resume(folder, model=model, optimizer=optimizer, loader=loader)
    print("epoch", plain.get("epoch", 0))
    done = 0
    for epoch in range(plain.get("epoch", 0), 4):
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            jupyter_distrib.save(folder, keep=keep, model=model, optimizer=optimizer, loader=loader, epoch=epoch)
            if done == steps:
                raise RuntimeError("enough")


def weights_of(folder):
    return sum(w.double().abs().sum().item() for w in jupyter_distrib.load(folder)["model"].values())
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_that_fails_goes_on_from_its_last_checkpoint_to_the_same_weights(
    book: Notebook, strategy: str
) -> None:
    book.ok(SERIES)
    line = f"%%distributed --ranks 2 --strategy {strategy}\n"
    book.ok(f"{line}go_on('whole-{strategy}', 0)")
    expected = book.ok(f"weights_of('whole-{strategy}')").result

    for steps in (3, 11):
        assert "enough" in book.fails(f"{line}go_on('again-{strategy}', {steps})").text
    last = book.ok(f"{line}go_on('again-{strategy}', 0)")

    assert "epoch 2" in last.text or strategy == "fsdp"  # whose shards may not all have been written
    assert "where nothing was trained" not in last.text
    assert book.ok(f"weights_of('again-{strategy}')").result == expected
    assert book.ok(f"import os; len(os.listdir('again-{strategy}'))").result == "2"


READING = """
def read(folder, steps, batch_size, seed):
    from torch.utils.data import DataLoader, TensorDataset
    if seed is not None:
        torch.manual_seed(seed)
    loader = DataLoader(TensorDataset(torch.arange(48.)), batch_size=batch_size, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = jupyter_distrib.resume(folder, model=model, optimizer=optimizer, loader=loader)
    seen = []
    for epoch in range(plain.get("epoch", 0), 2):
        for (x,) in loader:
            seen += [(epoch, int(each)) for each in x]
            model(x[:, None]).sum().backward()
            optimizer.step()
            jupyter_distrib.save(folder, keep=1, model=model, optimizer=optimizer, loader=loader, epoch=epoch)
            steps -= 1
            if not steps:
                return seen
    return seen
"""


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("ranks", [(1, 2, 2), (2, 1, 1), (2, 1, 2), (1, 2, 1)], ids=str)
def test_a_pass_that_one_rank_began_and_two_finish_reads_each_sample_once(
    book: Notebook, ranks: tuple[int, ...], seed: int | None
) -> None:
    book.ok(f"{READING}\nseen = []")
    for count, steps in zip(ranks, (3, 2, 0), strict=True):
        of_one = 12 // count
        book.ok(
            f"%%distributed --ranks {count} --strategy ddp --out part\n"
            f"read('{ranks}-{seed}', {steps}, {of_one}, {seed})"
        )
        book.ok("seen += [each for part_of_one in part for each in part_of_one]")

    assert book.ok("sorted(seen) == [(epoch, n) for epoch in range(2) for n in range(48)]").result == "True"


def test_all_ranks_load_what_rank_0_is_still_writing(book: Notebook) -> None:
    """Only rank 0 has what it takes to know."""
    code = dedent("""\
        import time
        from jupyter_distrib import load, save
        from jupyter_distrib.checkpoints.snapshot import Snapshot
        write = Snapshot._write_part
        Snapshot._write_part = lambda self: (time.sleep(0.3), write(self))
        try:
            for number in range(3):
                save('written', keep=2, number=cell + number)
            found = load('written')['number']
        finally:
            Snapshot._write_part = write
        found""")
    for cell in (10, 20):
        outcome = book.ok(f"%%distributed --ranks 2 --strategy ddp\ncell = {cell}\n{code}")
        assert outcome.result == f"ranks 0-1: {cell + 2}"


def test_a_rank_that_has_saved_less_often_than_rank_0_loads_the_same(book: Notebook) -> None:
    cell = """\
        %%distributed --ranks 2 --strategy ddp
        from jupyter_distrib import load, save
        for epoch in range(3):
            save('uneven', keep=2, number=epoch)
            if rank == 0:
                save('uneven', keep=2, number=epoch + 10)
        load('uneven')['number']"""
    assert book.ok(dedent(cell)).result == "ranks 0-1: 12"


UNEVEN = """%%distributed --ranks 2 --strategy ddp --timeout 20
import time, torch.distributed as dist
from jupyter_distrib import load, save
folder = f"uneven/{time.time_ns()}" if rank == 0 else ""
given = [folder]
dist.broadcast_object_list(given)
folder = given[0]
"""
BY_RANK_0 = "dist.barrier()\nif rank == 0: save(folder, keep=2, number=2)\ndist.barrier()"


@pytest.mark.parametrize(
    ("saves", "loaded"),
    [
        ("for i in range(3):\n    if rank == 1 or i < 2: save(folder, every_s=0, number=i)", 1),
        ("if rank == 0: save(folder, every_s=0, number=7)\ndist.barrier()", 7),
        ("save(folder, every_s=0, number=1)\nif rank == 0: load(folder)\nsave(folder, every_s=0, number=2)", 2),
        (f"save(folder, keep=2, number=1)\nif rank == 0: load(folder)\n{BY_RANK_0}", 2),
        (f"save(folder, keep=2, number=1)\nload(folder)\n{BY_RANK_0}", 2),
    ],
    ids=["rank 1 saves more often", "rank 0 saves", "rank 0 loads", "rank 0 loads before", "rank 0 saves more often"],
)
def test_all_ranks_load_the_same_however_often_each_has_saved_and_loaded(
    book: Notebook, saves: str, loaded: int
) -> None:
    outcome = book.ok(f"{UNEVEN}{saves}\nfound = load(folder)['number']\ndist.barrier()\nfound")
    assert outcome.result == f"ranks 0-1: {loaded}"


def test_a_rank_that_loads_alone_before_there_is_anything_to_agree_on_does_not_wait(book: Notebook) -> None:
    cell = """\
        jupyter_distrib.save(f'own-{rank}', number=rank) if rank == 0 else None
        dist.barrier()
        if rank == 1: load('own-0')
        dist.barrier()
        if rank == 0: save(folder, keep=2, number=1)
        dist.barrier()
        found = load('own-0')['number'], load(folder)['number']
        dist.barrier()
        found"""
    assert book.ok(f"{UNEVEN}{dedent(cell)}").result == "ranks 0-1: (0, 1)"


def test_what_only_rank_1_has_saved_is_an_error_and_no_rank_waits(book: Notebook) -> None:
    wrong = book.fails(f"{UNEVEN}if rank == 1: save(folder, keep=2, number=1)\nload(folder)")
    assert "Ranks 0-1 raised the same" in wrong.text


def test_a_rank_that_loads_alone_while_rank_0_waits_for_it_is_named(book: Notebook) -> None:
    wrong = book.fails(
        f"{UNEVEN}save(folder, keep=2, number=1)\ndist.barrier()\nif rank == 1: load(folder)\ndist.barrier()"
    )
    assert "jupyter_distrib.load() was called on rank 1, and rank 0, which decides, has gone on" in wrong.text


def test_a_rank_that_loads_alone_what_rank_0_has_saved_is_named(book: Notebook) -> None:
    wrong = book.fails(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            from jupyter_distrib import load, save
            save('one-rank', keep=2, number=1)
            if rank == 1: load('one-rank')""")
    )
    assert "jupyter_distrib.load() was called on rank 1, and rank 0, which decides, has gone on" in wrong.text
    only = dedent("""\
        %%distributed --ranks 2 --strategy ddp
        from jupyter_distrib import load, save
        save('one-rank', keep=2, number=2)
    """)
    assert book.ok(f"{only}load('one-rank')['number'] if rank == 0 else None").result.startswith("rank 0: 2")


def test_a_rank_that_does_not_call_resume_is_named(book: Notebook) -> None:
    body = "model = build()\noptimizer = optimizer_for(model)\nif rank == 1:\n"
    wrong = book.fails(f"%%distributed --ranks 2 --strategy ddp\n{body}    jupyter_distrib.resume('none', model=model)")

    assert "resume() was called on rank 1, and rank 0, which decides, has ended its cell without a call" in wrong.text


def test_what_one_rank_cannot_write_is_an_error_of_all_and_the_earlier_checkpoint_stays(book: Notebook) -> None:
    line = "%%distributed --ranks 2 --strategy fsdp\nfrom jupyter_distrib.checkpoints import folder\n"
    body = "model = build()\ntrain(model, optimizer_for(model))\n"
    save = "jupyter_distrib.save('disk', model=model, number={})\n"
    full = (
        "own = folder.Writer._write_data\n"
        "def full(self, *_):\n    raise OSError(28, 'No space left on device')\n"
        "if rank == 1: folder.Writer._write_data = full\n"
        f"try:\n    {save.format(2)}finally:\n    folder.Writer._write_data = own"
    )
    book.ok(f"{line}{body}{save.format(1)}")
    before = book.ok("import os; sorted(os.listdir('disk'))").result

    wrong = book.fails(f"{line}{body}{full}")

    assert "disk could not be written on rank 1: OSError: [Errno 28] No space left on device" in wrong.traceback
    assert book.ok("sorted(os.listdir('disk'))").result == before
    assert book.ok("jupyter_distrib.load('disk')['number']").result == "1"


def test_in_a_group_of_the_cells_own_each_tensor_is_written_by_the_lowest_rank_that_has_it(book: Notebook) -> None:
    code = """%%distributed --ranks 2
import torch, torch.distributed as dist
dist.init_process_group("gloo")
stage = {f"of_{rank}": torch.full((2,), rank), "both": torch.full((2,), rank + 5)}
jupyter_distrib.save("stages", stage=stage, number=rank)
found = jupyter_distrib.resume("stages")
dist.destroy_process_group()
found"""
    assert book.ok(code).ename == ""
    read = book.ok(
        "found = jupyter_distrib.load('stages'); [found['number'], *map(str, found['stage'].items())]"
    ).result
    assert "[0, " in read
    for each in ("('of_0', tensor([0, 0]))", "('of_1', tensor([1, 1]))", "('both', tensor([5, 5]))"):
        assert each in read
