"""`.ci/run` tells the truth of tests that fail, and of those that fail only sometimes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
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
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--by-turns', action='store_true')"
    )
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


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A checkout whose jobs do nothing and pass."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for job in (ROOT / ".ci").iterdir():
        (tmp_path / ".ci" / job.name).write_text('echo "== 1 passed in 0.1s =="\n')
    (tmp_path / ".ci/run").write_text((ROOT / ".ci/run").read_text())
    (tmp_path / ".ci/setup").write_text((ROOT / ".ci/setup").read_text() + "\nsetup() { :; }\n")
    python = tmp_path / ".venv/bin/python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return tmp_path


def everything(checkout: Path) -> tuple[int, str]:
    variables = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    done = subprocess.run(
        ["sh", ".ci/run"], cwd=checkout, env=variables, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout.split("==== jobs", 1)[1]


def test_everything_that_passes_is_listed(stand_in: Path) -> None:
    code, told = everything(stand_in)
    assert code == 0
    jobs = set(re.findall(r"^(\w+) +ok ", told, re.MULTILINE))
    scripts = {path.name for path in (ROOT / ".ci").iterdir()} - {
        "run",
        "setup",
        "test",
        "smoke.py",
        "gpu",
        "cuda",
        "release",
    }
    assert jobs == scripts | {"tests", "figures", "lint", "format", "types"}


@pytest.mark.parametrize(
    ("job", "script", "name"),
    [("test", "exit 1", "tests"), ("docs", "exit 3", "docs"), ("slurm", "kill -9 $PPID", "slurm")],
    ids=["alone", "beside another", "killed with what runs it"],
)
def test_a_job_that_fails_fails_the_run_and_the_others_go_on(stand_in: Path, job: str, script: str, name: str) -> None:
    (stand_in / ".ci" / job).write_text(f"echo why; {script}\n")
    code, told = everything(stand_in)
    assert code == 1
    assert f"==== failed: {name}\n" in told
    assert told.count(" ok ") >= 18
    assert "why" in (stand_in / "artifacts" / f"{name}.log").read_text()


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_commands_that_exist(workflow: Path) -> None:
    text = workflow.read_text("utf-8")
    commands = re.findall(r"sh (\.ci/\w+)", text)
    assert commands
    assert [each for each in commands if not (ROOT / each).is_file()] == []
    assert "\t" not in text
    assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), "no more rights than needed"


def test_the_quick_tests_run_on_each_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/checks.yml").read_text("utf-8"))
    assert matrix is not None
    assert re.findall(r"[\d.]+", matrix[1]) == named


def test_only_the_step_that_publishes_has_a_token_and_it_comes_after_the_checks() -> None:
    build, publish = (ROOT / ".github/workflows/release.yml").read_text("utf-8").split("  publish:")
    assert "id-token" not in build
    assert "id-token: write" in publish
    assert "needs: build" in publish
    assert "sh .ci/release" in build
    assert "password" not in publish.partition("steps:")[2]


@pytest.mark.parametrize(("tag", "said"), [("v9.9.9", "The tag is v9.9.9, and the version of the package is")])
def test_a_tag_of_another_version_is_refused_before_anything_is_built(tag: str, said: str) -> None:
    done = subprocess.run(["sh", ".ci/release", tag], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_site_is_built_without_cuda_elsewhere_too() -> None:
    text = (ROOT / ".readthedocs.yaml").read_text("utf-8")
    assert re.search(r"pre_install:.*\n.*\n +- grep '\^torch==' tests/constraints.txt \| xargs .*whl/cpu\n", text)


def test_every_command_is_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8") + (ROOT / "docs/maintainers.md").read_text("utf-8")
    commands = {each.name for each in (ROOT / ".ci").iterdir()} - {"setup", "smoke.py"}
    assert sorted(each for each in commands if f".ci/{each}" not in text) == []
