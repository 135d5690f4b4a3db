"""Checks values read from a file that others may have written. Each function returns the value in the expected type, or
raises a `ValueError` that shows it."""

from __future__ import annotations

import reprlib
from typing import Any, NoReturn

import torch

_MOST_DIMENSIONS = 64
_MOST = 1 << 60
"""Limit of a number of bytes or values. Python hashes larger ones as smaller ones."""


def with_keys(value: object, keys: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != keys:
        refuse(f"an object with {', '.join(sorted(keys))}", value)
    return value


def checked_path(value: object) -> tuple[str | int, ...]:
    """Return the path of an entry in the nested state."""
    if not isinstance(value, (list, tuple)) or not value:
        refuse("the path of an entry", value)
    return tuple(each if isinstance(each, str) else count(each) for each in value)


def shape(value: object) -> torch.Size:
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_DIMENSIONS:
        refuse("a shape", value)
    return torch.Size(map(count, value))


def number_type(value: object) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        refuse("a type of numbers", value)
    return found


def text(value: object) -> str:
    if not isinstance(value, str):
        refuse("a string", value)
    return value


def count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        refuse("a count", value)
    return value


def refuse(wanted: str, found: object) -> NoReturn:
    raise ValueError(f"it has {reprlib.repr(found):.80} instead of {wanted}")
