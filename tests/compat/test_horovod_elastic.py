"""`hvd.elastic`: a training goes on from its last commit after a rank was lost, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_compat horovod")
        yield book


TRAIN = """
import os, signal, torch
import horovod.torch as hvd
hvd.init()
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
inputs = torch.arange(40.0).view(10, 2, 2)[:, hvd.rank()] / 40
steps, resets = [], []

@hvd.elastic.run
def train(state):
    while state.step < 10:
        if first and (hvd.rank(), state.step) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(state.step)
        optimizer.zero_grad()
        model(inputs[state.step]).pow(2).mean().backward()
        optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(state.step)])
train(state)
torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), steps, resets
"""


def trained(book: Notebook, dies: str) -> str:
    outcome = book.ok(f"%%distributed --ranks 2 --max-restarts 2 --out values\ndies = {dies}\n{TRAIN}")
    assert ("attempt 2 of 3" in outcome.text) == (dies != "None")
    return book.ok("print((values[0][0] == values[1][0], values[0][1:], values[1][1:]))").stdout.strip()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_training_that_loses_a_rank_goes_on_from_its_commit_and_ends_the_same(book: Notebook, rank: int) -> None:
    every = list(range(10))
    assert trained(book, "None") == str((True, (every, []), (every, [])))
    book.ok("calm = values[0][0]")

    rest = [4, 5, 6, 7, 8, 9]
    assert trained(book, f"({rank}, 5)") == str((True, (rest, [4]), (rest, [4])))
    assert book.ok("calm == values[0][0]").result == "True"


def test_a_commit_of_another_run_is_none_of_this_one(book: Notebook) -> None:
    trained(book, "(1, 5)")
    assert trained(book, "(1, 0)") == str((True, ([*range(10)], [0]), ([*range(10)], [0])))


def test_a_state_returns_to_what_was_saved(book: Notebook) -> None:
    code = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(1, 1)
state = hvd.elastic.TorchState(model=model, epoch=3)
plain = hvd.elastic.ObjectState(best=[1])
state.commit()
before = model.weight.item()
torch.nn.init.zeros_(model.weight)
state.epoch, plain.best = 4, [2]
plain.save()
plain.best.append(3)
state.restore()
plain.restore()
model.weight.item() == before, state.epoch, plain.best"""
    assert book.ok(f"%%distributed --ranks 2\n{code}").result == "ranks 0-1: (True, 3, [2])"


def test_what_is_left_of_an_epoch_is_divided_anew(book: Notebook) -> None:
    code = """
import horovod.torch as hvd
hvd.init()
sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
sampler.record_batch(0, 2)
done = sampler.processed_indices
sampler.sync()
left = list(sampler)
sampler.set_epoch(1)
sorted(done), left, len(sampler)"""
    book.ok(f"%%distributed --ranks 2 --out values\n{code}")
    assert book.ok("list(values)").result == "[([0, 2], [4, 6, 8], 5), ([1, 3], [5, 7, 9], 5)]"
