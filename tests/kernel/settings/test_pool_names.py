"""Pools by name, in real kernels: from a file, from the notebook, several at once, with another interpreter."""

from __future__ import annotations

import os
import re
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.installed_package import bring
from tests.notebook import ROOT, Notebook

FILE = """
pool = "two"

[pools.two]
kind = "local"
ranks = 2
strategy = "ddp"

[pools.one]
kind = "local"
ranks = 1
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook's folder, with what its project says about pools."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "jupyter_distrib.toml").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def kernel(home: Path) -> Iterator[Notebook]:
    with Notebook(home) as book:
        book.ok("%load_ext jupyter_distrib")
        yield book


@pytest.fixture
def book(kernel: Notebook, home: Path) -> Iterator[Notebook]:
    yield kernel
    (home / "jupyter_distrib.toml").write_text(FILE)
    kernel.forget()


def rows(book: Notebook) -> dict[str, list[str]]:
    lines = book.ok("%distributed_pool").result.splitlines()[1:]
    return {cells[0]: cells for cells in (re.split(r" {2,}", line) for line in lines)}


def test_a_cell_uses_the_default_pool_of_the_file(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed
            import torch.distributed as dist
            print('here')
            (world_size, dist.is_initialized())""")
    )
    assert outcome.result == "ranks 0-1: (2, True)"
    assert "pool two from jupyter_distrib.toml, strategy ddp from jupyter_distrib.toml" in outcome.view.replace(
        "pool two and strategy ddp from", "pool two from jupyter_distrib.toml, strategy ddp from"
    )


def test_pools_are_up_side_by_side(book: Notebook) -> None:
    book.ok("%%distributed --pool two --keep a\na = rank")
    book.ok("%%distributed --pool one --keep b\nb = rank * 2")
    assert book.ok("%%distributed --pool two\na + world_size").result == "rank 0: 2\nrank 1: 3"
    assert book.ok("%%distributed --pool one\nb + world_size").result == "rank 0: 1"
    found = rows(book)
    assert found["two"][1:] == ["local", "yes", "2 CPU", "a", "jupyter_distrib.toml"]
    assert found["one"][1:] == ["local", "1 CPU", "b", "jupyter_distrib.toml"]
    assert "`a` is not kept on the one pool" in book.fails("%%distributed --pool one\na").traceback
    status = book.ok("%distributed_status").result
    assert {"two", "one"} <= {line.split()[-1] for line in status.splitlines() if " idle " in line}
    book.ok("%distributed_pool stop one")
    assert "none up" in rows(book)["one"]
    assert "2 CPU" in rows(book)["two"]


def test_a_pool_of_the_notebook_is_added_used_and_removed(book: Notebook) -> None:
    book.ok("%distributed_pool add four --kind local --ranks 4 --strategy none")
    book.ok("%distributed_pool add four --kind local --ranks 4 --strategy none")
    book.ok("%distributed_pool use four")
    assert rows(book)["four"][1:] == ["local", "yes", "none up", "this notebook"]
    assert book.ok("%%distributed\nworld_size").result == "ranks 0-3: 4"
    assert book.ok("%%distributed --ranks 1\nworld_size").result == "rank 0: 1"
    book.ok("%distributed_pool remove four")
    assert "four" not in rows(book)
    assert book.ok("%%distributed\nworld_size").result == "ranks 0-1: 2", "what was in use before"
    assert "two comes from jupyter_distrib.toml" in book.fails("%distributed_pool remove two").traceback
    assert "pool four is not known" in book.fails("%distributed_pool use four").traceback


def test_a_broken_file_is_one_sentence_and_the_next_cell_works(book: Notebook, home: Path) -> None:
    (home / "jupyter_distrib.toml").write_text('pool = "two"\n[pools.two]\nkind = "local"\nrank = 2\n')
    for line in ("%%distributed\n1", "%distributed_pool start"):
        assert book.fails(line).traceback == (
            "OptionsError: jupyter_distrib.toml, line 4: unknown option rank: did you mean ranks?"
        )
    (home / "jupyter_distrib.toml").write_text(FILE)
    assert book.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"


