"""The notebook's files, for nodes that do not share its folders."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jupyter_distrib.coordinator import file_sync, relay
from jupyter_distrib.coordinator.file_sync import CopiedFile, FileSync, Found, ProjectFiles, is_shared
from jupyter_distrib.coordinator.relay import stamp


def look(directory: str, path: list[str]) -> Found:
    return ProjectFiles().scan(directory, path)


def names(files: list[CopiedFile]) -> list[str]:
    return [name for name, *_ in files]


def test_only_what_has_changed_travels_again(tmp_path: Path) -> None:
    notebook, library = tmp_path / "notebook", tmp_path / "library"
    for folder in (notebook, library):
        (folder / "deep").mkdir(parents=True)
    (notebook / "utils.py").write_text("a = 1")
    (notebook / "gone.py").write_text("")
    (library / "deep" / "tools.py").write_text("b = 2")
    here = FileSync()
    files, gone = here.changes(look(str(notebook), [str(notebook), str(library)]))
    assert (sorted(names(files)), gone) == (["0/deep/", "0/gone.py", "0/utils.py", "1/deep/tools.py"], [])
    assert here.changes(look(str(notebook), [str(notebook), str(library)])) == ([], [])

    (notebook / "utils.py").write_text("a = 10")
    (notebook / "gone.py").unlink()
    [(name, mtime_ns, _, content)], gone = here.changes(look(str(notebook), [str(notebook), str(library)]))
    assert (name, content, gone) == ("0/utils.py", b"a = 10", ["0/gone.py"])
    assert mtime_ns == os.stat(notebook / "utils.py").st_mtime_ns


def test_empty_folders_and_the_right_to_execute_travel_too(tmp_path: Path) -> None:
    """A cell may write into such a folder, or start such a program."""
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    for name in ("tool.sh", "data/large.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    os.truncate(tmp_path / "data" / "large.bin", file_sync.FILE_LIMIT_BYTES + 1)
    node, copy = FileSync(), relay.ProjectCopy(tmp_path.parent / "copy")
    tool, empty = tmp_path.parent / "copy/0/tool.sh", tmp_path.parent / "copy/0/empty/inside"

    assert copy.update(*node.changes(look(str(tmp_path), []))) == []
    assert empty.is_dir()
    assert not (tmp_path.parent / "copy/0/data").exists(), "it would look as if there were no data"
    assert not os.access(tool, os.X_OK)

    (tmp_path / "tool.sh").chmod(0o755)
    (tmp_path / "empty" / "inside").rmdir()
    assert copy.update(*node.changes(look(str(tmp_path), []))) == []
    assert os.access(tool, os.X_OK)
    assert not empty.exists()


def test_data_environments_and_what_programs_made_stay_here(tmp_path: Path) -> None:
    for name in (
        "a.py",
        ".secret",
        "notebook.ipynb",
        "__pycache__/a.pyc",
        "env/pyvenv.cfg",
        "env/lib/b.py",
        "conda/conda-meta/c",
        "conda/lib/d.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    found = look(str(tmp_path), [])
    assert list(found.files) == ["0/a.py"]
    assert found.left_out == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_folders_that_git_ignores_stay_here_but_for_packages(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "_version.py",
        "data/b.csv",
        "generated/__init__.py",
        "out/c.py",
        "env/pyvenv.cfg",
        "src/d.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    rules = tmp_path / ".gitignore"
    rules.write_text("data/\n_version.py\ngenerated/\nout\nenv/\n")
    assert len(look(str(tmp_path), []).files) == 6, "there is no repository yet"

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    files = ProjectFiles()
    found = files.scan(str(tmp_path), [])
    assert list(found.files) == ["0/_version.py", "0/a.py", "0/generated/__init__.py", "0/src/d.py"]
    assert found.left_out == (
        f"{tmp_path}/data is not on the nodes, since git ignores it, nor is 1 other such folder: have the ranks read data "
        "from a place that all nodes can reach, or take the folder out of .gitignore."
    )
    (tmp_path / "src" / "out").mkdir()
    (tmp_path / "src" / "out" / "e.py").write_text("")
    assert files.scan(str(tmp_path), []).files == found.files, "a folder that is made later is ignored as well"

    rules.write_text("out\n")
    found = files.scan(str(tmp_path), [])
    assert "0/data/b.csv" in found.files
    assert found.left_out.startswith(
        f"{tmp_path}/out is not on the nodes, since git ignores it, nor is 1 other such folder: "
    )
    assert look(str(tmp_path / "out"), []).files.keys() == {"0/c.py"}, "a notebook may be in one"


@pytest.mark.timeout(20)  # each would be read for ever
def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("2")
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    found = look(str(tmp_path), [])
    assert sorted(found.files) == ["0/a.py", "0/b.py"]

    (tmp_path / "b.py").unlink()
    os.mkfifo(tmp_path / "b.py")
    assert [content for *_, content in FileSync().changes(found)[0]] == [b"1"]


def test_links_of_a_downloaded_folder_bring_no_hidden_file_of_the_user(tmp_path: Path) -> None:
    home = tmp_path / "home"
    notebook, deep = home / ".cache" / "course", home / ".cache" / "course" / "deep"
    for folder in (deep, home / ".ssh", home / "shared", notebook / ".store"):
        folder.mkdir(parents=True)
    (home / ".netrc").write_text("password")
    (home / ".ssh" / "id_rsa").write_text("key")
    (home / "shared" / "utils.py").write_text("a = 1")
    (notebook / ".store" / "b").write_text("b = 2")
    (home / "shared" / "by_another").symlink_to(home / ".netrc")
    (notebook / "data.csv").symlink_to("../../.ssh/id_rsa")
    (notebook / "environment.txt").symlink_to("/proc/self/environ")
    (notebook / "utils.py").symlink_to(home / "shared" / "utils.py")
    (notebook / "own.py").symlink_to(".store/b")
    (deep / "c.txt").symlink_to(home / "shared" / "by_another")
    project = ProjectFiles()
    for _ in range(2):
        found = project.scan(str(notebook), [])
        assert sorted(found.files) == ["0/own.py", "0/utils.py"]
        assert found.left_out == (
            f"{notebook}/data.csv is not on the nodes, since it links to a hidden file elsewhere: copy that file into the "
            "folder."
        )


def test_of_a_file_without_a_size_no_more_is_read_than_may_be_copied(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    found = look(str(tmp_path), [])
    os.truncate(tmp_path / "a.txt", 10 * file_sync.FILE_LIMIT_BYTES)
    [(*_, content)], _ = FileSync().changes(found)
    assert len(content) == file_sync.FILE_LIMIT_BYTES


def test_large_files_stay_here_and_the_largest_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("a.bin", "weights.bin", "z.bin")):
        (tmp_path / name).write_bytes(bytes(file_sync.FILE_LIMIT_BYTES * (number % 2 + 1) + 1))
    found = look(str(tmp_path), [])
    assert not found.files
    assert found.left_out == (
        f"{tmp_path}/weights.bin (2 MB) is not on the nodes, nor is any other file over 1 MB: "
        "have the ranks read such data from a place that all nodes can reach."
    )


def test_large_files_beside_the_packages_of_a_checkout_are_not_named(tmp_path: Path) -> None:
    notebook, checkout = tmp_path / "notebook", tmp_path / "checkout"
    for folder in (notebook, checkout / "artifacts" / "deep", checkout / "mine" / "data"):
        folder.mkdir(parents=True)
    large = bytes(file_sync.FILE_LIMIT_BYTES + 1)
    for place in (
        checkout / "core.bin",
        checkout / "artifacts" / "deep" / "a.bin",
        checkout / "mine" / "data" / "m.bin",
    ):
        place.write_bytes(large)
    assert look(str(notebook), [str(checkout)]).left_out == ""
    (checkout / "mine" / "__init__.py").write_text("")
    assert look(str(notebook), [str(checkout)]).left_out.startswith(f"{checkout}/mine/data/m.bin (1 MB) is not")
    assert look(str(checkout), []).left_out, "in the notebook's own folder every file counts"


def test_what_could_not_be_brought_travels_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    here = FileSync()
    assert names(here.changes(look(str(tmp_path), []))[0]) == ["0/a.py"]
    here.forget(["0/a.py"])
    assert names(here.changes(look(str(tmp_path), []))[0]) == ["0/a.py"]


def test_what_could_not_be_read_travels_when_it_can(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("")
    here, found = FileSync(), look(str(tmp_path), [])
    (tmp_path / "a.py").rename(tmp_path / "away")
    assert names(here.changes(found)[0]) == ["0/b.py"]
    (tmp_path / "away").rename(tmp_path / "a.py")
    assert names(here.changes(found)[0]) == ["0/a.py"]


def test_files_are_divided_into_parts_without_dividing_one() -> None:
    limit_bytes = file_sync.PART_BYTES
    files = [
        (name, 0, False, bytes(size_bytes)) for name, size_bytes in zip("abcde", (1, limit_bytes, 2, 3, 4), strict=True)
    ]
    divided = file_sync.parts(files, ["gone"])
    assert [(names(list(part)), list(gone)) for part, gone in divided] == [
        (["a"], ["gone"]),
        (["b"], []),
        (["c", "d", "e"], []),
    ]
    assert file_sync.parts([], []) == [([], [])], "a node that gets none is to use its copy all the same"


def test_a_folder_with_too_many_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sync, "COUNT_LIMIT", 2)
    for number in range(3):
        (tmp_path / f"{number}.py").write_text("")
    found = look(str(tmp_path), [])
    assert list(found.files) == ["0/0.py", "0/1.py"]
    assert found.left_out == (
        f"{tmp_path} has more than 2 files or 100 MB: not all of it is on the nodes; start the notebook in a folder of its own."
    )
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    assert look(str(notebooks), [str(tmp_path)]).left_out.endswith("; put a smaller folder on sys.path instead.")
    (tmp_path / "1.py").unlink()
    assert look(str(tmp_path), []).left_out == ""


@pytest.mark.parametrize(
    ("there", "before", "after", "shared"),
    [
        ((7, 100), (7, 100), (7, 100), True),
        ((7, 150), (7, 100), (7, 200), True),  # the notebook was saved meanwhile, twice
        ((7, 100), (7, 100), (7, 200), True),
        ((7, 200), (7, 100), (7, 200), True),
        ((7, 99), (7, 100), (7, 200), False),
        ((7, 201), (7, 100), (7, 200), False),
        ((7, 101), (7, 100), (7, 100), False),
        ((8, 100), (7, 100), (7, 100), False),
        ((7, 100), (7, 100), (8, 100), False),  # another folder of that name has taken its place
        (None, (7, 100), (7, 100), False),
        ((7, 100), None, (7, 100), False),
        ((7, 100), (7, 100), None, False),
    ],
)
def test_a_folder_is_shared_if_it_is_the_same_at_the_same_time(
    there: tuple[int, int] | None, before: tuple[int, int] | None, after: tuple[int, int] | None, shared: bool
) -> None:
    stamps = [each and (*each, 1000, True) for each in (there, before, after)]
    assert is_shared(*stamps) is shared


@pytest.mark.parametrize(
    ("owner", "is_own", "shared"),
    [
        (1000, True, True),
        (1000, False, True),  # a colleague's, here and there
        (0, True, True),  # in a container whose root the user is
        (12345, False, False),
        (0, False, False),
    ],
)
def test_a_folder_that_a_stranger_has_made_alike_is_not_the_notebooks(owner: int, is_own: bool, shared: bool) -> None:
    """Its number and its time are for all to see, and can be had."""
    here = (7, 100, 1000, True)
    assert is_shared((7, 100, owner, is_own), here, here) is shared


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_stamp_of_a_strangers_folder_names_them(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
    os.chown(theirs, 12345, 12345)
    assert [stamp(str(each))[2:] for each in (mine, theirs)] == [(0, True), (12345, False)]  # type: ignore[index]


def old(path: Path) -> None:
    """Make a folder look as if nothing had happened in it for a while."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


