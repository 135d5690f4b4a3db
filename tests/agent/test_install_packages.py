"""What a notebook has and the ranks' Python lacks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.agent import install_packages
from jupyter_distrib.agent.install_packages import Refused, compare, installed
from jupyter_distrib.wire import messages as m
from tests.wheels import wheel

GB = 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jupyter_distrib" / "packages"


@pytest.fixture
def tiny(tmp_path: Path) -> m.Package:
    made = wheel(tmp_path, "tinypkg", "1.2", size_bytes=3_000_000)
    return m.Package(name="tinypkg", version="1.2", file=made.name, wheel=made.read_bytes())


def packages(mode: str, *wanted: m.Package, limit_bytes: int = GB) -> m.Packages:
    return m.Packages(mode=mode, packages=wanted, limit_bytes=limit_bytes)


def test_what_is_there_in_another_version_is_said() -> None:
    there = importlib.metadata.version("cloudpickle")
    report = compare(packages("check", m.Package(name="cloudpickle", version="0.1", requirement="cloudpickle==0.1")))
    assert (report.overlay, report.refusal) == ("", "")
    assert report.note == f"the ranks have other versions of packages: cloudpickle {there} (0.1 in the notebook)"


def test_a_build_is_not_another_version() -> None:
    there = importlib.metadata.version("torch").partition("+")[0]
    assert compare(packages("check", m.Package(name="torch", version=f"{there}+cu999"))).note == ""


def test_check_refuses_with_the_line_to_install() -> None:
    missing = m.Package(name="tinypkg", version="1.2", requirement="tinypkg==1.2")
    with pytest.raises(Refused) as raised:
        compare(packages("check", missing))
    assert str(raised.value) == (
        f"the Python of the ranks ({sys.executable}) lacks a package that the notebook has: tinypkg 1.2. Install them "
        f"there (`{sys.executable} -m pip install tinypkg==1.2`), or let --environment sync do it."
    )


@pytest.mark.slow
def test_what_is_missing_is_installed_once(
    tiny: m.Package, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(compare(packages("sync", tiny)).overlay)
    assert folder.parent == cache
    assert (folder / "tinypkg.py").exists()
    assert '"installing": "tinypkg 1.2"' in capfd.readouterr().out
    assert not list(cache.glob(".making-*"))
    monkeypatch.setattr(install_packages, "_install", None)
    assert Path(compare(packages("sync", tiny)).overlay) == folder
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_more_than_the_limit_is_refused_with_its_size(tiny: m.Package, cache: Path) -> None:
    with pytest.raises(Refused, match=r"take 3.0 MB, more than the 1.0 MB that may be installed .*--environment-limit"):
        compare(packages("sync", tiny, limit_bytes=1_000_000))
    assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.slow
def test_two_at_once_install_once(tiny: m.Package, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "wheel").write_bytes(tiny.wheel)
    code = dedent(f"""\
        import sys, pathlib
        from jupyter_distrib.agent.install_packages import installed
        from jupyter_distrib.wire.messages import Package
        wheel = pathlib.Path(sys.argv[1]).read_bytes()
        tiny = Package(name='tinypkg', version='1.2', file={tiny.file!r}, wheel=wheel)
        installed([tiny], 10**9)
    """)
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "wheel")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(bool(text) for text in said) == [False, True]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_what_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    with pytest.raises(
        Refused, match=r"the packages that the ranks lack \(nosuchpkg 1\) could not be installed beside"
    ):
        installed([m.Package(name="nosuchpkg", version="1", requirement="nosuchpkg==1")], GB)


def test_without_an_installer_it_is_refused(tiny: m.Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/opt/env/bin/python")
    with pytest.raises(Refused, match=r"^/opt/env/bin/python has neither uv nor pip"):
        installed([tiny], GB)


@pytest.mark.slow
def test_what_nobody_has_used_for_a_month_is_removed(tiny: m.Package, cache: Path) -> None:
    for name in ("unused", ".making-x", "used"):
        (cache / name).mkdir(parents=True)
    long_ago = time.time() - install_packages.KEPT_S - 60
    for name in ("unused", ".making-x"):
        os.utime(cache / name, (long_ago, long_ago))
    folder = installed([tiny], GB)
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {"used", folder.name}


@pytest.mark.parametrize("place", ["lock", "folder"])
@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling", "fifo"])
def test_what_is_in_the_way_in_the_cache_makes_room(
    tiny: m.Package, cache: Path, monkeypatch: pytest.MonkeyPatch, place: str, what: str
) -> None:
    monkeypatch.setattr(install_packages, "_install", lambda packages, target: os.mkdir(target))
    precious = Path(os.environ["XDG_CACHE_HOME"]) / "precious"
    precious.mkdir(parents=True)
    folder = installed([tiny], GB)
    path = folder if place == "folder" else cache / f"{folder.name}.lock"
    path.rmdir() if place == "folder" else path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "file":
            path.write_text("")
        case "link" | "dangling":
            path.symlink_to(precious if what == "link" else cache / "nowhere")
        case "fifo":
            os.mkfifo(path)
    assert installed([tiny], GB) == folder
    assert folder.is_dir()
    assert not folder.is_symlink()
    assert not list(precious.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("level", [0, 1])
def test_a_cache_of_somebody_else_is_refused_since_ranks_import_from_it(
    tiny: m.Package, cache: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Whoever owns a folder can put others in the place of those in it."""
    monkeypatch.setattr(install_packages, "_install", lambda packages, target: os.mkdir(target))
    theirs = [cache.parent, cache][level]
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(Refused, match=rf"{theirs} is a link.*XDG_CACHE_HOME"):
        installed([tiny], GB)
    assert os.listdir(theirs) == []
