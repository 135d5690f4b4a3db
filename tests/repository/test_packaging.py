"""What a user installs: the wheel's contents, and that the files around it say the same thing.

That the wheel works where the source tree cannot be seen is the job of `.ci/wheel`.
"""

from __future__ import annotations

import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest

import jupyter_distrib
from hatch_build import STAMP, digest
from jupyter_distrib import errors
from jupyter_distrib.kernel.notebook import doctor
from jupyter_distrib.libraries import known

TOP = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]


def build(top: Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Build the wheel in this environment, so without a network."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(top)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, with the sidebar if that is built."""
    folder = tmp_path_factory.mktemp("dist")
    done = build(TOP, folder, JUPYTER_DISTRIB_SIDEBAR="skip")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture
def checkout(tmp_path):
    """A fresh checkout, where nothing is built."""
    top = tmp_path / "checkout"
    leave = shutil.ignore_patterns(".*", "node_modules", "lib", "artifacts", "tests", "benchmarks", "__pycache__")
    shutil.copytree(TOP, top, ignore=leave)
    shutil.copy(TOP / "labextension" / ".yarnrc.yml", top / "labextension" / ".yarnrc.yml")
    shutil.rmtree(top / "jupyter_distrib" / "labextension", ignore_errors=True)
    return top


def without_node(tmp_path: Path) -> str:
    """A search path on which node is not found."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    return str(folder)


@pytest.mark.slow
def test_without_node_and_without_what_is_built_the_wheel_goes_without_the_sidebar(checkout, tmp_path):
    done = build(checkout, tmp_path, PATH=without_node(tmp_path), JUPYTER_DISTRIB_SIDEBAR="")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(file).namelist() if "labextension" in name]
    assert "Installing without the JupyterLab sidebar: Node.js was not there" in done.stdout + done.stderr
    zipfile.ZipFile(file).extractall(tmp_path / "installed")
    finding = doctor._no_sidebar(tmp_path / "installed" / "jupyter_distrib")
    assert "Node.js was not there to build it when jupyter_distrib was installed" in finding.text
    assert "install Node.js" in finding.advice
    assert "environment that JupyterLab" not in finding.advice

    refused = build(checkout, tmp_path / "second", PATH=without_node(tmp_path), JUPYTER_DISTRIB_SIDEBAR="require")
    assert refused.returncode != 0
    assert "The sidebar is not built, and node is not there to build it." in refused.stdout + refused.stderr


@pytest.mark.slow
def test_a_sidebar_that_is_built_is_where_jupyterlab_looks_for_it(checkout, tmp_path):
    output = checkout / "jupyter_distrib" / "labextension"
    output.mkdir()
    (output / "package.json").write_text("{}")
    done = build(checkout, tmp_path, JUPYTER_DISTRIB_SIDEBAR="skip")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    there = {name.partition(".data/data/")[2] for name in zipfile.ZipFile(file).namelist() if ".data/" in name}
    place = "share/jupyter/labextensions/jupyter-distrib"
    assert there == {f"{place}/package.json", f"{place}/install.json"}


@pytest.mark.slow
def test_a_source_distribution_has_the_sidebar_that_is_built(checkout, tmp_path):
    output = checkout / "jupyter_distrib" / "labextension"
    output.mkdir()
    (output / "package.json").write_text("{}")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(checkout)]
    env = {**os.environ, "PATH": without_node(tmp_path), "JUPYTER_DISTRIB_SIDEBAR": ""}
    (output / STAMP).write_text(digest(checkout / "labextension"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert [name for name in archive.getnames() if name.endswith("jupyter_distrib/labextension/package.json")]
    (file,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(file).namelist()
    assert [name for name in names if name.endswith("labextensions/jupyter-distrib/package.json")]
    assert not [name for name in names if "without_sidebar" in name]


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    sources = {
        path.relative_to(TOP).as_posix()
        for path in (TOP / "jupyter_distrib").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name and ".data/" not in name}
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


@pytest.mark.slow
def test_links_and_pictures_of_the_readme_work_outside_the_repository(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.parser.Parser().parsestr(wheel.read(name).decode())
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 40
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"]({PROJECT['urls']['Documentation']}errors.html)" in text
    assert f"]({PROJECT['urls']['Source']}/blob/main/CONTRIBUTING.md)" in text
    assert re.search(r"!\[[^]]+\]\(\S+/raw/main/docs/images/live-view-light\.png\)", text)
    assert re.search("<(picture|source|img)", text) is None


def test_the_constraints_pin_everything_asked_for_and_torch_first():
    lines = [line for line in (TOP / "tests/constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), lines
    assert lines[0].startswith("torch==")
    pinned = {normal(line.split("==")[0]) for line in lines}
    extras = PROJECT["optional-dependencies"].values()
    asked = {normal(re.split(r"[^\w.-]", line)[0]) for group in (PROJECT["dependencies"], *extras) for line in group}
    assert asked - {normal(PROJECT["name"])} <= pinned


def test_modules_that_an_extra_installs_are_asked_for_by_that_extra():
    for module, extra in known.extras().items():
        asked = PROJECT["optional-dependencies"][extra]
        assert module in [re.split(r"[^\w-]", line)[0] for line in asked], module


def test_the_page_on_installing_has_every_extra():
    page = (TOP / "docs/install.md").read_text()
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in page] == []


def test_version_and_address_are_the_same_everywhere():
    sidebar = json.loads((TOP / "labextension/package.json").read_text())
    citation = dict(
        re.findall(r"^(version|url|repository-code): (.*)$", (TOP / "CITATION.cff").read_text(), re.MULTILINE)
    )
    assert "version" in PROJECT["dynamic"]
    assert sidebar["version"] == citation["version"] == jupyter_distrib.__version__
    assert PROJECT["urls"]["Documentation"] == sidebar["homepage"] == citation["url"] == errors.SITE
    source = PROJECT["urls"]["Source"]
    assert PROJECT["urls"]["Issues"] == f"{source}/issues"
    assert sidebar["repository"] == {"type": "git", "url": f"git+{source}.git"}
    assert f"git clone {source}\n" in (TOP / "README.md").read_text()
    assert citation["repository-code"] == source


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_two_commands_of_the_readme_are_there():
    first_screen = (TOP / "README.md").read_text().split("## Install")[0]
    commands = re.findall(r"^sh (\S+)$", first_screen, flags=re.MULTILINE)
    assert commands == [".ci/demo", ".ci/test"]
    for command in [*commands, ".ci/browser", ".ci/frameworks", ".ci/run", ".ci/setup", ".ci/sidebar", ".ci/wheel"]:
        subprocess.run(["sh", "-n", str(TOP / command)], check=True)
    assert "sh .ci/test" in (TOP / ".ci/run").read_text()


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *sorted(f"docs/{path.name}" for path in (TOP / "docs").glob("*.md")),
    ],
)
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


def test_no_large_file_is_committed() -> None:
    """A clone brings every version of it for ever."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    sizes = {name: (TOP / name).stat().st_size for name in listed.stdout.split("\0") if (TOP / name).is_file()}
    assert len(sizes) > 500
    assert {name: size for name, size in sizes.items() if size > 300_000} == {}
