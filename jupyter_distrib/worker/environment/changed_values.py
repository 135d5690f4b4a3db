"""Finds lists, dictionaries, sets and arrays of the notebook that a cell has changed on the ranks and left there: the
notebook's own stay as they were before, and a plot of them is empty. Rank's main thread."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from contextlib import suppress
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
        self._before = [  # by their ids, so that what the cell deletes is freed
            (name, id(value), content)
            for name, value in names.items()
            if not name.startswith("_") and id(value) not in kept and (content := _content(value)) is not None
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
            for name, identity, content in self._before
            if name not in keep
            and id(value := self._names.get(name)) == identity
            and not _holds(returned, value)
            and _content(value) != content
            and _said.setdefault(name, hash(text)) == hash(text)
        ]
        if not left:
            return ""
        listed, (are, ones) = ", ".join(f"`{name}`" for name in left), ("are", "them") if left[1:] else ("is", "it")
        return (
            f"{listed} of the notebook {are} as before: the cell has changed copies on the ranks. To have the changes, "
            f"add --keep {','.join(left)}, and read {left[0]}[0] in the notebook, or end the cell with {ones}"
        )


def _content(value: Any) -> object:
    """Return what is compared of a value: the ids of the items of a container, also of lists in a dictionary (`{"loss":
    [], "accuracy": []}`), or the numbers of a small array or tensor on the CPU. None for anything else."""
    kind, numpy, torch = type(value), sys.modules.get("numpy"), sys.modules.get("torch")
    if kind in _CONTAINERS and len(value) <= _MOST_ITEMS:
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
        lists = [each for each in items if type(each) in (list, deque)] if isinstance(value, dict) else []
        return [id(each) for part in (items, *lists) for each in part]
    if torch is not None and kind is torch.Tensor and value.nbytes <= _MOST_BYTES and not value.requires_grad:
        with suppress(TypeError, RuntimeError):  # bfloat16, a sparse tensor, one on a GPU
            value = value.numpy()
    if numpy is None or type(value) is not numpy.ndarray or value.nbytes > _MOST_BYTES or value.dtype.hasobject:
        return None
    return bytes(value.tobytes())


def _holds(returned: object, value: object) -> bool:
    """Return whether the value of a cell is this value, or has it in it."""
    if isinstance(returned, (list, tuple)):
        return returned is value or any(each is value for each in returned[:_MOST_ITEMS])
    if isinstance(returned, dict):
        return returned is value or any(each is value for each in returned.values())
    return returned is value
