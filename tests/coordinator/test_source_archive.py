"""This package as one file, for nodes that do not have it."""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import io
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.pools.command.connect import BROUGHT
from jupyter_distrib.pools.ray import cluster
from jupyter_distrib.wire import messages as m


def look(rank: int, line: int, *, waits_s: float = 0.0) -> m.RankSighting:
    """Of a rank that has called the first all_reduce if it waits, and else computes."""
    group = m.GroupSighting(
        name="0", ranks=(0, 1, 2, 3), entered=int(waits_s > 0), number=int(waits_s > 0), op="all_reduce"
    )
    call = "all_reduce" if waits_s else ""
    seen = m.ProbeAnswer(
        run="r", rank=rank, line=line, function="", call=call, unmoved_s=waits_s, idle_s=waits_s, groups=(group,)
    )
    return m.RankSighting(rank=rank, state="running", pid=100 + rank, seen=seen)


@pytest.mark.parametrize("relative", [False, True])
def test_the_package_knows_its_own_files_and_frames_where_it_was_compiled_elsewhere(
    tmp_path: Path, relative: bool
) -> None:
    root = Path(cluster.__file__).parents[2]
    there = tmp_path / "there" / root.name
    shutil.copytree(root, there, ignore=shutil.ignore_patterns("__pycache__", "static"))
    compiled_as = Path(root.name) if relative else there  # as `python -m compileall jupyter_distrib` does
    compileall.compile_dir(there, quiet=2, ddir=str(compiled_as))
    pack = dedent("""\
        import pathlib, sys
        from jupyter_distrib.coordinator import source_archive as package
        pathlib.Path(sys.argv[1]).write_bytes(package.archive())""")
    archive = tmp_path / "source.zip"
    subprocess.run([sys.executable, "-c", pack, archive], cwd=there.parent, check=True)
    shutil.rmtree(there)
    look = dedent("""\
        import sys
        sys.path.insert(0, sys.argv[1])
        from jupyter_distrib.serialization import payload
        from jupyter_distrib.worker import failure
        from jupyter_distrib.system import file_owner, process_environment
        code, file = process_environment.variables.__code__.co_filename, process_environment.__file__
        print(code, file_owner.is_users(code), file)
        print(file_owner.is_users(file), file_owner.is_library(file))
        try:
            payload.from_parcel(None, None)
        except AttributeError as error:
            print([frame.filename for frame in failure.frames_of(error.__traceback__)])""")
    done = subprocess.run([sys.executable, "-c", look, archive], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{compiled_as / 'system/process_environment.py'} False {archive}/{root.name}/system/process_environment.pyc",
        "False True",
        "['<string>']",
    ]


def test_compiled_code_travels_unless_its_source_has_changed(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "module.py", tmp_path / "there" / "module.py"
    for path in (here, there):
        path.parent.mkdir()
    here.write_text("x = 'here'\n")
    assert source_archive.compiled(here) == b"", "there is none yet"
    py_compile.compile(str(here))
    there.write_text("x = 'compiled there'\n")
    cached = Path(importlib.util.cache_from_source(str(there)))
    cached.parent.mkdir()
    cached.write_bytes(source_archive.compiled(here))
    code = "import module; print(module.x)"
    done = subprocess.run([sys.executable, "-c", code], cwd=there.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "here\n"

    os.utime(here, (0, 0))
    assert source_archive.compiled(here) == b""


def test_what_is_compiled_goes_without_its_sources_to_the_same_python(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("one.py", "other.py")}
    for path in files.values():
        path.write_text("x = 1")

    def names(*, any_python: bool) -> list[str]:
        with zipfile.ZipFile(io.BytesIO(), "w") as file:
            source_archive._add(file, files, any_python=any_python)
            return file.namelist()

    py_compile.compile(str(files["one.py"]))
    assert names(any_python=False) == ["one.py", "other.py"], "one is not compiled"
    py_compile.compile(str(files["other.py"]))
    assert names(any_python=False) == ["one.pyc", "other.pyc"]
    assert names(any_python=True) == ["one.py", "other.py", "one.pyc", "other.pyc"]


@pytest.mark.parametrize("any_python", [True, False])
def test_packages_that_go_along_are_imported_from_the_file_and_their_versions_known(
    tmp_path: Path, any_python: bool
) -> None:
    """Without site-packages: there may be none of them on a host."""
    (tmp_path / "source.zip").write_bytes(source_archive.archive(BROUGHT, any_python=any_python))
    program = dedent(f"""\
        import sys; sys.path.insert(0, {str(tmp_path / "source.zip")!r})
        import cloudpickle, importlib.metadata, pynvml, threadpoolctl, jupyter_distrib.coordinator.relay
        print(cloudpickle.__file__, importlib.metadata.version('cloudpickle'))""")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    path, version = done.stdout.split()
    assert path.startswith(str(tmp_path))
    assert version == importlib.metadata.version("cloudpickle")
