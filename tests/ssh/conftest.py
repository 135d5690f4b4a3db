"""Real sshd: two hosts for all tests of this folder, and a notebook whose ranks are on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.ray.conftest import write_trusted
from tests.ssh.bed import Bed, missing


@pytest.fixture(autouse=True, scope="session")
def sshd_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def bed(sshd_is_here: None) -> Iterator[Bed]:
    one = Bed()
    yield one
    one.close()


def name_it(bed: Bed, folder: Path, **more: object) -> None:
    """Make the hosts the default pool of notebooks in this folder."""
    lines = [
        f"{key} = {value!r}" for key, value in {**bed.options, "nodes": 2, "ranks": 4, "reconnect": 0, **more}.items()
    ]
    write_trusted(folder, "\n".join(['pool = "box"', "[pools.box]", 'kind = "ssh"', *lines, ""]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the notebook."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(bed: Bed, folder: Path) -> Iterator[Notebook]:
    """A notebook whose default pool is the hosts: four ranks on two of them."""
    name_it(bed, folder)
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.cell("%%distributed\nrank;", timeout_s=60).status == "ok"
        yield book
