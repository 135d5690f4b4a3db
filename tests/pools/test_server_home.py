"""Files and folders in the way of an agent that is to be started, and the packages that it finds first."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools import server_home
from jupyter_distrib.pools.server_home import Home
from jupyter_distrib.system import paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets; an agent in it is a socket alone."""
    listeners: list[socket.socket] = []

    def start(path: str, log: IO[bytes], *_: object, **__: object) -> SimpleNamespace:
        log.write(b"started")
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(path)
        listeners[-1].listen()
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(server_home, "exec_agent", start)
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    yield tmp_path / "run"
    for listener in listeners:
        listener.close()


def test_compiled_files_that_only_another_user_can_read_stop_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python makes the folders of such files with the umask of whoever imports first, and agents have a private one."""
    scandir = os.scandir

    def refused(folder: str) -> Any:
        if os.path.basename(folder) == "__pycache__":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    assert server_home.fingerprint()


@pytest.mark.parametrize("kind", ["sock", "lock", "log"])
@pytest.mark.parametrize("what", ["folder", "link", "dangling", "fifo", "other"])
def test_what_is_in_the_place_of_a_file_of_the_agent_makes_room(folder: Path, kind: str, what: str) -> None:
    precious, path = folder.parent / "precious", folder / f"agent-x.{kind}"
    precious.write_text("text")
    match what:
        case "folder":
            path.mkdir()
            (path / "inside").write_text("text")
        case "link" | "dangling":
            path.symlink_to(precious if what == "link" else folder / "nowhere")
        case "fifo":
            os.mkfifo(path)
        case "other":
            path.write_text("")
            os.chown(path, 12345, -1)
    with Home(name="agent-x").reach():
        assert precious.read_text() == "text"
        assert {
            each: stat.S_IFMT((folder / f"agent-x.{each}").lstat().st_mode) for each in ("sock", "lock", "log")
        } == {
            "sock": stat.S_IFSOCK,
            "lock": stat.S_IFREG,
            "log": stat.S_IFREG,
        }
    assert [each.read_text() for each in folder.glob("*in_the_way*/inside")] == ["text"] * (what == "folder")


def test_the_socket_of_another_user_is_not_connected_to(folder: Path) -> None:
    path = folder / "agent-x.sock"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        os.chown(path, 12345, -1)
        assert server_home.connected(path) is None
        os.chown(path, os.getuid(), -1)
        with server_home.connected(path) or pytest.fail("it is the user's own now"):
            (folder / "link").symlink_to(path)
            assert server_home.connected(folder / "link") is None


def test_what_cannot_make_room_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "agent-x.lock"

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(paths, "clear", refuse)
    with pytest.raises(PoolError, match=f": {path} is in the way"):
        Home(name="agent-x").reach()


def test_too_many_processes_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(server_home, "exec_agent", refuse)
    with pytest.raises(PoolError, match=r"^the agent could not be started: this user may not start more processes"):
        Home(name="agent-x").reach()


def test_an_interpreter_that_was_deleted_since_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path))
    python = str(tmp_path / "venv" / "bin" / "python")
    with pytest.raises(PoolError, match=f"^there is no interpreter at {python} any more"):
        Home(name="agent-x", python=python).reach()


def test_packages_of_a_lower_layer_do_not_come_before_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this package is installed in a base environment, with another torch beside it."""
    lower = tmp_path / "base" / "site-packages"
    (lower / "jupyter_distrib" / "pools").mkdir(parents=True)
    (lower / "torch").mkdir()
    monkeypatch.setattr(server_home, "__file__", str(lower / "jupyter_distrib" / "pools" / "server_home.py"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "venv" / "site-packages"), str(lower)])
    run = tmp_path / "run"
    run.mkdir(mode=0o700)

    first = Path(Home(name="agent-x")._environment(run)["PYTHONPATH"].split(os.pathsep)[0])

    assert [each.name for each in first.iterdir()] == ["jupyter_distrib"]
    assert (first / "jupyter_distrib").resolve() == lower / "jupyter_distrib"
    monkeypatch.setattr(sys, "path", [str(lower), str(tmp_path / "other" / "site-packages")])
    assert Home(name="agent-x")._environment(run)["PYTHONPATH"].split(os.pathsep)[0] == str(lower)


@pytest.mark.parametrize("what", ["PROTOCOL", "_sources", "torch"])
def test_another_version_has_an_agent_of_its_own(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server_home.fingerprint()
    match what:
        case "PROTOCOL":
            monkeypatch.setattr(server_home.m, what, "another")
        case "_sources":
            monkeypatch.setattr(server_home, what, lambda: ["session.py:1:2"])
        case _:
            monkeypatch.setattr(server_home.process_environment, "version", lambda name: f"{name} 99")
    assert server_home.fingerprint() != before


def with_flags(monkeypatch: pytest.MonkeyPatch, **flags: int) -> None:
    """Have this process look as if it had been started with these flags."""
    names = [name for name in dir(sys.flags) if not name.startswith(("_", "n_")) and name not in ("count", "index")]
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**{name: getattr(sys.flags, name) for name in names} | flags))


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("optimize", "PYTHONOPTIMIZE"),
        ("utf8_mode", "PYTHONUTF8"),
        ("no_user_site", "PYTHONNOUSERSITE"),
        ("dev_mode", "PYTHONDEVMODE"),
    ],
)
def test_ranks_have_the_flags_of_the_notebooks_interpreter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flag: str, name: str
) -> None:
    """Otherwise `assert` would count on ranks alone, or they would import the torch of another folder."""
    monkeypatch.delenv(name, raising=False)
    without = server_home.fingerprint()
    assert name not in Home(name="agent-x")._environment(folder)
    with_flags(monkeypatch, **{flag: 1})
    assert Home(name="agent-x")._environment(folder)[name] == "1"
    assert server_home.fingerprint() != without


def test_variables_that_the_notebooks_interpreter_ignores_count_on_no_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/other/packages")
    monkeypatch.setenv("OTHER", "1")
    assert "/other/packages" in Home(name="agent-x")._environment(folder)["PYTHONPATH"]
    with_flags(monkeypatch, ignore_environment=1)
    environment = Home(name="agent-x")._environment(folder)
    assert "/other/packages" not in environment["PYTHONPATH"]
    assert environment["OTHER"] == "1"
