"""The state of a git folder, and that no program is run which the folder names."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.system import git_folder

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")
    Path("file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    return tmp_path


def git(*arguments: str) -> str:
    words = ["git", "-c", "user.name=me", "-c", "user.email=me@here", *arguments]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_branch_and_whether_files_have_changed(folder: Path) -> None:
    commit = git("rev-parse", "HEAD")
    assert git_folder.state(".") == {"commit": commit, "branch": "main", "changed": "false"}

    Path("file").write_text("other")
    assert git_folder.state(str(folder)) == {"commit": commit, "branch": "main", "changed": "true"}


def test_a_folder_without_git_has_no_state(tmp_path: Path) -> None:
    assert git_folder.state(str(tmp_path)) == {}


def test_folders_that_git_ignores_as_a_whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("data/a", "src/build/b", "kept/c", "deep/own/d", "log/e.log", "src/f.log"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path(".gitignore").write_text("data/\nbuild\nkept\n*.log\ndeep\n")
    git("add", "-f", "kept/c")
    Path("src/g").touch()
    inside = str(folder)
    assert git_folder.ignored_folders(inside) == {f"{inside}/{name}" for name in ("data", "src/build", "deep", "log")}
    assert git_folder.ignored_folders(f"{inside}/deep") == set(), "a notebook may be in a folder that git ignores"
    assert git_folder.ignored_folders(str(tmp_path_factory.mktemp("plain"))) == set()


PROGRAM = "#!/bin/sh\n{ id; echo $0; } >> $EXPLODED\ncat"


def a_monitor(program: str) -> None:
    git("config", "core.fsmonitor", program)


def a_hook(program: str) -> None:
    os.symlink(program, ".git/hooks/post-index-change")
    os.utime("file", (1, 1))


def hooks_elsewhere(program: str) -> None:
    os.mkdir("hooks")
    os.symlink(program, "hooks/post-index-change")
    git("config", "core.hooksPath", "hooks")
    os.utime("file", (1, 1))


def a_filter(kind: str, name: str = "x") -> Callable[[str], None]:
    def plant(program: str) -> None:
        Path(".gitattributes").write_text(f"* filter={name}\n")
        git("config", f"filter.{name}.{kind}", program)
        git("config", f"filter.{name}.required", "true")
        os.utime("file", (1, 1))

    return plant


def a_filter_of_an_included_file(program: str) -> None:
    Path(".gitattributes").write_text("* filter=x\n")
    Path("more").write_text(f'[filter "x"]\nclean = {program}\n')
    git("config", "include.path", "../more")
    os.utime("file", (1, 1))


def a_filter_of_the_work_tree(program: str) -> None:
    Path(".gitattributes").write_text("* filter=x\n")
    git("config", "extensions.worktreeConfig", "true")
    git("config", "--worktree", "filter.x.clean", program)
    os.utime("file", (1, 1))


def a_submodule(program: str) -> None:
    subprocess.run(["git", "clone", "-q", ".", "inner"], check=True)
    git("add", "inner")
    git("commit", "-q", "-m", "second")
    git("-C", "inner", "config", "core.fsmonitor", program)
    Path("inner/file").write_text("other")


def a_repository_in_a_subfolder(program: str) -> None:
    """As a clone brings it along: the configuration is a file like all others."""
    for name in ("objects", "refs"):
        os.makedirs(f"sub/{name}")
    Path("sub/HEAD").write_text("ref: refs/heads/main")
    Path("sub/config").write_text(f'[core]\nrepositoryformatversion = 0\nworktree = "."\nfsmonitor = {program}\n')
    os.chdir("sub")


def a_remote_for_what_is_missing(program: str) -> None:
    git("config", "extensions.partialClone", "origin")
    git("config", "core.repositoryFormatVersion", "1")
    git("config", "remote.origin.url", f"ext::{program}")
    git("config", "remote.origin.promisor", "true")
    git("config", "protocol.ext.allow", "always")
    tree = git("rev-parse", "HEAD^{tree}")
    os.unlink(f".git/objects/{tree[:2]}/{tree[2:]}")


@pytest.mark.parametrize(
    "plant",
    [
        a_monitor, a_hook, hooks_elsewhere, a_filter("clean"), a_filter("process"), a_filter("clean", "a=b.c"),
        a_filter_of_an_included_file, a_filter_of_the_work_tree, a_submodule, a_repository_in_a_subfolder,
        a_remote_for_what_is_missing,
    ],
)  # fmt: skip
def test_no_program_runs_that_the_folder_names(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[str], None],
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    monkeypatch.setenv("EXPLODED", str(outside / "exploded"))
    program = outside / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    plant(str(program))
    (outside / "exploded").unlink(missing_ok=True)  # git has run it for the setting up
    assert "exploded" not in os.listdir(outside)

    git_folder.state(".")
    git_folder.ignored_folders(".")

    assert not (outside / "exploded").exists()


def test_a_filter_of_the_users_own_settings_works(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Git LFS: without it, files would seem to be changed."""
    settings = tmp_path / ".git" / "of_the_user"
    settings.write_text('[filter "own"]\nclean = tr a-z A-Z\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    Path(".gitattributes").write_text("file filter=own\n")
    git("add", ".gitattributes")
    git("add", "--renormalize", "file")
    git("commit", "-q", "-m", "second")
    os.utime("file", (1, 1))

    assert git_folder.state(".")["changed"] == "false"


@pytest.mark.parametrize("key", ["lfs.extension.x.clean", "annex.freezecontent-command"])
def test_a_filter_of_the_user_starts_no_program_that_the_folder_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """As those of Git LFS and git-annex do, with the repository's configuration."""
    settings = tmp_path / ".git" / "of_the_user"
    settings.write_text(f'[filter "own"]\nclean = "sh -c \\"$(git config {key})\\"; cat"\nrequired = true\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    Path(".gitattributes").write_text("file filter=own\n")
    git("config", key, "touch exploded")
    os.utime("file", (1, 1))

    assert git_folder.state(".")["changed"] == "true"  # .gitattributes
    assert not Path("exploded").exists()
