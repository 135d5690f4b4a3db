"""Local modules are used as they are on disk now."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

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
