"""GPUs of Slurm's nodes: asked for by node, given to the step, and planned with as the step sees them."""

from __future__ import annotations

import sys
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook
from tests.ray.conftest import write_trusted
from tests.slurm.bed import GPUS, SlurmBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CELL = "import os, socket\n(socket.gethostname(), os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture(autouse=True)
def free_nodes(bed: SlurmBed) -> None:
    assert bed.left() == ""


@pytest.fixture(scope="module")
def gpus(bed: SlurmBed) -> Iterator[GpuBed]:
    """The GPUs of n1; n2 has other ones."""
    with GpuBed(count=GPUS) as one, GpuBed(count=GPUS) as other:
        bed.feign_gpus("n1", one.folder)
        bed.feign_gpus("n2", other.folder)
        yield one


def notebook(gpus: GpuBed, folder: Path, *options: str, **env: str) -> Notebook:
    lines = [
        'pool = "cluster"',
        "[pools.cluster]",
        'kind = "slurm"',
        'interface = "lo"',
        f"python = {sys.executable!r}",
    ]
    write_trusted(folder, "\n".join([*lines, *options, ""]))
    return Notebook(folder, {**gpus.environment, **env})


def placed(book: Notebook, count: int) -> dict[str, int]:
    """The number of ranks on each node, once it is certain that they have different GPUs."""
    book.ok("%load_ext jupyter_distrib")
    book.ok(f"%%distributed --gpus {count} --out where\n{CELL}")
    ranks = literal_eval(book.ok("[*where]").result)
    assert len(ranks) == count
    nodes = Counter(node for node, _ in ranks)
    for node, here in nodes.items():
        [visible] = {devices for name, devices in ranks if name == node}
        assert len({*visible.split(",")}) == here, "each rank of a node has a GPU of its own"
    return dict(nodes)


@pytest.mark.parametrize(
    ("option", "count", "wanted"),
    [
        ("", 3, {"n1": 3}),
        ("", 8, {"n1": 4, "n2": 4}),
        ('nodes = "2"', 2, {"n1": 1, "n2": 1}),
        ('nodes = "2"', 3, {"n1": 2, "n2": 1}),
        ('nodes = "2"\nsalloc = "--exclusive"', 2, {"n1": 1, "n2": 1}),
        ('salloc = "--gres=gpu:1 -w n1 : --gres=gpu:2 -w n2"', 3, {"n1": 1, "n2": 2}),
        ('gres = "gpu:4"', 8, {"n1": 4, "n2": 4}),
    ],
)
def test_an_allocation_has_the_gpus_that_were_asked_for(
    gpus: GpuBed, tmp_path: Path, option: str, count: int, wanted: dict[str, int]
) -> None:
    with notebook(gpus, tmp_path, option) as book:
        assert placed(book, count) == wanted


def test_more_gpus_than_there_are_are_refused(bed: SlurmBed, gpus: GpuBed, tmp_path: Path) -> None:
    with notebook(gpus, tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        assert "Slurm" in book.fails(f"%%distributed --gpus 9\n{CELL}").evalue
    assert bed.left() == "", "and nothing waits on"


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (("--ntasks=4", "--gpus=4"), 4),
        (("--ntasks=4", "--gpus-per-task=1"), 4),
        (("--nodes=2", "--gpus-per-node=4"), 8),
        (("--nodes=2", "--exclusive", "--gres=gpu:4"), 8),
    ],
)
def test_a_notebook_in_a_job_uses_all_its_gpus(
    bed: SlurmBed, gpus: GpuBed, tmp_path: Path, asked: tuple[str, ...], count: int
) -> None:
    with bed.job(*asked) as variables, notebook(gpus, tmp_path, **variables) as book:
        assert sum(placed(book, count).values()) == count
