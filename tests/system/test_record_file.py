"""Small files that anything may have happened to: a record comes back, or an error that says what is wrong with the file."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jupyter_distrib.system import record_file
from jupyter_distrib.system.record_file import DamagedFile


@dataclass(frozen=True, kw_only=True)
class Record:
    """One of every kind of field."""

    text: str
    whole: int
    number: float = 0.0
    flag: bool = False
    perhaps: int | None = None
    texts: dict[str, str] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict, metadata=record_file.ANY_NUMBER)
    rows: list[list[float | None]] = field(default_factory=list)


WHOLE = {
    "text": "a", "whole": 3, "number": 2.5, "flag": True, "perhaps": None, "texts": {"a": "b"},
    "reported": {"loss": float("nan"), "most": 1e300}, "rows": [[1, None], [2.5, 0]],
}  # fmt: skip


def test_a_record_comes_back_and_what_a_later_version_adds_is_left_out() -> None:
    read = record_file.record_of(Record, json.loads(json.dumps({**WHOLE, "later": 1})))
    assert (read.text, read.whole, read.number, read.flag, read.perhaps) == ("a", 3, 2.5, True, None)
    assert read.rows == [[1, None], [2.5, 0]]
    assert read.reported["most"] == 1e300
    assert record_file.record_of(Record, {"text": "a", "whole": 1}).texts == {}


WRONG = [
    *({**WHOLE, "text": value} for value in (1, None, [], {})),
    *({**WHOLE, "whole": value} for value in ("1", 1.5, True, None, -1, 10**400, float("nan"))),
    *({**WHOLE, "number": value} for value in ("1", True, None, 1e30, -1.0, float("inf"), float("nan"), 10**400)),
    *({**WHOLE, "flag": value} for value in (1, "true", None)),
    *({**WHOLE, "perhaps": value} for value in ("1", [])),
    *({**WHOLE, "texts": value} for value in ([], {"a": 1}, "a", None)),
    *({**WHOLE, "reported": value} for value in ({"a": "1"}, {"a": None}, {"a": 10**400})),
    *({**WHOLE, "rows": value} for value in ([1], [["a"]], {}, [[1e30]])),
    *({name: value for name, value in WHOLE.items() if name != left_out} for left_out in ("text", "whole")),
    [1],
    None,
    "text",
    3,
]


@pytest.mark.parametrize("content", WRONG, ids=str)
def test_a_value_of_another_type_is_not_a_record(content: object) -> None:
    with pytest.raises(DamagedFile):
        record_file.record_of(Record, content)


def test_halves_of_characters_can_be_printed() -> None:
    read = record_file.record_of(Record, json.loads(r'{"text": "\ud800", "whole": 1, "texts": {"\ud800": "\udfff"}}'))
    assert (read.text, read.texts) == ("?", {"?": "?"})


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, "9" * 5000, "\0", "nan", '{"a": 1}}', '{"a": "'])
def test_what_is_not_json_is_damaged(text: str) -> None:
    with pytest.raises(DamagedFile, match="it is not JSON"):
        record_file.json_of(text)


@pytest.mark.parametrize(
    "what", ["bytes", "folder", "link", "dangling", "circle", "fifo", "socket", "other", "huge", "none"]
)
def test_whatever_is_at_the_path_is_an_error_at_once(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_text("{}")
    match what:
        case "bytes":
            path.write_bytes(os.urandom(300) + b"\xff")
        case "folder":
            path.mkdir()
        case "link" | "dangling" | "circle":
            path.symlink_to({"link": elsewhere, "dangling": tmp_path / "nowhere", "circle": path}[what])
        case "fifo":
            os.mkfifo(path)
        case "socket":
            monkeypatch.chdir(tmp_path)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind("file")
        case "other":
            path.write_text("{}")
            os.chown(path, 12345, -1)
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    with pytest.raises((OSError, DamagedFile)):
        record_file.text_of(path)


def test_a_file_of_the_user_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert record_file.text_of(tmp_path / "file") == "text"
    assert record_file.text_of(tmp_path / "link", through_links=True) == "text"
