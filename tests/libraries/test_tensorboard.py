"""Which rank's `SummaryWriter` writes."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from jupyter_distrib.libraries import tensorboard, tracking


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a cell on the last of two ranks, with what stands for TensorBoard's writer of files."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(tracking.RANK_VARIABLE, "0")
    module = ModuleType("writer")
    module.__dict__["FileWriter"] = type("FileWriter", (), {"__init__": lambda self, log_dir: None})
    tensorboard._mended(module)
    return {
        "rank": 1,
        "local_rank": 1,
        "world_size": 2,
        "get_rank": lambda: 1,
        "FileWriter": module.__dict__["FileWriter"],
    }


@pytest.mark.parametrize(
    ("source", "writes"),
    [
        ("writer = FileWriter('runs/last')", False),
        ("if rank == world_size - 1:\n    writer = FileWriter('runs/last')", True),
        (
            "if world_size > 1 and 1 == get_rank():\n    for _ in range(1):\n        writer = FileWriter('runs/last')",
            True,
        ),
        ("def log():\n    return FileWriter('runs/last')\nif rank == 1: writer = log()", True),
        ("if rank == 0:\n    pass\nelse:\n    writer = FileWriter('runs/last')", False),
        ("if rank == 1:\n    pass\nwriter = FileWriter('runs/last')", False),
        ("if rank == 1 or world_size:\n    writer = FileWriter('runs/last')", False),
        ("if rank >= 1:\n    writer = FileWriter('runs/last')", False),
        ("if rank % 2 == 1:\n    writer = FileWriter('runs/last')", False),
        ("if local_rank == 1:\n    writer = FileWriter('runs/last')", False),
        ("if rank == get_rank():\n    writer = FileWriter('runs/last')", False),
        ("if rank == rank:\n    writer = FileWriter('runs/last')", False),
    ],
)
def test_a_rank_that_an_if_has_singled_out_writes(
    names: dict[str, Any], tmp_path: Path, source: str, writes: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(dedent(source))
    exec(compile(path.read_text(), str(path), "exec"), names)

    assert isinstance(names["writer"], tensorboard.SilentWriter) is not writes
