"""A notebook whose environment has a package that the Python of its ranks lacks: `--environment`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.kernel.session import cell_order
from jupyter_distrib.kernel.session.cell_order import ProcessState
from tests.notebook import Notebook
from tests.wheels import environment, install, wheel

pytestmark = pytest.mark.slow

IMPORT = "import tinypkg\ntinypkg.version"
OTHER = f"--kind local --ranks 1 --strategy none --python {sys.executable}"
HOSTS = f"--kind command --hosts a,b --nodes 2 --ranks 2 --start 'env HOST={{host}} {{python}}' --python {sys.executable} --interface lo"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def packages(home: Path) -> Path:
    """The folder of the notebook's packages, in which tinypkg is."""
    _, packages = environment(home / "env")
    install(wheel(home, "tinypkg", "1.2"), packages)
    return packages


@pytest.fixture(scope="module")
def book(home: Path, packages: Path) -> Iterator[Notebook]:
    (home / "work").mkdir()
    env = {"XDG_CACHE_HOME": str(home / "cache")}
    with Notebook(home / "work", env, python=str(home / "env" / "bin" / "python")) as one:
        one.ok("%load_ext jupyter_distrib")
        one.ok(f"%distributed_pool add other {OTHER}")
        one.ok(f"%distributed_pool add hosts {HOSTS}")
        yield one


def test_an_import_that_fails_says_what_the_notebook_has(book: Notebook) -> None:
    book.ok("import tinypkg")
    outcome = book.cell(f"%%distributed --pool other\n{IMPORT}")
    assert outcome.ename == "ModuleNotFoundError"
    assert (
        f"The notebook has tinypkg 1.2, and the Python of this rank ({sys.executable}) has none: run "
        f"`{sys.executable} -m pip install FILE` there, or have missing packages installed by --environment sync."
    ) in outcome.text


def test_check_refuses_the_ranks_with_the_list(book: Notebook) -> None:
    outcome = book.cell(f"%%distributed --pool other --environment check\n{IMPORT}")
    assert outcome.ename == "PoolError"
    assert "notebook has: tinypkg 1.2." in outcome.text


def test_sync_installs_what_is_missing_and_says_so(book: Notebook, home: Path) -> None:
    outcome = book.ok(f"%%distributed --pool other --environment sync\n{IMPORT}")
    assert outcome.result == "rank 0: '1.2'"
    assert "Waiting: packages that the ranks lack are being installed: tinypkg 1.2" in outcome.text
    [folder] = [path for path in (home / "cache/jupyter_distrib/packages").iterdir() if path.is_dir()]
    cell = dedent("""\
        %%distributed --pool other --environment sync
        import tinypkg
        tinypkg.__file__""")
    assert book.ok(cell).result == f"rank 0: '{folder}/tinypkg.py'"


def test_hosts_get_it_too_and_what_is_installed_later(book: Notebook, packages: Path, home: Path) -> None:
    book.ok(f"%%distributed --pool other --environment sync\n{IMPORT}")
    outcome = book.ok(f"%%distributed --pool hosts --environment sync\n{IMPORT}")
    assert outcome.result == "ranks 0-1: '1.2'"
    assert "being installed" not in outcome.text
    cell = dedent("""\
        %%distributed --pool hosts --environment sync
        import os, tinypkg
        os.getpid()""")
    warm = book.ok(cell).result
    cell = dedent("""\
        %%distributed --pool hosts --environment sync
        import os
        os.getpid()""")
    assert book.ok(cell).result == warm

    install(wheel(home, "laterpkg", "3.0"), packages)
    outcome = book.ok(
        dedent("""\
            %%distributed --pool hosts --environment sync
            import laterpkg, tinypkg
            laterpkg.version""")
    )
    assert outcome.result == "ranks 0-1: '3.0'"
    assert "being installed: laterpkg 3.0, tinypkg 1.2" in outcome.text


def test_a_limit_refuses_with_the_size(book: Notebook, packages: Path, home: Path) -> None:
    install(wheel(home, "bigpkg", "1.0", size_bytes=2_000_000), packages)
    line = "--pool other --environment sync --environment-limit 1MB"
    outcome = book.cell(f"%%distributed {line}\npass")
    assert outcome.ename == "PoolError"
    assert "the packages that the ranks lack take 2.0 MB, more than the 1.0 MB that may be installed" in outcome.text
    assert (
        "--environment-limit must be a size" in book.cell("%%distributed --pool other --environment-limit x\npass").text
    )


def test_a_word_that_is_none(book: Notebook) -> None:
    outcome = book.cell("%%distributed --pool other --environment some\npass")
    assert "--environment must be one of off, check, sync; got 'some'" in outcome.text


def test_other_machines_get_what_the_notebook_has_set_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    at_start = {
        "HF_TOKEN": "secret",
        "PATHS": "old",
        "NCCL_DEBUG": "INFO",
        "GLOO_X": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
    }
    now = {**at_start, "PATHS": "new", "OWN": "1", "RAY_AUTH_TOKEN": "secret"}
    monkeypatch.setattr(cell_order, "_at_start", lambda: at_start)
    monkeypatch.setattr(cell_order.process_environment, "variables", lambda: now)
    process_state = ProcessState.now()
    assert process_state.env(remote=False) == now
    assert process_state.env(remote=True).keys() == now.keys() - {"HF_TOKEN", "RAY_AUTH_TOKEN"}
