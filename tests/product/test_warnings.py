"""Nothing of ours is deprecated in the libraries that are installed. Real kernels, in which such a warning is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ipykernel import kernelapp

from tests.notebook import ROOT, Notebook

pytestmark = [pytest.mark.slow, pytest.mark.versions]

ERRORS = """
import warnings
for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=category, module=r"jupyter_distrib(\\.|$)")
"""
TRAINING = """
import torch, jupyter_distrib
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    jupyter_distrib.report(loss=1.0)
jupyter_distrib.save("checkpoint", model=model, optimizer=optimizer)
model
"""


PLAIN_TCP = "Kernel is running over TCP without encryption."
"""The warning, by ipykernel 7.4, about what its own kernel does."""


@pytest.fixture
def strict(tmp_path: Path) -> Notebook:
    (tmp_path / "sitecustomize.py").write_text(ERRORS)
    return Notebook(tmp_path, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})


def test_nothing_of_ours_is_deprecated(strict: Notebook) -> None:
    with strict as book:
        assert book.ok("import warnings\nstr(warnings.filters).count('jupyter_distrib')").result == "3"
        for cell in (
            "%load_ext jupyter_distrib",
            "%%distributed --ranks 2\nprint(rank)\nrank",
            f"%%distributed --ranks 2 --strategy ddp\n{TRAINING}",
            f"%%distributed --ranks 2 --strategy fsdp --keep model\n{TRAINING}",
            "%distributed_status",
            "%distributed_status --doctor",
            "%distributed_runs",
            "%distributed_pool",
            "%distributed_pool stop",
        ):
            outcome = book.cell(cell)
            assert outcome.status == "ok", f"{cell}\n{outcome.text}"
            assert "DeprecationWarning" not in outcome.text


def test_the_kernels_warning_about_its_own_connection_reaches_no_cell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cells = (
        "%load_ext jupyter_distrib",
        "%%distributed --ranks 2\nimport logging\nlogging.getLogger('traitlets').warning('mine')",
        "%distributed_status --doctor",
    )
    with Notebook(tmp_path) as book:
        shown = [book.ok(cell).text for cell in cells]

    assert "mine" in shown[1]
    assert [each for each in shown if "encryption" in each] == []
    warns = PLAIN_TCP in Path(kernelapp.__file__).read_text(encoding="utf-8")
    assert capfd.readouterr().err.count(PLAIN_TCP) == warns  # in the kernel's own log, once: ranks are no kernels
