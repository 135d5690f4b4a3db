"""The example notebook does what its text says: run in a real kernel, as `sh .ci/demo` runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from tests.notebook import ROOT

EXAMPLES = ROOT / "example_notebooks"


def outputs(cell: nbformat.NotebookNode) -> str:
    """Everything that the saved notebook shows under a cell, as text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(shown)


def run(name: str, folder: Path) -> tuple[list[nbformat.NotebookNode], str]:
    """The code cells of a notebook as it is saved, and what the terminal has shown."""
    saved = folder / name
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "run.py"), str(EXAMPLES / name), str(saved)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    code = [cell for cell in nbformat.read(saved, as_version=4).cells if cell.cell_type == "code"]
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    return code, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_unchanged_notebook_trains_data_parallel(tmp_path: Path) -> None:
    code, _ = run("ddp_unchanged.ipynb", tmp_path)

    whole = next(outputs(cell) for cell in code if "--keep model" in cell.source)
    assert (
        "Sequential wrapped (optimizer of line 3), sampler added (loader of line 4), global batch 64 = 2 x 32" in whole
    )
    split = next(outputs(cell) for cell in code if "--shard-eval" in cell.source)
    assert "global batch 32 = 2 x 16" in split
    assert "of 360" in split


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_digits_notebook_trains_a_model_and_is_saved_with_what_was_shown(tmp_path: Path) -> None:
    code, shown = run("digits_ddp.ipynb", tmp_path)

    training = next(outputs(cell) for cell in code if "--keep model" in cell.source)
    assert "2 CPU ranks (gloo)" in training
    assert "batches an epoch, loss" in training
    assert "rank 1  done" in training
    assert "epoch 11" in training
    accuracy = float(outputs(code[-2]))
    assert accuracy > 0.95
    assert "[0-1] 23 batches an epoch" in shown or "batches an epoch" in shown
    assert "model: Net on ranks 0-1" in outputs(code[-1])


@pytest.mark.slow
def test_the_notebook_on_collectives_shows_them_step_by_step(tmp_path: Path) -> None:
    cells = executed("collectives.ipynb", tmp_path)

    assert "ranks 0-2: [2.0, 4.0, 6.0]" in outputs(cells[1])
    assert "step 1 of 1 · all_reduce (sum) · line 6" in outputs(cells[1])
    assert "step 2 of 2 · scatter (from rank 0)" in outputs(cells[2])
    assert "step 3 of 3 · reduce_scatter_tensor (sum)" in outputs(cells[3])
    assert "rank 2  [20], [21], [22]  ->  [2], [12], [22]" in outputs(cells[4])
    assert outputs(cells[5]).count("send and recv") == 3
    assert "no rank can continue: rank 0 waits in all_reduce (sum)" in outputs(cells[6])
    pages = [output.data["text/html"] for cell in cells for output in cell.outputs if "data" in output]
    assert sum("<section>" in page for page in pages) == 5


def test_the_notebooks_are_stored_without_outputs() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            assert not cell.get("outputs"), path
            assert cell.get("execution_count") is None, path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("sweep", "{'lr': 0.3}"),
        ("checkpoints", "attempt 2 of 2, since rank 1 was lost (killed by SIGKILL)"),
        ("detach", "[1] rank 1 has ended"),
        ("hosts", "('second', 3.0)"),
    ],
)
def test_the_tutorials_on_runs_do_what_they_say(name: str, shown: str, tmp_path: Path) -> None:
    cells = executed(f"{name}.ipynb", tmp_path)

    assert shown in "\n".join(outputs(cell) for cell in cells)
    if name == "checkpoints":
        # A checkpoint is written while the training goes on: the third one may not be complete when rank 1 ends.
        assert re.search("ranks 0-1: [23]$", outputs(cells[3]), re.MULTILINE)
        assert outputs(cells[4]).startswith("(5, ")


def executed(name: str, tmp_path: Path) -> list[nbformat.NotebookNode]:
    """The code cells of an example, run in a folder of its own."""
    source = tmp_path / "here" / name
    source.parent.mkdir()
    source.write_bytes((EXAMPLES / name).read_bytes())
    saved = tmp_path / f"saved_{name}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "run.py"), str(source), str(saved)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [cell for cell in nbformat.read(saved, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_fsdp_notebook_trains_sharded_and_loads_its_checkpoint_alone(tmp_path: Path) -> None:
    cells = executed("fsdp.ipynb", tmp_path)

    training = next(outputs(cell) for cell in cells if "--keep model" in cell.source)
    assert "Net sharded in 3 units (Block): 1/2 of" in training
    assert "rank 1 holds" in training
    assert "{'epochs': 4} Net the same: True" in outputs(cells[-3])
    assert float(outputs(cells[-2])) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_mesh_notebook_trains_in_two_dimensions(tmp_path: Path) -> None:
    cells = executed("tp_mesh.ipynb", tmp_path)

    training = next(outputs(cell) for cell in cells if "--mesh" in cell.source)
    assert "Net sharded: 1/2 of" in training
    assert "rank 3 at (1, 1) holds 1,024 of 4,096 weights of `up`" in training
    assert "Net torch.Size([256, 16])" in outputs(cells[-1])
    assert float(outputs(cells[-1]).splitlines()[-1]) > 0.9


