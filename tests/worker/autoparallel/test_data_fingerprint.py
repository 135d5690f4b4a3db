"""Which data sets divide themselves among the ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import cast

import pytest
import torch.distributed as dist
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset

from jupyter_distrib.compat.serverless_gpu_data import UCVolumeDataset
from jupyter_distrib.interfaces import identity
from jupyter_distrib.runtime import get_global_rank
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.autoparallel.data import fingerprint
from jupyter_distrib.worker.autoparallel.data.fingerprint import _described, reads_ranks

rank, world_size = 1, 2  # as a cell has them


@pytest.fixture(autouse=True)
def _on_a_rank() -> Iterator[None]:
    with identity.assumed(
        m.WorkerOrder(group="", worker="", agent_pid=0, rank=1, world_size=2, local_rank=1, local_world_size=2)
    ):
        yield


class WithVariable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.islice(itertools.count(), rank, 100, world_size)


class WithAttribute(IterableDataset[int]):
    def __init__(self, number: int) -> None:
        self.rank = number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 100, 2))


class WithCall(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index * 2 + dist.get_rank()


class WithEnvironment(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index * 2 + int(os.environ["RANK"])


class Column(Dataset[object]):
    def __init__(self) -> None:
        self.rows = [{"rank": 1, "RANK": 2}]

    def __getitem__(self, index: int) -> object:
        return self.rows[index]["rank"], self.rows[index]["RANK"]


class Method(Dataset[float]):
    def rank(self, index: int) -> float:
        return 1 / (1 + index)

    def __getitem__(self, index: int) -> float:
        return self.rank(index)


class OfThePlatform(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return get_global_rank()


class Decoded(IterableDataset[str]):
    def __init__(self, paths: object) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[str]:
        return iter(cast("Iterable[str]", self._paths))


@pytest.mark.parametrize(
    "data",
    [
        WithVariable(),
        WithAttribute(1),
        WithCall(),
        WithEnvironment(),
        OfThePlatform(),
        UCVolumeDataset("."),
        Decoded(Decoded(UCVolumeDataset("."))),
        ChainDataset([Decoded([]), Decoded(UCVolumeDataset("."))]),
    ],
)
def test_who_asks_for_the_rank_divides_by_itself(data: Dataset[object]) -> None:
    assert reads_ranks(data)


def test_a_stream_that_holds_itself_is_looked_at_once() -> None:
    looped = Decoded(None)
    looped._paths = looped

    assert not reads_ranks(looped)


@pytest.mark.parametrize("data", [Column(), Method(), WithAttribute(8), Decoded(Column()), Decoded(Decoded([]))])
def test_a_column_a_method_or_another_number_called_rank_does_not(data: Dataset[object]) -> None:
    assert not reads_ranks(data)


class Sloppy:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return self.number == cast("Sloppy", other).number

    def __hash__(self) -> int:
        return self.number


def test_keys_that_are_compared_with_their_own_kind_only_fail_no_loop() -> None:
    def printed(samples: object) -> bytes:
        return b"".join(fingerprint._print(samples, 3))

    assert printed({Sloppy(1): 2}) == printed({Sloppy(1): 2}) != printed({Sloppy(1): 3})
    assert printed({"seed": 1, "a": 2}) == printed({"seed": 2, "a": 2})


class Refusing:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_samples_that_refuse_every_name_have_a_fingerprint() -> None:
    batches, data, _ = _described(DataLoader(cast("Dataset[object]", [Refusing(), Refusing()])))
    assert batches == 2
    assert data
