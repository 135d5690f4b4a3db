"""Every heuristic about a cell has its place and its test, and can be switched off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.worker.autoparallel import heuristics
from jupyter_distrib.worker.autoparallel.data.shard_samplers import is_divided_by_others
from jupyter_distrib.worker.autoparallel.training import replace_references
from jupyter_distrib.worker.autoparallel.training.device_remapping import DeviceRemapping
from tests.notebook import ROOT


@pytest.mark.parametrize("name", heuristics.HEURISTICS)
def test_a_heuristic_names_its_function_and_its_test(name: heuristics.Name) -> None:
    heuristic = heuristics.HEURISTICS[name]
    folders = {heuristic.place: ROOT / "jupyter_distrib" / "worker" / "autoparallel", heuristic.test: ROOT / "tests"}
    for place, folder in folders.items():
        file, _, function = place.partition(": ")
        source = (folder / file).read_text(encoding="utf-8")
        assert f"def {function}(" in source or f"class {function}:" in source, place
    used = [file for file in folders[heuristic.place].rglob("*.py") if f'"{name}"' in file.read_text(encoding="utf-8")]
    assert len(used) > 1, "no code asks whether it is on"


def test_the_table_is_whole() -> None:
    assert list(heuristics.HEURISTICS) == list(get_args(heuristics.Name))


def test_heuristics_are_switched_off_by_name() -> None:
    assert heuristics.enabled({}) == set(heuristics.HEURISTICS)
    assert heuristics.enabled({"no_guess": "units, order"}) == set(heuristics.HEURISTICS) - {"units", "order"}
    with pytest.raises(OptionsError, match=r"--no-guess must be one or more of divided-data, .*; got"):
        heuristics.parse_names("--no-guess", "unit")


class Own(Sampler[int]):
    """A sampler of somebody's, which is told its place."""

    def __init__(self, **place: int) -> None:
        vars(self).update(place or {"rank": 0, "num_replicas": 2})


class Stream(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(torch.distributed.get_rank(), 10, 2))


@pytest.mark.parametrize(
    ("loader", "name"),
    [(DataLoader([1, 2], sampler=Own()), "knows-ranks"), (DataLoader(Stream()), "reads-rank")],  # type: ignore[arg-type]
)
def test_attributes_tell_that_a_sampler_knows_of_ranks(loader: DataLoader[int], name: str) -> None:
    every = heuristics.enabled({})
    assert is_divided_by_others(loader, every)
    assert not is_divided_by_others(loader, every - {name})  # type: ignore[operator]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"_rank": 1, "_world_size": 2}, True),  # detectron2
        ({"data_parallel_rank": 0, "data_parallel_size": 2}, True),
        ({"dp_rank": 0, "dp_world_size": 4}, True),
        ({"rank": 0, "world_size": 1}, False),  # the defaults of a program on one device
        ({"rank": 0, "num_replicas": None}, False),
        ({"rank": 16}, False),
        ({"shard_id": 0, "num_shards": 10}, False),  # files, not ranks
    ],
)
def test_attributes_of_known_programs_tell_it_too(place: dict[str, int], expected: bool) -> None:
    loader = DataLoader([1, 2], sampler=Own(**place))
    assert is_divided_by_others(loader, heuristics.enabled({})) is expected


def test_without_their_guess_local_variables_and_devices_stay() -> None:
    old, new = SimpleNamespace(), SimpleNamespace()

    def holds() -> object:
        variable = old
        replace_references.replace({id(old): (old, new)}, local_variables=False)
        return variable

    assert holds() is not new
    own = DeviceRemapping(torch.device("cuda:1"), print, applies=False)
    code = compile("x = 'cuda:0'", "Cell In[1]", "exec")
    assert own.adapted(code) is code
    assert nn.Module.cuda.__module__.startswith("torch.")
