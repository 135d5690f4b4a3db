"""`--dry-run` as it is typed in a notebook, and the end of its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.kernel.notebook import dry_run
from tests import processes
from tests.dry_run.play import play
from tests.notebook import Notebook

pytestmark = pytest.mark.slow

CAPTURED = """\
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 10))
data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,)))
before = sum(each.double().sum().item() for each in model.parameters())
"""
TRAINING = """\
opt = torch.optim.AdamW(model.parameters())
for x, y in DataLoader(data, batch_size=64):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def test_a_training_of_captured_values_is_played_and_nothing_of_the_notebook_changes(book: Notebook) -> None:
    book.ok(CAPTURED)
    outcome = book.ok(f"%%distributed --gpus 8 --strategy fsdp --gpu-type A100 --dry-run\n{TRAINING}")
    assert outcome.result.startswith("dry run: fits · --strategy fsdp · rank 0 of 8 on A100 (85.0 GB)\n[")
    assert "optimizer state" in outcome.result
    assert "line 5" in outcome.result
    assert "1/8 of 2,142,218 parameters" in outcome.result
    assert "<table>" in outcome.result_html
    book.ok("assert before == sum(each.double().sum().item() for each in model.parameters())")
    book.ok(
        "from jupyter_distrib.kernel.session import session\n"
        "assert [*session.current().pools.groups()] == [] and session.current().history == ()\n"
        "assert 'opt' not in globals()"
    )


def test_an_error_of_the_cell_is_part_of_the_answer(book: Notebook) -> None:
    book.ok(CAPTURED)
    wrong = TRAINING.replace("model(x)", "model(x[:, 1:])")
    outcome = book.ok(f"%%distributed --gpus 8 --strategy ddp --dry-run\n{wrong}")
    assert outcome.result.startswith("dry run: fails")
    assert "line 4: loss = nn.functional.cross_entropy(model(x[:, 1:]), y)" in outcome.result
    assert "RuntimeError: " in outcome.result


def test_stop_ends_the_process_and_the_cell(book: Notebook, tmp_path: Path) -> None:
    os.mkfifo(place := tmp_path / "pid")
    book.start(
        f"%%distributed --gpus 2 --dry-run\nimport os, time\nwith open({str(place)!r}, 'w') as file:\n"
        "    print(os.getpid(), file=file)\ntime.sleep(600)"
    )
    pid = int(place.read_text())
    book.interrupt()
    outcome = book.finish()
    assert outcome.ename == "KeyboardInterrupt"
    assert not processes.is_alive(pid)


def test_a_cell_that_takes_too_long_cannot_be_run_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "LIMIT_S", 2.0)
    found = play("import time\ntime.sleep(600)")
    assert found.verdict == "cannot be run dry"
    assert "within 2 s" in found.refused


@pytest.mark.parametrize(
    "source", ["import os; os.abort()", "import os; os._exit(3)", "import ctypes; ctypes.string_at(0)"]
)
def test_a_native_abort_says_nothing_about_the_memory(source: str) -> None:
    found = play(source)
    assert found.verdict == "cannot be run dry"
    assert "says nothing about a real run" in found.refused