PACKAGES = {"sklearn": "scikit-learn", "ray": "ray[", "tf_keras": "tf_keras", "tokenizers": "transformers"}
STOOD_IN = {"horovod", "mlflow", "pyspark", "serverless_gpu"}
"""Import names that this package serves, and what is used only if it is there."""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_first_cell_says_what_you_need(path: Path) -> None:
    first, *others = nbformat.read(path, as_version=4).cells
    line = first.source.splitlines()[-1]
    assert line.startswith("**You need** jupyter_distrib")
    code = "\n".join(cell.source for cell in others if cell.cell_type == "code")
    modules = set(re.findall(r"^\s*(?:from|import) (\w+)", code, re.MULTILINE)) - sys.stdlib_module_names - STOOD_IN
    needed = modules - {"jupyter_distrib", "numpy", "torch"}
    names = {PACKAGES.get(module, module) for module in needed} - ({"transformers"} if "trl" in needed else set())
    assert [name for name in sorted(names) if name not in line] == []
    assert needed or "pip install" not in line or path.stem == "ray_pool"
    row = next(
        row for row in (ROOT / "docs" / "tutorials.md").read_text("utf-8").splitlines() if f"[{path.stem}]" in row
    )
    assert [name for name in sorted(names) if name.strip("[") not in row] == []


def site_module(name: str) -> ModuleType:
    """A module of the site's settings, which are no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(path: Path, *cells: str) -> Path:
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    document.cells.insert(0, nbformat.v4.new_markdown_cell("# Title"))
    nbformat.write(document, path)
    return path


@pytest.mark.slow
def test_the_site_has_notebooks_with_outputs_and_runs_each_once(tmp_path: Path) -> None:
    executed = site_module("executed")
    source = notebook(tmp_path / "one.ipynb", "import pathlib; pathlib.Path('made').touch(); 6 * 7")
    kept = tmp_path / "kept"

    first = executed.with_outputs(source, sys.executable, kept)
    cell = nbformat.read(first, as_version=4).cells[1]
    assert outputs(cell) == "42"
    assert not (tmp_path / "made").exists(), "it runs in a folder of its own"

    assert executed.with_outputs(source, "/nonexistent", kept) == first, "it is kept"

    failing = notebook(tmp_path / "one.ipynb", "1 / 0")
    with pytest.raises(RuntimeError, match=r"one.ipynb fails:[^$]*ZeroDivisionError"):
        executed.with_outputs(failing, sys.executable, kept)

    changed = executed.with_outputs(notebook(tmp_path / "one.ipynb", "1"), sys.executable, kept)
    assert list(kept.iterdir()) == [changed], "the older copy is removed"


@pytest.mark.parametrize("python", [None, "/usr/bin/false"], ids=["is not here", "fails"])
def test_a_notebook_that_cannot_be_run_here_says_so(
    python: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = site_module("executed")
    monkeypatch.setattr(executed, "interpreter", lambda name: python)
    source = notebook(tmp_path / "ray_pool.ipynb", "1")
    executed.write_copies([source], tmp_path / "site")
    first, code = nbformat.read(tmp_path / "site" / "ray_pool.ipynb", as_version=4).cells
    assert executed.NOT_RUN in first.source
    assert code.outputs == []


def test_a_third_of_the_notebooks_is_run_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = site_module("executed")
    sources = [notebook(tmp_path / f"{number}.ipynb", "1") for number in range(7)]
    run: list[str] = []
    monkeypatch.setattr(executed, "with_outputs", lambda source, _: run.append(source.stem) or source)
    for turn, expected in (("", "0123456"), ("30", "036"), ("31", "14"), ("32", "25")):
        monkeypatch.setenv(executed.TURN, turn)
        run.clear()
        executed.write_copies(sources, tmp_path / "site")
        assert "".join(sorted(run)) == expected
        assert sum(executed.NOT_RUN in each.read_text() for each in (tmp_path / "site").iterdir()) == 7 - len(run)
