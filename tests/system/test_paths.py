"""Folders for sockets and logs are this user's alone."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.settings import config_files, find_files
from jupyter_distrib.pools import server_home
from jupyter_distrib.system import paths
from tests.notebook import ROOT


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert mode(paths.private(tmp_path / "a" / "b" / "c")) == 0o700
        assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)
    finally:
        os.umask(before)


def test_a_file_in_the_place_of_a_folder_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(PoolError, match=r"it is a file\. Set JUPYTER_DISTRIB_RUNTIME_DIR"):
        paths.private(tmp_path / "a")


def test_the_home_folder_is_that_of_the_present_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/x"})
    assert paths.home() == "/x"
    assert find_files.user_file() == "/x/.config/jupyter_distrib/pools.toml"


def test_an_open_folder_of_ours_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir(mode=0o755)
    folder.chmod(0o777)
    assert mode(paths.private(folder)) == 0o700


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PoolError, match="is a link or belongs to another user"):
        paths.private(tmp_path / "link")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PoolError):
        paths.private(tmp_path / "file")


@pytest.mark.parametrize("text", ["logs", "~/logs"])
def test_a_chosen_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in paths.VARIABLES:
        monkeypatch.setenv(name, text)
    assert paths.log_directory() == paths.runtime_directory() == tmp_path / "logs"
    started = server_home.Home(module="x", name="x", python="")._environment(tmp_path)
    assert {started[name] for name in paths.VARIABLES} == {str(tmp_path / "logs")}


def test_a_chosen_folder_that_others_write_to_stays_open_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2777)
    for name in paths.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / "team"))
    with pytest.raises(PoolError, match="can be written by every user: set JUPYTER_DISTRIB_RUNTIME_DIR to a folder of"):
        paths.runtime_directory()
    (ignored,) = find_files.state(str(tmp_path), os.environ, directory=str(tmp_path)).ignored
    assert ignored.startswith(f"Logs are not written to JUPYTER_DISTRIB_LOG_DIR: {tmp_path}/team can be written by")
    assert mode(tmp_path / "team") == 0o777


def test_a_chosen_folder_that_others_read_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "project").mkdir()
    folder.chmod(0o755)
    for name in paths.VARIABLES:
        monkeypatch.setenv(name, str(folder))
    own = folder / f"jupyter_distrib-{os.getuid()}"
    assert paths.log_directory() == paths.runtime_directory() == own
    assert (mode(folder), mode(own)) == (0o755, 0o700)
    assert paths.reason_against_logs() == ""
    started = server_home.Home(module="x", name="x", python="")._environment(own)
    assert {started[name] for name in paths.VARIABLES} == {str(folder)}, "what is started finds the same"
    folder.chmod(0o700)
    assert paths.runtime_directory() == own, "agents are in it"


def test_a_chosen_folder_without_others_is_used_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "own").mkdir(mode=0o700)
    for name in paths.VARIABLES:
        monkeypatch.setenv(name, str(folder))
    assert paths.log_directory() == paths.runtime_directory() == folder


def test_a_relative_folder_is_the_same_when_the_notebook_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    logs, runtime = "logs-of-this-test", "rt-of-this-test"
    monkeypatch.setenv("JUPYTER_DISTRIB_LOG_DIR", logs)
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", runtime)
    before = paths.log_directory(), paths.runtime_directory()
    monkeypatch.chdir(tmp_path / "other")
    assert (paths.log_directory(), paths.runtime_directory()) == before == (tmp_path / logs, tmp_path / runtime)
    assert paths.absolute(logs) == str(tmp_path / logs)
    assert list((tmp_path / "other").iterdir()) == []


def test_looking_at_the_settings_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for folder in (tmp_path / "new" / "logs", tmp_path / "open"):
        monkeypatch.setenv("JUPYTER_DISTRIB_LOG_DIR", str(folder))
        assert find_files.state(str(tmp_path), os.environ, directory=str(tmp_path)).ignored == ()
    assert [each.name for each in tmp_path.rglob("*")] == ["open"]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "/file cannot be made: it is a file."),
        ("file/logs", "/file/logs cannot be made: Not a directory."),
        ("link", "/link is a link or belongs to another user"),
        ("closed/logs", "/closed/logs cannot be made: {0}/closed cannot be written to."),
    ],
)
def test_a_folder_for_logs_that_cannot_be_made_is_said_before_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "closed").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "closed" and access(path, how))  # for root
    monkeypatch.setenv("JUPYTER_DISTRIB_LOG_DIR", str(tmp_path / folder))
    said = paths.reason_against_logs()
    assert said.startswith("Logs are not written to JUPYTER_DISTRIB_LOG_DIR: ")
    assert reason.format(tmp_path) in said


def test_a_temporary_folder_whose_name_has_too_many_bytes_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUPYTER_DISTRIB_RUNTIME_DIR", raising=False)
    (base := tmp_path / "\N{CJK UNIFIED IDEOGRAPH-65E5}").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", base_name := f"/tmp/{base.name * 25}")
    monkeypatch.setattr(paths, "_is_ours", lambda _: True)
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{base.name * 25}")
    assert len(base_name) < 40 <= len(os.fsencode(base_name))
    assert str(paths.runtime_directory()).startswith("/tmp/jupyter_distrib-")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(PoolError):
        paths.private(tmp_path / "theirs")


def test_variables_choose_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("JUPYTER_DISTRIB_LOG_DIR", str(tmp_path / "log"))
    assert paths.runtime_directory() == tmp_path / "run"
    assert paths.log_directory() == tmp_path / "log"
    assert mode(tmp_path / "run") == mode(tmp_path / "log") == 0o700


def test_the_defaults_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_DISTRIB_RUNTIME_DIR", "JUPYTER_DISTRIB_LOG_DIR"):
        monkeypatch.delenv(name)
    short = Path(tempfile.mkdtemp(prefix="jd"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert paths.runtime_directory() == short / "jupyter_distrib"
    assert paths.log_directory() == tmp_path / "state" / "jupyter_distrib" / "runs"
    (short / "jupyter_distrib").rmdir()
    short.rmdir()


def test_logs_have_a_folder_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("JUPYTER_DISTRIB_LOG_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert paths.log_directory() == tmp_path / "run" / "runs"
    assert paths.log_directory(otherwise=tmp_path) == tmp_path / "runs"
    with pytest.raises(PoolError, match="XDG_STATE_HOME"):
        paths.usual_log_directory()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of whom the machine knows only the number, as in a container, without `HOME`."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "JUPYTER_DISTRIB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("nobody")
def test_without_a_home_folder_the_first_one_of_all_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(paths, "private", lambda folder, variable: made.append((folder, variable)))
    paths.state_directory()
    assert made == [(Path("/.local/state/jupyter_distrib"), "XDG_STATE_HOME")]


@pytest.mark.usefixtures("nobody")
def test_without_a_home_folder_no_file_of_the_project_passes_for_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "~" / ".config" / "jupyter_distrib"
    theirs.mkdir(parents=True)
    (theirs / "pools.toml").write_text('pool = "theirs"')
    monkeypatch.chdir(tmp_path)
    assert find_files.user_file() == "/.config/jupyter_distrib/pools.toml"
    assert config_files.shown_path(tmp_path / "x.toml") == "x.toml"


def test_a_long_folder_is_not_used_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUPYTER_DISTRIB_RUNTIME_DIR")
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    chosen = paths.runtime_directory()
    assert len(str(chosen / f"agent-{'0' * 16}.sock")) <= paths.SOCKET_PATH_LIMIT


@pytest.fixture
def shared_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the temporary files of all users, with a short path; the user has no runtime folder of the system."""
    for name in ("JUPYTER_DISTRIB_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="jd", dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield Path(folder)


def take_usual(folder: Path, how: str) -> Path:
    """Have a stranger take the place of the folder for sockets, and return that place."""
    usual = folder / f"jupyter_distrib-{os.getuid()}"
    steps = {
        "folder": "os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)",
        "file": "open(sys.argv[1], 'w')",
        "link": "os.symlink('/tmp', sys.argv[1])",
        "dangling link": "os.symlink('/no/such/place', sys.argv[1])",
        "pipe": "os.mkfifo(sys.argv[1])",
    }
    become = "import os, sys; os.setgroups([]); os.setgid(12345); os.setuid(12345); "
    subprocess.run([sys.executable, "-c", become + steps[how], str(usual)], check=True)
    return usual


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("how", ["folder", "file", "link", "dangling link", "pipe"])
def test_a_stranger_who_makes_the_usual_folder_first_stops_nobody(shared_tmp: Path, how: str) -> None:
    usual = take_usual(shared_tmp, how)
    chosen = paths.runtime_directory()
    assert (chosen.parent, mode(chosen), chosen.stat().st_uid) == (shared_tmp, 0o700, os.getuid())
    assert chosen != usual
    assert len(str(chosen / f"agent-{'0' * 16}-10.sock")) <= paths.SOCKET_PATH_LIMIT
    code = "from jupyter_distrib.system import paths; print(paths.runtime_directory())"
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {other.communicate()[0].strip() for other in others} == {str(chosen)}, "all processes use the same"
    usual.rmdir() if how == "folder" else usual.unlink()
    assert paths.runtime_directory() == chosen, "agents are in it"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_after_a_reboot_the_name_that_was_used_before_helps_no_stranger(shared_tmp: Path) -> None:
    take_usual(shared_tmp, "folder")
    chosen = paths.runtime_directory()
    chosen.rmdir()
    os.mkdir(chosen)
    os.chown(chosen, 12345, 12345)
    again = paths.runtime_directory()
    assert again.stat().st_uid == os.getuid()
    assert again not in (chosen, shared_tmp / f"jupyter_distrib-{os.getuid()}")
    assert paths.runtime_directory() == again


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_each_folder_for_temporary_files_has_its_own_other_one(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs may have a TMPDIR of their own, and all have the same folder for state."""
    (shared_tmp / "two").mkdir()
    (shared_tmp / "two").chmod(0o1777)
    chosen = []
    for folder in (shared_tmp, shared_tmp / "two") * 2:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if len(chosen) < 2:
            take_usual(folder, "folder")
        chosen.append(paths.runtime_directory())
    assert chosen[0] == chosen[2] != chosen[1] == chosen[3]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("content", [b"", b"../../etc", b"\xff\x00", b"jupyter_distrib-0-xyz", b"x" * 200])
def test_a_name_that_none_of_us_has_kept_is_not_used(shared_tmp: Path, content: bytes) -> None:
    usual = take_usual(shared_tmp, "folder")
    paths.runtime_directory()
    (kept,) = paths.state_directory().glob("runtime_folder-*")
    kept.write_bytes(content)
    chosen = paths.runtime_directory()
    assert chosen.parent == shared_tmp
    assert chosen.name.startswith(f"{usual.name}-")
    assert paths.runtime_directory() == chosen


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_systems_folder_of_another_user_is_not_used(shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `sudo -E` leaves it to root."""
    theirs = shared_tmp / "run"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    assert paths.runtime_directory() == shared_tmp / f"jupyter_distrib-{os.getuid()}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root acts for another user")
def test_a_runtime_folder_that_everybody_can_write_to_is_not_used(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's own /tmp, where a container has set the variable to it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared_tmp))
    taken = shared_tmp / "jupyter_distrib"
    taken.mkdir()
    os.chown(taken, 12345, 12345)
    assert paths.runtime_directory() == shared_tmp / f"jupyter_distrib-{os.getuid()}"


def test_a_socket_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    folder = tmp_path / ("y" * 100)
    program = dedent("""\
        from jupyter_distrib.pools.server_home import Home
        from jupyter_distrib.errors import PoolError
        try:
            Home.of('').reach()
        except PoolError as error:
            print(error)""")
    env = {**os.environ, "JUPYTER_DISTRIB_RUNTIME_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "too long for a socket; set JUPYTER_DISTRIB_RUNTIME_DIR" in done.stdout


def test_a_file_of_ours_is_opened_for_this_user_alone_and_never_through_a_link(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths.opened(tmp_path / "new").close()
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o600
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with paths.opened(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_is_written_whole_and_what_killed_writers_left_goes(tmp_path: Path) -> None:
    code = dedent("""\
        import os, sys; from pathlib import Path; from jupyter_distrib.system import paths
        os.replace = Path.replace = lambda *_: os.kill(os.getpid(), 9)
        paths.write_whole(Path(sys.argv[1]), 'new')""")
    (tmp_path / "list.json").write_text("old")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "list.json")], check=False)
    assert (tmp_path / "list.json").read_text() == "old"
    (left,) = tmp_path.glob("*.unfinished")
    paths.write_whole(tmp_path / "other.json", "other")
    assert left.exists(), "its writer may be at it"
    os.utime(left, (0, 0))
    paths.write_whole(tmp_path / "other.json", "other")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"list.json": "old", "other.json": "other"}
    assert (tmp_path / "other.json").stat().st_mode & 0o777 == 0o600
