"""Packages that are installed, upgraded or removed while notebooks are open, and what their ranks import."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook

pytestmark = pytest.mark.slow

READ = "%%distributed --ranks 2\nimport {0}\n{0}.MARK"
ASK = "from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)"


class Environment:
    """A virtual environment that has everything this one has, and packages of its own."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = str(folder / "bin" / "python")
        self.packages = next(folder.glob("lib/python*/site-packages"))
        (self.packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
        self.install("typing_extensions", "1.0")

    def install(self, name: str, version: str, *, module: str = "") -> None:
        """Install a package as pip does it: what was there is removed before. The rank's MARK is its version."""
        self.remove(name)
        spec = importlib.util.find_spec(name)
        text = Path(spec.origin).read_text() if spec and spec.origin else ""
        (self.packages / f"{name}.py").write_text(f"{text}\nMARK = {version!r}\n")
        info = self.packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}.py,,\n")

    def remove(self, name: str) -> None:
        (self.packages / f"{name}.py").unlink(missing_ok=True)
        for each in [*self.packages.glob(f"{name}-*.dist-info"), *self.packages.glob(f"__pycache__/{name}.*")]:
            shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`typing_extensions` in it, which torch imports, is the one that this interpreter has, with a mark."""
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def book(environment: Environment, tmp_path: Path) -> Iterator[Notebook]:
    environment.install("typing_extensions", "1.0")
    with Notebook(tmp_path, python=environment.python) as book:
        session = book.ok(f"%load_ext jupyter_distrib\n{ASK}")
        yield book
    leftovers_after(session.stdout.strip())


def test_an_upgrade_reaches_the_ranks_of_the_next_cell(book: Notebook, environment: Environment) -> None:
    assert book.ok(READ.format("typing_extensions")).result == "ranks 0-1: '1.0'"

    environment.install("typing_extensions", "2.0")

    assert book.ok(READ.format("typing_extensions")).result == "ranks 0-1: '2.0'"
    unchanged = dedent("""\
        %%distributed --ranks 2 --out seen
        import os
        os.getpid()""")
    book.ok(f"{unchanged}")
    assert book.ok("first = list(seen)").status == "ok"
    book.ok(unchanged)
    assert book.ok("list(seen) == first").result == "True", "warm ranks stay while nothing changes"


def test_ranks_that_keep_values_stay_and_the_head_says_so_once(book: Notebook, environment: Environment) -> None:
    environment.install("old_package", "0.1")
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --keep kept
            import typing_extensions
            kept = rank""")
    )
    environment.install("small_package", "3.1")
    environment.install("typing_extensions", "2.0")

    first = book.ok(
        dedent("""\
            %%distributed
            import typing_extensions, small_package
            typing_extensions.MARK, kept""")
    )
    assert first.result == "rank 0: ('1.0', 0)\nrank 1: ('1.0', 1)"
    assert "small_package 3.1" in first.text
    assert "typing_extensions 2.0" in first.text
    assert "--fresh" in first.text
    assert "--fresh" not in book.ok("%%distributed\nkept").text
    environment.remove("old_package")
    assert "old_package (removed)" in book.ok("%%distributed\nkept").text
    assert book.ok(READ.format("typing_extensions").replace("2", "2 --fresh", 1)).result == "ranks 0-1: '2.0'"


def test_ranks_of_another_size_and_of_a_new_kernel_are_of_now(
    book: Notebook, environment: Environment, tmp_path: Path
) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --keep kept
            import typing_extensions
            kept = rank""")
    )
    environment.install("typing_extensions", "2.0")

    assert book.ok(READ.format("typing_extensions").replace("2", "1", 1)).result == "rank 0: '2.0'"
    with Notebook(tmp_path, python=environment.python) as other:
        other.ok("%load_ext jupyter_distrib")
        assert other.ok(READ.format("typing_extensions")).result == "ranks 0-1: '2.0'"
        environment.install("typing_extensions", "3.0")
        assert other.ok(READ.format("typing_extensions")).result == "ranks 0-1: '3.0'"


def test_a_package_that_was_missing_is_there(book: Notebook, environment: Environment) -> None:
    environment.remove("small_package")
    assert book.fails(READ.format("small_package")).ename == "ModuleNotFoundError"
    environment.install("small_package", "1.0")
    assert book.ok(READ.format("small_package")).result == "ranks 0-1: '1.0'"
    environment.remove("small_package")
    assert book.fails(READ.format("small_package")).ename == "ModuleNotFoundError"


def test_files_beside_the_packages_change_nothing(book: Notebook, environment: Environment) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out first
            import os
            os.getpid()""")
    )
    (environment.packages / "of_no_package").mkdir(exist_ok=True)
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out second
            import os
            os.getpid()""")
    )
    (environment.packages / "of_no_package").rmdir()
    assert book.ok("list(first) == list(second)").result == "True"


def test_ranks_under_another_python_have_its_packages(environment: Environment, tmp_path: Path) -> None:
    environment.install("typing_extensions", "1.0")
    with Notebook(tmp_path) as book:
        book.ok(f"%load_ext jupyter_distrib\n%distributed_pool add there --kind local --python {environment.python}")
        cell = READ.format("typing_extensions").replace("2", "2 --pool there", 1)
        assert book.ok(cell).result == "ranks 0-1: '1.0'"
        environment.install("typing_extensions", "2.0")
        assert book.ok(cell).result == "ranks 0-1: '2.0'"


def test_packages_of_a_folder_that_the_notebook_puts_first_on_its_path(book: Notebook, tmp_path: Path) -> None:
    other = Environment(tmp_path / "other")
    other.install("typing_extensions", "7.0")
    assert book.ok(READ.format("typing_extensions")).result == "ranks 0-1: '1.0'"

    book.ok(f"import sys\nsys.path.insert(0, {str(other.packages)!r})")
    assert book.ok(READ.format("typing_extensions")).result == "ranks 0-1: '7.0'"
    book.ok("sys.path.pop(0)")
    assert book.ok(READ.format("typing_extensions")).result == "ranks 0-1: '1.0'"