def test_a_cell_can_wait_for_the_one_before(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --detach --out run
            import time
            time.sleep(0.5)
            'first'""")
    )
    book.ok("%%distributed --ranks 2\nrank;")  # a detached run has ranks of its own
    assert book.ok("run.result()").result == "ranks 0-1: 'first'"


@pytest.mark.slow
def test_a_gpu_type_that_is_not_there_is_refused(book: Notebook) -> None:
    if book.ok("import torch\ntorch.cuda.is_available()").result == "True":
        pytest.skip("there are GPUs")
    refused = book.fails("%%distributed --gpu-type A10\nrank").traceback
    assert refused == (
        "PoolError: --gpu-type A10, but this machine has no GPU at all; leave it out, or use another pool."
    )
    assert book.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"


# ---------------------------------------------------------------------------------------------------- interpreters


def environment(folder: Path, *, libraries: bool, torch: str = "") -> Path:
    """Another interpreter: with this one's libraries or without, and perhaps with a torch that says another version."""
    venv.create(folder, symlinks=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    if libraries:
        (packages / "more.pth").write_text(sysconfig.get_paths()["purelib"])
    if torch:
        (packages / f"torch-{torch}.dist-info").mkdir()
        (packages / f"torch-{torch}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_pool_has_an_interpreter_of_its_own(book: Notebook, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", libraries=True)
    (python.parent.parent / "lib").glob("python*")
    book.ok(f"%distributed_pool add other --kind local --ranks 2 --strategy none --python {python}")
    outcome = book.ok(
        dedent("""\
            %%distributed --pool other
            import os, sys, torch
            (sys.prefix, torch.ones(2).sum().item())""")
    )
    assert outcome.result == f"ranks 0-1: ({str(python.parent.parent)!r}, 2.0)"
    cell = dedent("""\
        %%distributed --pool two
        import sys
        sys.prefix""")
    assert book.ok(cell).result != outcome.result
    book.ok("%distributed_pool remove other")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("libraries", "torch", "says"),
    [
        (False, "", "the Python of the other pool has no torch: install torch"),
        (True, "1.13.1", "the other pool has torch 1.13.1, which cannot exchange values: use torch"),
    ],
)
def test_an_interpreter_that_does_not_fit_is_one_sentence(
    book: Notebook, tmp_path: Path, libraries: bool, torch: str, says: str
) -> None:
    python = environment(tmp_path / "env", libraries=libraries, torch=torch)
    book.ok(f"%distributed_pool add other --kind local --ranks 2 --python {python}")
    try:
        refused = book.fails("%%distributed --pool other\nrank").traceback
        assert says in refused
        assert refused.count("\n") == 0
    finally:
        book.ok("%distributed_pool remove other")
    assert book.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"


def test_an_interpreter_that_is_not_there_is_one_sentence(book: Notebook, tmp_path: Path) -> None:
    refused = book.fails(f"%%distributed --pool local --python {tmp_path}/nowhere\nrank").traceback
    assert refused == (
        f"PoolError: there is no interpreter at {tmp_path}/nowhere: give --python the interpreter of an environment with torch."
    )


# ---------------------------------------------------------------------------------------------------- a folder from elsewhere


def evil_folder(folder: Path) -> tuple[Path, Path]:
    """Return a project whose file names a program, and the file that this program would leave behind."""
    program, trace = folder / "evil", folder / "it_has_run"
    program.write_text(f"#!/bin/sh\ntouch {trace}\nexit 1\n")
    program.chmod(0o755)
    (folder / "jupyter_distrib.toml").write_text('pool = "lab"\n[pools.lab]\nkind = "local"\npython = "./evil"\n')
    return program, trace


def test_a_program_that_only_a_projects_file_names_is_not_run(tmp_path: Path) -> None:
    _, trace = evil_folder(tmp_path)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        cell = book.ok("%%distributed --ranks 2\nrank")
        assert cell.result == "rank 0: 0\nrank 1: 1", "on the user's own pool"
        assert cell.stdout.strip() == (
            "jupyter_distrib.toml is not trusted, so this is not taken from it: pool = 'lab'. "
            "If you trust this file, run %distributed_pool trust."
        )
        assert not book.ok("%%distributed --ranks 2\nrank;").stdout, "told once"
        for cell_text in (
            "%%distributed --pool lab\nrank",
            "%distributed_pool start lab",
            "%distributed_pool use lab\n",
        ):
            if cell_text.startswith("%distributed_pool use"):
                book.ok(cell_text)
                cell_text = "%%distributed\nrank"
            refused = book.fails(cell_text).traceback
            assert refused.startswith("PoolError: the pool lab is not used yet: jupyter_distrib.toml sets python")
            assert refused.endswith("run %distributed_pool trust lab.")
        assert "not taken from it: pool = 'lab'" in book.ok("%distributed_status --doctor").result
        assert "lab" in book.ok("%distributed_pool").result
        assert not trace.exists()


def test_a_projects_file_does_not_start_the_users_own_remote_pool(tmp_path: Path) -> None:
    own, trace = tmp_path / "pools.toml", tmp_path / "it_has_run"
    start = f"touch {trace}; exit 1; {{python}} {{host}}"
    own.write_text(f'[pools.costly]\nkind = "command"\nhosts = "a"\nstart = "sh -c \'{start}\'"\n')
    (tmp_path / "jupyter_distrib.toml").write_text(
        'pool = "costly"\nremote = "costly"\n[pools.s]\nkind = "slurm"\nranks = 64\nnodes = 8\n'
    )
    with Notebook(tmp_path, env={"JUPYTER_DISTRIB_CONFIG": str(own)}) as book:
        book.ok("%load_ext jupyter_distrib")
        cell = book.ok("%%distributed --ranks 1\nrank")
        assert cell.result == "rank 0: 0"
        assert "pool = 'costly', remote = 'costly'" in cell.stdout
        assert "sets kind = slurm and ranks = 64 and nodes = 8" in book.fails("%%distributed --pool s\n1").traceback
        assert not trace.exists()
        book.fails("%%distributed --pool costly\nrank")
        assert trace.exists(), "the user's own pool is the user's to name"


@pytest.mark.slow
def test_trust_is_asked_once_and_holds_in_the_next_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    _, trace = evil_folder(tmp_path)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        told = book.ok("%distributed_pool trust").stdout
        assert told.startswith(
            "jupyter_distrib.toml is trusted until it changes: pool = 'lab', [pools.lab] with python"
        )
        assert "Nothing here waits" in book.ok("%distributed_pool trust lab").stdout
        book.fails("%%distributed\nrank")
        assert trace.exists()
        trace.unlink()
        book.restart()
        book.ok("%load_ext jupyter_distrib")
        assert "not used yet" not in book.fails("%%distributed\nrank").traceback
        assert trace.exists()
        trace.unlink()
        (tmp_path / "jupyter_distrib.toml").write_text((tmp_path / "jupyter_distrib.toml").read_text() + "ranks = 2\n")
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"
        assert not trace.exists(), "another content is another file"


@pytest.mark.slow
@pytest.mark.parametrize("first", [None, "", ".", "..{sep}folder"])
def test_packages_that_lie_in_the_notebooks_folder_bring_no_code(tmp_path: Path, first: str | None) -> None:
    """A folder from elsewhere with a distribution in it. Python's path has the folder, and begins with it if PYTHONPATH
    begins with an empty or relative part."""
    home, trace = tmp_path / "folder", tmp_path / "it_has_run"
    home.mkdir()
    (home / "brought.py").write_text(f"open({str(trace)!r}, 'w')\n")
    (home / "brought-1.0.dist-info").mkdir()
    (home / "brought-1.0.dist-info" / "METADATA").write_text("Name: brought\nVersion: 1.0\n")
    groups = ("pools", "strategies", "observers", "trackers")
    points = "\n".join(f"[jupyter_distrib.{group}]\nbrought = brought:brought" for group in groups)
    (home / "brought-1.0.dist-info" / "entry_points.txt").write_text(points)
    env = {} if first is None else {"PYTHONPATH": f"{first.format(sep=os.sep)}{os.pathsep}{ROOT}"}
    with Notebook(home, env) as book:
        assert (
            book.ok("import importlib.metadata as m\nlen(m.entry_points(group='jupyter_distrib.pools'))").result != "0"
        )
        book.ok("%load_ext jupyter_distrib")
        book.ok("%%distributed --ranks 1\nrank")
        book.ok("%distributed_pool")
        assert not trace.exists()


def test_a_package_in_the_notebooks_folder_does_not_replace_an_installed_strategy(tmp_path: Path) -> None:
    home, installed, trace = tmp_path / "home", tmp_path / "installed", tmp_path / "it_has_run"
    points = "[jupyter_distrib.strategies]\nmine = {module}:Mine\n"
    honest = dedent("""\
        from jupyter_distrib.extend import Strategy
        class Mine(Strategy):
            pass
    """)
    home.mkdir(), installed.mkdir()
    env = bring(installed, points.format(module="honest"), honest=honest)
    bring(home, points.format(module="planted"), planted=f"open({str(trace)!r}, 'w')\n{honest}")
    with Notebook(home, {"PYTHONPATH": f".{os.pathsep}{env['PYTHONPATH']}"}) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.ok("%%distributed --ranks 2 --strategy mine\nrank").result == "rank 0: 0\nrank 1: 1"
    assert not trace.exists()
