"""How far process groups are, when one group has two backends: each counts its own collectives."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.group_sightings import GroupSightings


class FeignedBackend:
    def __init__(self, name: str, count: int) -> None:
        self._name, self.count = name, count

    def name(self) -> str:
        return self._name

    def _get_sequence_number_for_group(self) -> int:
        return self.count


class FeignedGroup:
    """As torch makes it for `cpu:gloo,cuda:nccl`: its own number is that of its default backend, NCCL."""

    def __init__(self) -> None:
        self.backends = {"cuda": FeignedBackend("nccl", 3), "cpu": FeignedBackend("gloo", 5)}
        self._device_types = [torch.device(name) for name in self.backends]

    def _get_backend(self, device: torch.device) -> FeignedBackend:
        return self.backends[device.type]

    def _get_sequence_number_for_group(self) -> int:
        return self.backends["cuda"].count


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FeignedGroup:
    feigned = FeignedGroup()
    monkeypatch.setattr(private, "known_groups", lambda: iter([("0", feigned, (0, 1))]))
    return feigned


def entry(library: str, number: int, *, pg_id: int = 0, retired: bool = True) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "pg_id": pg_id,
        "profiling_name": f"{library}:all_reduce",
        "collective_seq_id": number,
        "retired": retired,
        "is_p2p": False,
        "time_created_ns": time.time_ns(),
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
    }


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_collective_of_either_backend_changes_the_sequence(group: FeignedGroup, device: str) -> None:
    before = private.sequence(group)
    group.backends[device].count += 1

    assert private.sequence(group) != before


def test_ranks_that_are_out_of_step_in_both_backends_do_not_seem_equal() -> None:
    one, other = FeignedGroup(), FeignedGroup()
    one.backends["cpu"].count += 1
    other.backends["cuda"].count += 1

    assert private.sequence(one) != private.sequence(other)


def test_each_backend_is_recognised_by_its_own_numbers(group: FeignedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    sightings = GroupSightings()
    sightings.begin()
    group.backends["cpu"].count, group.backends["cuda"].count = 7, 4
    # The two recorders number groups by themselves: an earlier group of NCCL's has had the number 1.
    recorded = [entry("gloo", 6), entry("gloo", 7, retired=False), entry("nccl", 4, pg_id=1)]
    monkeypatch.setattr(private, "recorded_collectives", lambda: recorded)

    seen = {each.name: each for each in sightings.inspect_groups()}

    assert (seen["0 gloo"].number, seen["0 gloo"].op, seen["0 gloo"].entered) == (2, "all_reduce", 2)
    assert (seen["0 nccl"].number, seen["0 nccl"].entered) == (0, 1)


PROGRAM = """
import json
import torch.distributed as dist
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.group_sightings import GroupSightings
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, sightings = dist.group.WORLD, GroupSightings()
dist.barrier()
sightings.begin()
dist.barrier()
own, torchs = private.sequence(group), group._get_sequence_number_for_group()
print(json.dumps([own, torchs, group.group_name, [(each.name, each.entered) for each in sightings.inspect_groups()]]))
dist.destroy_process_group()
"""
"""A real group of one rank. Torch 2.9 records collectives only if the variable is set at the first of a process."""


@pytest.mark.slow
@pytest.mark.versions
def test_a_group_with_one_backend_keeps_its_name_and_torchs_number() -> None:
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "200"}  # as each rank has it
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)

    own, torchs, name, seen = json.loads(done.stdout.splitlines()[-1])
    assert own == torchs == 2
    assert seen == [[name, 1]]


@pytest.mark.versions
def test_the_files_of_torch_that_wait_for_other_ranks_are_there() -> None:
    """In a stack, the call of a collective is the outermost function in one of them."""
    packages = Path(torch.__path__[0]).parent
    assert [name for name in GroupSightings.communication if not (packages / name).exists()] == []


def test_counting_goes_on_while_the_main_thread_looks_through_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot complete a tuple that somebody else has got hold of by the garbage collector."""

    def known() -> Iterator[tuple[str, FeignedGroup, tuple[int, ...]]]:
        yield "0", FeignedGroup(), (0, 1)
        everything = gc.get_objects()
        for number in range(1, 30):
            yield str(number), FeignedGroup(), (0, 1)
        del everything

    monkeypatch.setattr(private, "known_groups", known)

    assert len(GroupSightings().counts()) == 60
