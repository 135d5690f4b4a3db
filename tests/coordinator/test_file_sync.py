"""The notebook's files, for nodes that do not share its folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_distrib.coordinator import file_sync
from jupyter_distrib.coordinator.file_sync import FileSync, is_shared, look


def names(files: list[tuple[str, int, bytes]]) -> list[str]:
    return [name for name, _, _ in files]


def test_only_what_has_changed_travels_again(tmp_path: Path) -> None:
    notebook, library = tmp_path / "notebook", tmp_path / "library"
    for folder in (notebook, library):
        (folder / "deep").mkdir(parents=True)
    (notebook / "utils.py").write_text("a = 1")
    (notebook / "gone.py").write_text("")
    (library / "deep" / "tools.py").write_text("b = 2")
    here = FileSync()
    files, gone = here.changes(look(str(notebook), [str(notebook), str(library)]))
    assert (sorted(names(files)), gone) == (["0/gone.py", "0/utils.py", "1/deep/tools.py"], [])
    assert here.changes(look(str(notebook), [str(notebook), str(library)])) == ([], [])

    (notebook / "utils.py").write_text("a = 10")
    (notebook / "gone.py").unlink()
    [(name, mtime_ns, content)], gone = here.changes(look(str(notebook), [str(notebook), str(library)]))
    assert (name, content, gone) == ("0/utils.py", b"a = 10", ["0/gone.py"])
    assert mtime_ns == os.stat(notebook / "utils.py").st_mtime_ns


def test_data_environments_and_what_programs_made_stay_here(tmp_path: Path) -> None:
    for name in ("a.py", ".secret", "notebook.ipynb", "__pycache__/a.pyc", "env/pyvenv.cfg", "env/lib/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    found = look(str(tmp_path), [])
    assert list(found.files) == ["0/a.py"]
    assert found.left_out == ""


def test_large_files_stay_here_and_the_largest_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("a.bin", "weights.bin", "z.bin")):
        (tmp_path / name).write_bytes(bytes(file_sync.FILE_LIMIT_BYTES * (number % 2 + 1) + 1))
    found = look(str(tmp_path), [])
    assert not found.files
    assert found.left_out == (
        f"{tmp_path}/weights.bin (2 MB) is not on the nodes, nor is any other file over 1 MB: "
        "have the ranks read such data from where all nodes reach it."
    )


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


def test_a_folder_with_too_many_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sync, "COUNT_LIMIT", 2)
    for number in range(3):
        (tmp_path / f"{number}.py").write_text("")
    found = look(str(tmp_path), [])
    assert list(found.files) == ["0/0.py", "0/1.py"]
    assert found.left_out == (
        f"{tmp_path} has more than 2 files or 100 MB: not all of it is on the nodes; start the notebook in a folder of its own."
    )
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
    assert is_shared(there, before, after) is shared
