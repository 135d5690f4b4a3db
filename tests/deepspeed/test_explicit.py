"""A cell that calls `deepspeed.initialize` itself, under `--strategy none`: real DeepSpeed on two CPU ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.repository.test_notebooks import executed, outputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LINE = "%%distributed --ranks 2 --out got "
BUILD = """
import deepspeed
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=config({stage}, zero_allow_untested_optimizer=True)
)
"""
STEPS = """
losses = []
for step in range({first}, {last}):
    rows = slice(step * 8 + rank * 4, step * 8 + rank * 4 + 4)
    loss = nn.functional.mse_loss(engine(x[rows]), y[rows])
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    weights = weights_of(engine.module)
losses, weights
"""
SAME = """
losses, weights = alone({steps})
last = [(one + other) / 2 for one, other in zip(got[0][0], got[1][0])]
print(
    max((weights - got[r][1]).abs().max().item() for r in (0, 1)),
    max(abs(one - other) for one, other in zip(last, losses[-len(last):])),
    sum(last[-4:]) / sum(losses[:4]),
)
"""


def training(stage: int, first: int = 0, last: int = 20) -> str:
    return BUILD.format(stage=stage) + STEPS.format(first=first, last=last)


def check_against_one_device(book: Notebook, steps: int = 20) -> None:
    of_weights, of_losses, fallen_to = map(float, book.ok(SAME.format(steps=steps)).stdout.split())
    assert of_weights < 1e-4
    assert of_losses < 1e-4
    assert fallen_to < 0.5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_trains_as_one_device_does(ours: Notebook, stage: int) -> None:
    ours.ok(LINE + training(stage))

    check_against_one_device(ours)


def test_nothing_is_compiled_for_an_optimizer_of_torch(ours: Notebook, tmp_path: Path) -> None:
    ours.ok(f"{LINE}--env TORCH_EXTENSIONS_DIR={tmp_path}\n{training(1)}")

    assert not list(tmp_path.rglob("*"))


def test_a_kept_engine_goes_on_in_the_next_cell(ours: Notebook) -> None:
    ours.ok(LINE + "--keep engine" + training(2, 0, 8))
    ours.ok(LINE + "\nimport deepspeed" + STEPS.format(first=8, last=20))

    check_against_one_device(ours)


def test_the_cell_after_one_that_failed_in_a_step_trains_anew(ours: Notebook) -> None:
    failing = training(3).replace("    engine.step()", "    engine.step()\n    assert rank == 0 or step < 3, 'no more'")
    failed = ours.fails(LINE + failing)
    assert failed.ename == "AssertionError"
    assert "Rank 1 raised it" in failed.traceback

    ours.ok(LINE + training(3))
    check_against_one_device(ours)


def test_a_stopped_training_frees_the_ranks_and_its_engine_says_that_its_groups_are_gone(ours: Notebook) -> None:
    ours.ok(LINE + "--keep engine" + training(1, 0, 4))
    hangs = STEPS.format(first=4, last=20).replace(
        "    engine.step()",
        "    engine.step()\n    if step == 5 and rank: print('ready', flush=True); import time; time.sleep(100)",
    )
    ours.start(LINE + "\nimport deepspeed" + hangs)
    ours.until("ready")
    ours.manager.interrupt_kernel()
    assert ours.finish().ename == "KeyboardInterrupt"

    refused = ours.fails(LINE + "\nimport deepspeed" + STEPS.format(first=4, last=8))
    assert "the process group of this DeepSpeed engine is gone" in refused.evalue
    ours.ok(LINE + training(1))
    check_against_one_device(ours)


SOURCE = """
#include <Python.h>
static PyObject *three(PyObject *self, PyObject *none) { return PyLong_FromLong(3); }
static PyMethodDef methods[] = {{"three", three, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "ours", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_ours() { return PyModule_Create(&module); }
"""
COMPILES = """
import sys, types
import deepspeed, torch.utils.cpp_extension as extension
from deepspeed.ops.op_builder.builder import OpBuilder

class Kernel(OpBuilder):
    BUILD_VAR, NAME = "DS_BUILD_OURS", "ours"
    def __init__(self): super().__init__(name="ours")
    def absolute_name(self): return "ours"
    def sources(self): return [SOURCE]
    def cxx_args(self): return ["-O0"]
    def is_compatible(self, verbose=False): return True
    def deepspeed_src_path(self, path): return path
    def include_paths(self): return []
    def nvcc_args(self): return []
    def extra_ldflags(self): return []
    def builder(self): return None

"""


@pytest.fixture
def kernel_source(ours: Notebook, tmp_path: Path) -> str:
    """The cell of a kernel whose compiler begins when somebody writes to the pipe `go`."""
    (tmp_path / "ours.cpp").write_text(SOURCE)
    compiler = tmp_path / "compiler"
    compiler.write_text(f"""#!/bin/sh
case "$*" in *ours.cpp*) [ -p {tmp_path}/go ] && read line < {tmp_path}/go;; esac
exec c++ "$@"
""")
    compiler.chmod(0o700)
    ours.ok(f"SOURCE = {str(tmp_path / 'ours.cpp')!r}")
    variables = f"--env TORCH_EXTENSIONS_DIR={tmp_path} --env CXX={compiler}"
    return f"{variables}\n{COMPILES}Kernel().load().three()"


def test_a_compilation_is_shown_and_used_again(ours: Notebook, kernel_source: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    ours.start(LINE + kernel_source)
    ours.until("compiling ours (seconds, once)")
    (tmp_path / "go").write_text("go\n")
    (tmp_path / "go").unlink()
    assert ours.finish().status == "ok"
    assert ours.ok("got[0], got[1]").result == "(3, 3)"

    again = ours.ok(f"{LINE}--fresh {kernel_source}")
    assert "compiling" not in again.text


def test_a_compilation_that_was_killed_does_not_stop_the_next(
    ours: Notebook, kernel_source: str, tmp_path: Path
) -> None:
    ours.ok(LINE + kernel_source)
    (built,) = tmp_path.rglob("ours.so")
    lock = built.parent / "lock"
    lock.touch()  # as a process leaves it that was killed

    ours.ok(f"{LINE}--fresh {kernel_source}")
    assert not lock.exists()


def test_a_missing_compiler_is_named(ours: Notebook, kernel_source: str) -> None:
    without = kernel_source.replace("/compiler\n", "/no-such-compiler\n", 1)
    failed = ours.fails(f"{LINE}--fresh {without}")

    assert failed.ename == "DistributedError"
    assert "no-such-compiler on this rank: install a C++ compiler (g++) and ninja" in failed.evalue


def test_the_notebook_trains_as_its_text_says(ours: Notebook, tmp_path: Path) -> None:
    cells = executed("deepspeed.ipynb", tmp_path)

    explicit, unchanged = (
        outputs(cell)
        for cell in cells
        if cell.source.rstrip().endswith(("_[0]", "round(accuracy, 3)")) and "%%" not in cell.source
    )
    assert float(explicit) > 0.85
    assert float(unchanged) > 0.85
