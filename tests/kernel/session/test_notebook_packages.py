"""Which packages of the notebook ranks must have, and what they come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from jupyter_distrib.kernel.session.pools import notebook_packages
from jupyter_distrib.system import distributions
from jupyter_distrib.wire import messages as m
from tests.wheels import install, wheel


def put(
    folder: Path, name: str, version: str = "1", *, needs: str = "", requested: bool = False, url: str = ""
) -> None:
    """Put the folder there that tells of a package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {need}" for need in filter(None, needs.split("|"))),
    ]
    (info / "METADATA").write_text("\n".join([*lines, "", "A text.", "Requires-Dist: no-line-of-it"]))
    if requested:
        (info / "REQUESTED").touch()
    if url:
        (info / "direct_url.json").write_text(url)


def test_names_are_compared_in_one_form_and_the_first_on_the_path_counts(tmp_path: Path) -> None:
    put(tmp_path / "a", "My_Package", "1.0")
    put(tmp_path / "b", "my.package", "2.0")
    found = distributions.installed([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none")])
    assert {name: each.version for name, each in found.items()} == {"my-package": "1.0"}


def test_what_somebody_asked_for_is_wanted_with_what_it_needs(tmp_path: Path) -> None:
    put(tmp_path, "jupyterlab", needs="jinja2|requests>=2", requested=True)
    put(tmp_path, "jinja2", needs="markupsafe")
    put(tmp_path, "markupsafe")
    put(tmp_path, "requests")
    put(tmp_path, "trl", needs="torch (>=2)|datasets|deepspeed ; extra == 'all'", requested=True)
    put(tmp_path, "datasets", needs="requests ; python_version > '3'")
    put(tmp_path, "deepspeed", needs="datasets", requested=True)
    put(tmp_path, "torch", needs="nvidia-nccl|sympy")
    put(tmp_path, "nvidia-nccl")
    put(tmp_path, "sympy")
    put(tmp_path, "pip")
    wanted = notebook_packages.wanted(distributions.installed([str(tmp_path)]))
    assert wanted == {"trl", "datasets", "requests", "deepspeed"}


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ({}, "tiny==1.0"),
        ({"url": "https://host/tiny.whl", "archive_info": {}}, "tiny @ https://host/tiny.whl"),
        (
            {"url": "https://host/tiny", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "tiny @ git+https://host/tiny@abc",
        ),
        ({"url": "file:///home/me/tiny", "dir_info": {}}, ""),
    ],
)
def test_where_a_package_comes_from_is_where_an_installer_looks(tmp_path: Path, url: object, asked: str) -> None:
    put(tmp_path, "tiny", "1.0+cpu", url=json.dumps(url))
    assert notebook_packages.requirement(distributions.installed([str(tmp_path)])["tiny"]) == asked


def test_a_folder_of_sources_travels_as_a_folder(tmp_path: Path) -> None:
    url = {"url": f"file://{tmp_path}/my%20tiny", "dir_info": {"editable": True}}
    put(tmp_path / "packages", "tiny", url=json.dumps(url))
    (tmp_path / "my tiny" / "src").mkdir(parents=True)
    each = distributions.installed([str(tmp_path / "packages")])["tiny"]
    assert notebook_packages.is_editable(each)
    assert notebook_packages._source_folder(each) == str(tmp_path / "my tiny" / "src")


@pytest.mark.slow
def test_a_wheel_of_what_is_installed_can_be_installed(tmp_path: Path) -> None:
    install(wheel(tmp_path, "tinypkg", "1.2"), tmp_path / "here")
    each = distributions.installed([str(tmp_path / "here")])["tinypkg"]
    assert notebook_packages.requirement(each) == ""
    name, content = notebook_packages.as_wheel(each)
    assert name == "tinypkg-1.2-py3-none-any.whl"
    assert "tinypkg-1.2.dist-info/direct_url.json" not in zipfile.ZipFile(BytesIO(content)).namelist()
    assert notebook_packages.as_wheel(each)[1] == content  # its contents name the folder that others share
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / name).write_bytes(content)
    install(tmp_path / "again" / name, tmp_path / "there")
    code = "import tinypkg; print(tinypkg.version)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "there", capture_output=True, check=True)
    assert done.stdout == b"1.2\n"


# ---------------------------------------------------------------------------------------------------- a failed import


def failure(message: str, type_name: str = "ModuleNotFoundError", cause: m.Failure | None = None) -> m.Failure:
    return m.Failure(type_name=type_name, message=message, cause=cause)


def test_the_side_that_lacks_a_module_is_named_with_the_line_to_install() -> None:
    [note] = notebook_packages.explain_missing_modules(
        failure("No module named 'cloudpickle.x'"), "~/env/bin/python", "host1"
    ).notes
    version = distributions.installed(sys.path)["cloudpickle"].version
    assert note == (
        f"The notebook has cloudpickle {version}, and the Python of this rank (~/env/bin/python on host1) has none: run "
        f"`~/env/bin/python -m pip install cloudpickle=={version}` there, or have missing packages installed by "
        "--environment sync."
    )


def test_a_module_that_neither_side_has() -> None:
    told = notebook_packages.explain_missing_modules(failure("No module named 'nosuchmodule'"), "", "")
    assert told.notes == (
        "The notebook does not have nosuchmodule either: install it there and in the Python of this rank (python3).",
    )


def test_a_module_of_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    [note] = notebook_packages.explain_missing_modules(failure("No module named 'mine'"), "", "host1").notes
    assert note.startswith("The notebook has a module mine that belongs to no installed package, and the Python")


def test_what_is_no_file_in_the_folder_of_a_package_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    os.mkfifo(tmp_path / "theirs-1.0.dist-info" / "RECORD")
    (tmp_path / "theirs-1.0.dist-info" / "METADATA").symlink_to("/dev/zero")
    found = distributions.installed([str(tmp_path)])["theirs"]
    assert [found.read(name) for name in ("RECORD", "METADATA", "WHEEL")] == ["", "", ""]


def test_the_cause_of_another_exception_is_explained_and_nothing_else() -> None:
    inner = failure("No module named 'cloudpickle'")
    outer = notebook_packages.explain_missing_modules(failure("broken", "RuntimeError", inner), "", "")
    assert outer.notes == ()
    assert outer.cause is not None
    assert len(outer.cause.notes) == 1
    assert (
        notebook_packages.explain_missing_modules(failure("No module named 'cloudpickle'", "KeyError"), "", "").notes
        == ()
    )
