"""Lines of our own in a terminal that others write to as well: a real pseudo terminal, and what it would show."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from jupyter_distrib.kernel.record.terminal_stream import for_terminal
from jupyter_distrib.kernel.session.pools.waiting_line import WaitingLine
from jupyter_distrib.kernel.session.runs import prompts
from jupyter_distrib.system import terminal_line

COLUMNS = 40
ROOT = Path(terminal_line.__file__).parent.parent.parent
_PIECE = re.compile(r"\x1b\[(\d*)([AJK])|(.)", re.DOTALL)


def rows(written: str) -> list[str]:
    """The rows that a terminal shows: one that begins another row only with the character behind the last column."""
    shown, row, column = [[" "] * COLUMNS], 0, 0
    for number, code, letter in _PIECE.findall(written):
        if code == "A":
            row -= int(number or 1)
        elif code:
            shown[row][column:] = [" "] * (COLUMNS - column)
            if code == "J":
                del shown[row + 1 :]
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
        else:
            if column == COLUMNS:
                row, column = row + 1, 0
            shown += [[" "] * COLUMNS for _ in range(row + 1 - len(shown))]
            shown[row][column] = letter
            column += 1
        shown += [[" "] * COLUMNS for _ in range(row + 1 - len(shown))]
    return ["".join(each).rstrip() for each in shown]


def all_of(master: int) -> str:
    """What is written until nobody can write any more."""
    written = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(master, 1 << 16):
            written += piece
    return written.decode()


class Terminal:
    def __init__(self, master: int, stream: TextIO) -> None:
        self.master, self.stream = master, stream

    def shows(self) -> list[str]:
        self.stream.close()
        return rows(all_of(self.master))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    with open(slave, "w") as stream:
        yield Terminal(master, stream)
    os.close(master)


@pytest.mark.parametrize("length", [0, 1, 2, COLUMNS - 1, COLUMNS, COLUMNS + 1])
def test_a_line_begins_below_what_others_have_begun(terminal: Terminal, length: int) -> None:
    begun = "x" * length
    print(begun, end="", file=terminal.stream)
    print(f"{terminal_line.beginning(terminal.stream)}ours", file=terminal.stream)
    expected = [begun[:COLUMNS], begun[COLUMNS:]] if length > COLUMNS else [begun] if begun else []
    assert terminal.shows() == [*expected, "ours", ""]


def test_what_is_waited_for_is_replaced_whole(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", terminal.stream)
    line = WaitingLine()
    print("half", end="")
    line.say(f"Waiting: start: {'long ' * 20}")
    line.say("Waiting: start: short")
    line.end()
    print("next")
    assert terminal.shows() == ["half", "Waiting: start: short", "next", ""]


def test_nothing_is_added_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    line = WaitingLine()
    line.say("Waiting: start: longer")
    line.say("Waiting: start: short")
    line.end()
    assert sys.stdout.getvalue() == "Waiting: start: longer\rWaiting: start: short \n"  # type: ignore[attr-defined]


class Written:
    """What has only the methods that `print` needs, as given to `contextlib.redirect_stdout`."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_what_can_only_be_written_to_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written()
    monkeypatch.setattr("sys.stdout", written)
    WaitingLine().say("Waiting: start")
    print(for_terminal("\x1b]0;title\x07", sys.stdout))
    assert written.text == "Waiting: start\x1b]0;title\x07\n"
    monkeypatch.setattr("sys.stdin", written)
    assert prompts.terminal() == "this program has no terminal"


SCRIPT = """
import time
import jupyter_distrib
from jupyter_distrib.kernel.notebook import live_view
live_view.STATUS_EVERY_S = 0.1
@jupyter_distrib.distributed(ranks=1)
def train():
    import time
    time.sleep(2)
print('reading data ... ', end='', flush=True)
train.distributed()
print('the end')
"""


@pytest.mark.slow
def test_a_scripts_unfinished_line_stands_above_the_line_of_status(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=env, stdout=slave) as process:
        os.close(slave)
        written = all_of(master)
    os.close(master)
    assert process.returncode == 0
    shown = rows(written)
    assert shown[0] == "reading data ..."
    assert re.match(r"1 rank · ", shown[1])
    assert shown[-2] == "the end"
