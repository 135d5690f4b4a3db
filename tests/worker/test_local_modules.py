"""Local modules are used as they are on disk now."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment.cell_environment import CellEnvironment
from jupyter_distrib.worker.environment.local_modules import LocalModules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + len(text) * 1_000_000_000))


def test_an_edited_module_is_imported_again(folder: Path) -> None:
    modules = LocalModules()
    write(folder / "helper_a.py", "value = 1")
    write(folder / "helper_b.py", "from helper_a import value\nimport textwrap")
    import helper_b  # type: ignore[import-not-found]

    modules.remember()
    assert modules.refresh() == []
    assert sys.modules["helper_b"] is helper_b, "nothing changed"
    write(folder / "helper_a.py", "value = 22")
    assert modules.refresh() == [str(folder / "helper_a.py")]
    import helper_b as again

    assert again.value == 22, "the module that imported the edited one is new as well"
    modules.remember()
    assert modules.refresh() == []


def test_a_package_is_one_unit_and_a_deleted_file_a_change(folder: Path) -> None:
    modules = LocalModules()
    write(folder / "helper_package" / "__init__.py", "")
    write(folder / "helper_package" / "part.py", "value = 1")
    import helper_package.part  # type: ignore[import-not-found]

    modules.remember()
    (folder / "helper_package" / "part.py").unlink()
    assert modules.refresh() == [str(folder / "helper_package" / "part.py")]
    assert "helper_package" not in sys.modules
    assert "helper_package.part" not in sys.modules
    del helper_package


def test_packages_of_the_users_own_stay_while_an_edited_module_is_imported_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second import of a C extension such as numpy's fails."""
    packages = folder / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    modules = LocalModules()
    write(packages / "installed_there.py", "")
    write(folder / "helper_own.py", "value = 1")
    import helper_own  # type: ignore[import-not-found]  # noqa: F401
    import installed_there  # type: ignore[import-not-found]

    modules.remember()
    write(folder / "helper_own.py", "value = 22")
    assert modules.refresh() == [str(folder / "helper_own.py")]
    assert sys.modules["installed_there"] is installed_there


def test_installed_modules_stay() -> None:
    modules = LocalModules()
    modules._baseline, modules._last, modules._looked_at = frozenset(), "", (0, "")  # as if nothing had been imported
    modules.remember()
    assert {"json", "pytest", "jupyter_distrib", "jupyter_distrib.wire.link"} <= modules._others
    assert "tests" in modules._known


@pytest.mark.parametrize("many", [1, 63, 64, 65, 1000])
def test_what_came_last_is_found_whatever_was_taken_away(folder: Path, many: int) -> None:
    modules = LocalModules()
    write(folder / "helper_a.py", "value = 1")
    import helper_a  # type: ignore[import-not-found]

    for number in range(many):
        sys.modules[f"helper_{number}"] = types.ModuleType(f"helper_{number}")
    modules.remember()
    assert list(modules._known) == ["helper_a"]
    assert len(modules._others) == many

    modules = LocalModules()
    del sys.modules[modules._last]
    write(folder / "helper_b.py", "value = 1")
    import helper_b

    modules.remember()
    assert list(modules._known) == ["helper_b"]
    del helper_a, helper_b


ORDER = m.WorkerOrder(group="", worker="", agent_pid=0, rank=0, world_size=1, local_rank=0, local_world_size=1)


@pytest.fixture
def environment(folder: Path) -> CellEnvironment:
    return CellEnvironment(ORDER, cast("Any", None))


@pytest.fixture
def script(environment: CellEnvironment) -> Callable[..., list[str]]:
    """A function that gives the local modules of which a note says that they are hidden from a script, or a cell."""
    import statistics  # noqa: F401

    import packaging  # noqa: F401

    def run(source: str, *, is_script: bool = True, **more: Any) -> list[str]:
        environment.modules.remember()
        cell = m.Cell(source=source, filename="train.py", script="train.py" if is_script else "", **more)
        return [
            text.partition(" and not ")[2].removesuffix(": give that another name")
            for text in environment.hidden_modules(cell)
        ]

    return run


def test_a_local_module_that_a_loaded_library_hides_is_found(
    folder: Path, script: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("statistics.py", "pytest.py", "mine.py", "os.py"):
        (folder / name).write_text("")
    (folder / "packaging").mkdir()
    (folder / "packaging" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", ["", "/missing", *sys.path])
    source = "import statistics, packaging.version\nimport pytest as p, mine, os, json"

    assert {"packaging", "pytest"} <= sys.modules.keys()
    assert sorted(script(source, is_script=False)) == [f"{folder}/packaging", f"{folder}/pytest.py"]
    assert sorted(script(source)) == [f"{folder}/packaging", f"{folder}/pytest.py", f"{folder}/statistics.py"]


@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        ("import statistics", True),
        ("import math as m, statistics as s  # both", True),
        ("from statistics import (\n    mean,\n)", True),
        ("def mean(x):\n    from statistics import mean\n    return mean(x)", True),
        ("try: import statistics\nexcept ImportError: pass", True),
        ("x = 1; import statistics; y = 2", True),
        ("statistics = {}", False),
        ("import math\nbiostatistics = math.pi", False),
        ("import statistics_of_mine", False),
        ("from mine import statistics", False),
        ("from .statistics import mean", False),
        ("from . import statistics", False),
        ("text = '''\nimport ...\nimport .statistics, and\n'''", False),
        ("pass  # TODO: import statistics", False),
        ("print('missing: import statistics')", False),
        ("def f():\n    '''Read and\n    import statistics of a run.'''", False),
    ],
)
def test_only_a_module_that_is_imported_is_told(
    source: str, is_told: bool, folder: Path, script: Callable[..., list[str]]
) -> None:
    told = [str(folder / "statistics.py")] if is_told else []
    (folder / "statistics.py").write_text("")
    assert script(source) == told
    assert script("", sources={"Cell In[1]": source}) == told


def test_an_import_in_a_local_module_counts_while_it_is_there(
    folder: Path, environment: CellEnvironment, script: Callable[..., list[str]]
) -> None:
    (folder / "statistics.py").write_text("")
    write(folder / "helper_c.py", "def mean(x):\n    import statistics\n")
    assert script("import helper_c") == []
    importlib.import_module("helper_c")
    assert script("import helper_c") == [str(folder / "statistics.py")]
    write(folder / "helper_c.py", "statistics = 1\n")
    environment.modules.refresh()
    importlib.import_module("helper_c")
    assert script("import helper_c") == []


def test_no_folder_is_listed(folder: Path, script: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of 200,000 files takes seconds."""
    (folder / "statistics.py").write_text("")

    def refuse(path: object = ".") -> NoReturn:
        raise AssertionError(path)

    for function in ("listdir", "scandir"):
        monkeypatch.setattr(os, function, refuse)
    assert script("import statistics") == [str(folder / "statistics.py")]


@pytest.mark.parametrize("entry", [None, b"/lib", ["/lib"], Path("/lib")], ids=repr)
def test_an_entry_of_the_path_that_is_no_string_is_ignored(
    entry: object, folder: Path, script: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "statistics.py").write_text("")
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    assert script("import statistics") == [str(folder / "statistics.py")]
