"""Finds lists, dictionaries, sets and arrays of the notebook that a cell has changed on the ranks and left there: the
notebook's own stay as they were before, and a plot of them is empty. Rank's main thread."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from operator import is_
from typing import Any

_CONTAINERS = list, dict, set, deque, defaultdict, OrderedDict, Counter
_MOST_ITEMS = 10_000
"""Number of items up to which a container is compared with what it was."""
_MOST_BYTES = 1_000_000
"""Size up to which an array is compared."""
_said: dict[str, int] = {}
"""Digest of the text of the cell that has the note on a value, by the value's name. The same cell gets it again when it
is run again, since its output is then a new one."""


class ChangedValues:
    """The values of the notebook that one cell has on this rank, as they are before the cell.

    Args:
        names: The namespace of the cell.
        kept_values: Values that earlier cells have left on this rank, which cells change for good.
    """

    def __init__(self, names: dict[str, object], kept_values: Iterable[object]) -> None:
        kept = {id(each) for each in kept_values}
        self._names = names
        self._before = [
            (name, value, unchanged)
            for name, value in names.items()
            if not name.startswith("_") and id(value) not in kept and (unchanged := _comparison(value)) is not None
        ]

    def note(self, text: str, keep: Collection[str], returned: object) -> str:
        """Return a sentence on the values that the cell has changed in place and that stay on the ranks; "" if there
        are none, or if another cell has a note on them.

        Args:
            text: The text of the cell.
            keep: The names that the cell keeps.
            returned: The value of the cell.
        """
        left = [
            name
            for name, value, unchanged in self._before
            if name not in keep
            and self._names.get(name) is value
            and not _holds(returned, value)
            and not unchanged()
            and _said.setdefault(name, hash(text)) == hash(text)
        ]
        if not left:
            return ""
        listed, (are, ones) = ", ".join(f"`{name}`" for name in left), ("are", "them") if left[1:] else ("is", "it")
        return (
            f"{listed} of the notebook {are} as before: the cell has changed copies on the ranks. To have the changes, "
            f"add --keep {','.join(left)}, and read {left[0]}[0] in the notebook, or end the cell with {ones}"
        )


def _comparison(value: Any) -> Callable[[], bool] | None:
    """Return a function that tells whether a value is still as it is now; None if that is not compared."""
    kind = type(value)
    if kind in _CONTAINERS and len(value) <= _MOST_ITEMS:
        before = _parts(value)
        return lambda: len(before) == len(now := _parts(value)) and all(map(is_, before, now))
    content = _content(value)
    return None if content is None else lambda: _content(value) == content


def _content(value: Any) -> bytes | None:
    """Return the numbers of a small array or tensor on the CPU; None for anything else."""
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    if torch is not None and type(value) is torch.Tensor and value.nbytes <= _MOST_BYTES and not value.requires_grad:
        with suppress(TypeError, RuntimeError):  # bfloat16, a sparse tensor, one on a GPU
            value = value.numpy()
    if numpy is None or type(value) is not numpy.ndarray or value.nbytes > _MOST_BYTES or value.dtype.hasobject:
        return None
    return bytes(value.tobytes())


def _parts(value: Any) -> list[object]:
    """Return what is in a container, and in the lists of a dictionary: `{"loss": [], "accuracy": []}`."""
    if not isinstance(value, dict):
        return list(value)
    parts: list[object] = [*value.keys(), *value.values()]
    for each in value.values():
        if type(each) in (list, deque) and len(each) <= _MOST_ITEMS:
            parts += each
    return parts


def _holds(returned: object, value: object) -> bool:
    """Return whether the value of a cell is this value, or has it in it."""
    if isinstance(returned, (list, tuple)):
        return returned is value or any(each is value for each in returned[:_MOST_ITEMS])
    if isinstance(returned, dict):
        return returned is value or any(each is value for each in returned.values())
    return returned is value