def test_files_that_come_and_go_and_are_written_are_noticed_in_folders_that_were_listed_before(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "a.py").write_text("a = 1")
    (deep / "gone.py").write_text("")
    for folder in (deep, tmp_path):
        old(folder)
    files = ProjectFiles()
    first = files.scan(str(tmp_path), [])
    assert list(first.files) == ["0/deep/a.py", "0/deep/gone.py"]
    assert files.scan(str(tmp_path), []) is first

    (deep / "a.py").write_text("a = 10")  # which the folder does not tell
    second = files.scan(str(tmp_path), [])
    assert FileSync().changes(second)[0][0][3] == b"a = 10"
    assert second.files["0/deep/a.py"] != first.files["0/deep/a.py"]

    (deep / "gone.py").unlink()
    (deep / "b.py").write_text("")
    (deep / "env").mkdir()
    (deep / "env" / "c.py").write_text("")
    assert list(files.scan(str(tmp_path), []).files) == ["0/deep/a.py", "0/deep/b.py", "0/deep/env/c.py"]
    old(deep / "env")
    files.scan(str(tmp_path), [])
    (deep / "env" / "pyvenv.cfg").write_text("")
    assert list(files.scan(str(tmp_path), []).files) == ["0/deep/a.py", "0/deep/b.py"]


