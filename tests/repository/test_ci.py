"""`.ci/run` tells the truth of tests that fail, and of those that fail only sometimes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook import ROOT

ONCE = """
from pathlib import Path
def fails_once(name):
    seen = Path(__file__).with_name(name)
    first = not seen.exists()
    seen.touch()
    assert not first
"""


def run(folder: Path, call: str) -> subprocess.CompletedProcess[str]:
    (folder / "artifacts").mkdir(exist_ok=True)
    script = f". {ROOT / '.ci' / 'setup'}\nTRY_AGAIN=1 JOB=some\n{call}"
    return subprocess.run(["sh", "-eu", "-c", script], cwd=folder, capture_output=True, text=True, check=False)


def run_tests(folder: Path, tests: str) -> int:
    (folder / "test_them.py").write_text(f"{ONCE}\n{tests}\n")
    return run(folder, f"run_pytest {sys.executable} -q -p no:randomly --rootdir . test_them.py").returncode


def unsteady(*names: str) -> str:
    return "\n".join(f"def test_{name}(): fails_once({name!r})" for name in names)


def test_a_test_that_passes_when_it_is_repeated_is_named(tmp_path: Path) -> None:
    assert run_tests(tmp_path, unsteady("one") + "\ndef test_good(): pass") == 0
    verdict = run(tmp_path, "steady")
    assert verdict.returncode == 0
    assert "UNSTEADY some test_them.py::test_one\n" in verdict.stdout
    assert "test_good" not in verdict.stdout


@pytest.mark.slow
def test_one_that_fails_again_fails_the_job(tmp_path: Path) -> None:
    assert run_tests(tmp_path, unsteady("one") + "\ndef test_bad(): assert False") != 0
    assert "UNSTEADY" not in run(tmp_path, "steady").stdout


@pytest.mark.slow
@pytest.mark.parametrize(("names", "good"), [(("a", "b"), True), (("a", "b", "c"), False)])
def test_more_than_two_fail_the_run(tmp_path: Path, names: tuple[str, ...], good: bool) -> None:
    assert run_tests(tmp_path, unsteady(*names)) == 0
    assert (run(tmp_path, "steady").returncode == 0) is good


def test_nothing_is_said_if_nothing_is_unsteady(tmp_path: Path) -> None:
    assert run_tests(tmp_path, "def test_good(): pass") == 0
    verdict = run(tmp_path, "steady")
    assert (verdict.returncode, verdict.stdout) == (0, "")
