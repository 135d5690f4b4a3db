"""Reads the small files through which this package's processes communicate. They may have been damaged or replaced.

Whatever is at the path, a reader here answers at once, and raises nothing but `OSError` and `DamagedFile`: a FIFO is
not waited for, a link is not followed, a file of another user is not believed, and a value whose type does not match
its field makes the record a damaged one. Any process; standard library only."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, Union, get_args, get_origin, get_type_hints

LARGEST_BYTES = 32 << 20
"""The size of the largest file that is read."""
LARGEST_NUMBER = 1e11
"""The largest number of a field; as seconds since 1970 it is a year that calendars know. None is below 0."""
LARGEST_WHOLE_NUMBER = 1 << 62
ANY_NUMBER = {"any_number": True}
"""Field metadata that allows any number, including NaN and 1e30, because a cell has reported it."""
Kind = TypeVar("Kind")


class DamagedFile(ValueError):
    """Raised for a file that exists but holds no valid record."""


def text_of(path: Path | str, most_bytes: int = LARGEST_BYTES, *, through_links: bool = False) -> str:
    """Return the text of a regular file.

    Args:
        path: The file; a last component that is a link is refused.
        most_bytes: The size of the largest file that is read.
        through_links: Whether to follow links, and to read another user's file, as for a file that the user has
            written.

    Raises:
        OSError: There is no such file, or it cannot be opened, is not regular, or belongs to another user.
        DamagedFile: It is not text, or too large.
    """
    with opened(path, through_links=through_links) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise DamagedFile(f"it is larger than {most_bytes / 1e6:.0f} MB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DamagedFile(f"line {line} is not text in UTF-8") from None


def beginning_of(path: Path | str, most_bytes: int = LARGEST_BYTES) -> str:
    """Return the beginning of a regular file that somebody else has written, or a link to one, as text. Raises
    `OSError`."""
    with io.TextIOWrapper(opened(path, through_links=True), encoding="utf-8", errors="replace") as file:
        return file.read(most_bytes)


def opened(path: Path | str, *, through_links: bool = False) -> BinaryIO:
    """Open a regular file of this user to read it, at once. Raises `OSError`."""
    # Otherwise opening a FIFO would wait for its writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags if through_links else flags | os.O_NOFOLLOW)
    info = os.fstat(descriptor)
    if stat.S_ISREG(info.st_mode) and (info.st_uid == os.getuid() or through_links):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    what = "it belongs to another user" if stat.S_ISREG(info.st_mode) else "it is not a regular file"
    raise OSError(errno.EPERM, what, str(path))


def json_of(text: str) -> Any:
    """Return the value of a JSON text. Raises `DamagedFile`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"it is not JSON: {error}") from None


def record_of(kind: type[Kind], content: object) -> Kind:
    """Return a record with the fields of a JSON object. Unknown fields are ignored, because later versions write more.

    Raises:
        DamagedFile: It is not an object, lacks a field, or has a value of the wrong type.
    """
    if not isinstance(content, Mapping):
        raise DamagedFile("it does not hold a record")
    values: dict[str, Any] = {}
    described: Any = kind
    for name, (wanted, any_number, is_needed) in _fields(described).items():
        if name in content:
            values[name] = _checked(content[name], wanted, name, any_number=any_number)
        elif is_needed:
            raise DamagedFile(f"it lacks {name}")
    return kind(**values)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool, bool]]:
    """Return the type of each field, whether any number is allowed, and whether it has no default."""
    hints = get_type_hints(kind)
    return {
        each.name: (
            hints[each.name],
            "any_number" in each.metadata,
            each.default is MISSING and each.default_factory is MISSING,
        )
        for each in fields(kind)
        if each.init
    }


def _checked(value: Any, wanted: Any, name: str, *, any_number: bool) -> Any:
    """Return a value of the required type. Raises `DamagedFile`."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType) and type(None) in parts:
        if value is None:
            return None
        (wanted,) = (each for each in parts if each is not type(None))
        return _checked(value, wanted, name, any_number=any_number)
    if origin is dict and isinstance(value, dict):
        return {_plain(key): _checked(each, parts[1], name, any_number=any_number) for key, each in value.items()}
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_checked(each, parts[0], name, any_number=any_number) for each in value)
    match value:
        case bool() if wanted is bool:
            return value
        case str() if wanted is str:
            return _plain(value)
        case int() if wanted is int and not isinstance(value, bool) and 0 <= value <= LARGEST_WHOLE_NUMBER:
            return value
        case float() | int() if wanted is float and not isinstance(value, bool):
            if any_number and (isinstance(value, float) or abs(value) <= LARGEST_WHOLE_NUMBER):
                return value
            if 0 <= value <= LARGEST_NUMBER:
                return value
    raise DamagedFile(f"{name} is {str(value)[:40]!r}, which is not a valid value")


def _plain(text: str) -> str:
    """Return a text that can be sent and printed: JSON can contain lone surrogates."""
    return text.encode("utf-8", "replace").decode()
