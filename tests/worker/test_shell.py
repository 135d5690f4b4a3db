"""The shell that `get_ipython()` gives on a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jupyter_distrib.worker.environment import shell
from tests.processes import is_alive, wait_until_gone


def test_commands_run_and_leave_their_status(capfd: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"rank": 3, "name": "x y"}
    here = shell.RankShell(namespace)
    here.system("echo hello $rank {rank + 1} ${HOME:+home}; exit 3")
    assert capfd.readouterr().out == "hello 3 4 home\n"
    assert namespace["_exit_code"] == 3
    assert here.getoutput("printf 'a\\nb'; echo c >&2") == ["a", "bc"]
    assert here.getoutput("echo {name}", split=False) == "x y\n"


def test_a_command_prints_into_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    shell.RankShell({}).system("test -t 1 && stty size <&1; echo told >&2; printf '\\ta\\n'; seq 200000")
    told = capfd.readouterr()
    assert told.out == "24 80\n\ta\n" + "".join(f"{number}\n" for number in range(1, 200_001))
    assert told.err == "told\n"


def test_a_command_runs_where_there_are_no_terminals(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise FileNotFoundError("/dev/ptmx")

    monkeypatch.setattr(os, "openpty", refuse)
    here = shell.RankShell({})
    here.system("test -t 1 || echo none; exit 4")
    assert capfd.readouterr().out == "none\n"
    assert here.user_ns["_exit_code"] == 4


@pytest.mark.parametrize("method", ["system", "getoutput"])
@pytest.mark.parametrize(
    ("command", "stays"),
    [
        ("echo $$ > {0}; sleep 100 & echo $! > {1}; sleep 100; echo", True),
        ("echo $$ > {0}; sh -c 'echo $$ > {1}; sleep 100; :' | cat; echo", False),
        ("trap '' INT; echo $$ > {0}; sh -c 'echo $$ > {1}; sleep 100; :'; echo", False),
    ],
    ids=["background", "pipeline", "ignores interrupts"],
)
def test_an_interrupt_reaches_all_that_a_command_has_started(
    command: str, stays: bool, method: str, tmp_path: Path
) -> None:
    """As in a terminal: what runs in the background goes on."""
    own, started = tmp_path / "own", tmp_path / "started"

    def interrupt() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    waits = threading.Thread(target=interrupt)
    waits.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(shell.RankShell({}), method)(command.format(own, started))
    waits.join()
    pids = [int(own.read_text()), int(started.read_text())]
    try:
        if stays:
            assert is_alive(pids.pop())
        assert wait_until_gone(pids) == []
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(started.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("in_background", ["sleep 100", "yes"])
def test_a_command_is_not_waited_for_in_the_background(
    in_background: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = shell.RankShell({})
    here.system(f"echo before; {in_background} & echo $! > {tmp_path / 'pid'}; exit 5")
    pid = int((tmp_path / "pid").read_text())
    try:
        assert here.user_ns["_exit_code"] == 5
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []
    assert capfd.readouterr().out.startswith("before\n")


@pytest.mark.parametrize(
    ("command", "expanded"),
    [
        ("$rank", "3"),
        ("$rank.txt", "3.txt"),
        ("$PATH $rank", "$PATH 3"),
        ("$", "$"),
        ("{rank:03d}", "{rank:03d}"),
        ("{rank}{rank}", "33"),
        ("awk '{print $1}'", "awk '{print $1}'"),
        ("{", "{"),
        ("}{rank", "}{rank"),
        ("$ranks", "$ranks"),
    ],
)
def test_names_are_put_into_commands(command: str, expanded: str) -> None:
    assert shell.RankShell({"rank": 3})._expand(command) == expanded


def test_line_magics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    here = shell.RankShell({"sub": "inner"})
    here.run_line_magic("cd", "$sub")
    assert os.getcwd() == here.run_line_magic("pwd", "") == str(tmp_path / "inner")
    monkeypatch.setenv("JD_TEST", "0")
    here.run_line_magic("env", "JD_TEST={1 + 1}")
    assert here.run_line_magic("env", "JD_TEST") == "2"
    here.run_line_magic("set_env", "JD_TEST=3")
    assert os.environ["JD_TEST"] == "3"
    assert here.run_line_magic("time", "1 + 1") == 2
    assert here.run_line_magic("time", "x = 5") is None
    assert here.user_ns["x"] == 5
    assert capsys.readouterr().out.count("wall time") == 2
    assert here.run_line_magic("matplotlib", "inline") is None
    assert here.run_line_magic("load_ext", "autoreload") is here.run_line_magic("autoreload", "2") is None
    with pytest.raises(NameError, match="%prun cannot run on a rank"):
        here.run_line_magic("prun", "1")
    with pytest.raises(ZeroDivisionError):
        here.run_line_magic("time", "1 / 0")


def test_a_timed_line_runs_once_and_fails_with_its_own_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"calls": []}
    here = shell.RankShell(namespace)
    assert here.run_line_magic("time", "len(calls)") == 0
    assert here.run_line_magic("time", "calls = ['x']") is None
    with pytest.raises(ZeroDivisionError) as failed:
        here.run_line_magic("time", "y = 1 / 0")
    assert failed.value.__context__ is None
    with pytest.raises(SyntaxError):
        here.run_line_magic("time", "[calls.append('y'), compile('=', '', 'exec')]")
    assert namespace["calls"] == ["x", "y"]
    assert "wall time" in capsys.readouterr().out