def test_a_folder_that_has_just_changed_is_listed_again(tmp_path: Path) -> None:
    """Another file may come before its time of change is another one."""
    (tmp_path / "a.py").write_text("")
    files, now = ProjectFiles(), os.stat(tmp_path).st_mtime_ns
    files.scan(str(tmp_path), [])
    (tmp_path / "b.py").write_text("")
    os.utime(tmp_path, ns=(now, now))
    assert list(files.scan(str(tmp_path), []).files) == ["0/a.py", "0/b.py"]


def test_a_folder_that_is_listed_already_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("")
    old(tmp_path)
    files = ProjectFiles()
    first = files.scan(str(tmp_path), [])
    monkeypatch.setattr(os, "scandir", None)
    assert files.scan(str(tmp_path), []) is first


def test_a_look_that_takes_long_is_said_once_and_not_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sync, "SLOW_S", -1.0)
    files = ProjectFiles()
    assert files.scan(str(tmp_path), []).left_out == ""
    said = files.scan(str(tmp_path), [])
    assert said.left_out == (
        f"each cell waits 0 s for a scan of the files of {tmp_path}, which are copied to the nodes: "
        "start the notebook in a folder of its own, or in one that the nodes share."
    )
    assert files.scan(str(tmp_path), []) is said


def test_empty_folders_count_among_the_files_that_may_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sync, "COUNT_LIMIT", 3)
    for name in ("a/1.py", "a/2.py", "a/3.py", "c/4.py", "c/5.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "b").mkdir()
    found = look(str(tmp_path), [])
    assert "4.py" not in " ".join(found.files)
    assert "has more than 3 files" in found.left_out
