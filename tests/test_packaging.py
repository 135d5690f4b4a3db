"""What a user installs: the wheel's contents, and that the files around it say the same thing.

That the wheel works where the source tree cannot be seen is the job of `.ci/wheel`.
"""

from __future__ import annotations

import email.parser
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest

TOP = Path(__file__).parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built in this environment, so without a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(TOP)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    sources = {
        path.relative_to(TOP).as_posix()
        for path in (TOP / "jupyter_distrib").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == sources
    assert "jupyter_distrib/py.typed" in packed  # without it, type checkers see no types in the installed package


@pytest.mark.slow
def test_the_wheel_says_what_it_needs(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.parser.Parser().parsestr(wheel.read(name).decode())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    needed = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert {"torch", "cloudpickle", "ipykernel", "ipython"} <= needed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_the_constraints_pin_everything_asked_for_and_torch_first():
    lines = [line for line in (TOP / "tests/constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), lines
    assert lines[0].startswith("torch==")
    pinned = {normal(line.split("==")[0]) for line in lines}
    extras = PROJECT["optional-dependencies"].values()
    asked = {normal(re.split(r"[^\w.-]", line)[0]) for group in (PROJECT["dependencies"], *extras) for line in group}
    assert asked - {normal(PROJECT["name"])} <= pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_two_commands_of_the_readme_are_there():
    first_screen = (TOP / "README.md").read_text().split("## Install")[0]
    commands = re.findall(r"^sh (\S+)$", first_screen, flags=re.MULTILINE)
    assert commands == [".ci/demo", ".ci/test"]
    for command in [*commands, ".ci/run", ".ci/setup", ".ci/wheel"]:
        subprocess.run(["sh", "-n", str(TOP / command)], check=True)
    assert "sh .ci/test" in (TOP / ".ci/run").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"])
def test_links_between_files_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (TOP / page).read_text())
    assert [link for link in links if not (TOP / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("notebook", sorted((TOP / "example_notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(notebook):
    document = nbformat.read(notebook, as_version=4)
    nbformat.validate(document)
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_setting_up_without_a_new_enough_python_is_one_sentence(tmp_path):
    """Every interpreter that the script tries is one that says it is too old."""
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["sh", "-euc", ". .ci/setup; find_python"],
        cwd=TOP,
        env={"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 or newer" in done.stderr
