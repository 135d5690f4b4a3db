"""Changes one pool in the text of a settings file; every other line, and every comment, stays. Pure.

Python reads TOML, but does not write it. These functions get a file wrong that has anything but one key a line, so
their callers compare what the new text means with what was wanted."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

from jupyter_distrib.options import Option

_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def literal(option: Option | None, text: str) -> str:
    """Return the value of an option as TOML: `true` for a switch, a number if it is one, else a string."""
    if option is not None and not option.metavar:
        return "true"
    return text if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) else _string(text)


def with_pool(text: str, name: str, changes: Mapping[str, str | None]) -> str:
    """Return the text with changed keys in the table of a pool, which is added at the end if it is not there.

    Args:
        text: The text of the file.
        name: The name of the pool.
        changes: The new value of each key, as TOML; None removes the key.
    """
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    place = _place(lines, name)
    if place is None:
        added = [f"{key} = {value}" for key, value in changes.items() if value is not None]
        while lines and not lines[-1].strip():
            lines.pop()
        return end.join([*lines, *([""] if lines else []), f"[pools.{_key(name)}]", *added, ""])
    first, last = place
    table, left = lines[first:last], dict(changes)
    changed = []
    for line in table:
        key = _key_of(line)
        if key not in left:
            changed.append(line)
        elif (value := left.pop(key)) is not None:
            changed.append(_with_value(line, value))
    at = max(
        (number for number, line in enumerate(changed, 1) if line.strip() and not line.lstrip().startswith("#")),
        default=0,
    )
    changed[at:at] = [f"{key} = {value}" for key, value in left.items() if value is not None]
    return end.join([*lines[:first], *changed, *lines[last:]])


def _place(lines: list[str], name: str) -> tuple[int, int] | None:
    """Return the first line after the header of a pool's table, and the line after its last."""
    headers = [number for number, line in enumerate(lines) if re.match(r"\s*\[", line) and _is_header(line)]
    for number, following in zip(headers, [*headers, len(lines)][1:], strict=True):
        if _is_of(lines[number], name):
            return number + 1, following
    return None


def _is_header(line: str) -> bool:
    try:
        tomllib.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_of(header: str, name: str) -> bool:
    content = tomllib.loads(header)
    return content == {"pools": {name: {}}}


def _key_of(line: str) -> str:
    """Return the key of a line that sets one; empty for others."""
    match = re.match(r"\s*([A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*=", line)
    return match[1].strip("\"'") if match else ""


def _with_value(line: str, value: str) -> str:
    """Return a line with another value, and the same comment."""
    before, equals, rest = line.partition("=")
    comment = ""
    for match in re.finditer(r"\s*#", rest):
        try:
            tomllib.loads(f"x ={rest[: match.start()]}")
        except ValueError:  # this one is in a string
            continue
        comment = rest[match.start() :]
        break
    return f"{before}{equals} {value}{comment}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
