"""`--explain`: what would travel to the ranks, and why; nothing runs. Kernel side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from jupyter_distrib import payload
from jupyter_distrib.capture import Captured, reachable
from jupyter_distrib.words import size

_HEAD = ("name", "type", "size", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A table that shows itself as text or HTML."""

    rows: tuple[tuple[str, str, str, str], ...]
    """Name, type, size and reason of each variable."""

    @classmethod
    def of(cls, captured: Captured, namespace: Mapping[str, Any]) -> Explanation:
        names = {item.name: (item.value, item.reason) for item in captured.inputs}
        for name, way in reachable(captured.inputs, namespace).items():
            names.setdefault(name, (namespace[name], f"used by {' -> '.join(way)}"))
        sizes = payload.sizes({name: value for name, (value, _) in names.items()}, dict(namespace))
        return cls(
            rows=tuple(
                (name, type(value).__name__, size(sizes[name]) if sizes[name] else "cannot be sent", reason)
                for name, (value, reason) in names.items()
            )
        )

    def __repr__(self) -> str:
        if not self.rows:
            return "Nothing of the notebook travels with this cell."
        table = [_HEAD, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table
        )

    def _repr_html_(self) -> str:
        if not self.rows:
            return escape(repr(self))
        head = "".join(f"<th>{word}</th>" for word in _HEAD)
        body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
