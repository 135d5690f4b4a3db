"""The answer to `--explain`: what would travel to the ranks, and why, and what the strategy would do; nothing runs.
Kernel side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from jupyter_distrib.kernel.capture.capture import Captured, reachable
from jupyter_distrib.kernel.notebook.strategy_preview import preview
from jupyter_distrib.serialization import payload
from jupyter_distrib.system.formatting import size

_Row = tuple[str, ...]
_HEAD: _Row = ("name", "type", "size", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Tables that show themselves as text or HTML."""

    rows: tuple[_Row, ...]
    """Name, type, size and reason of each variable."""
    strategy: str = "none"
    changes: tuple[_Row, ...] = ()
    """Place, code and planned effect of each change by the strategy."""

    @classmethod
    def of(
        cls,
        captured: Captured,
        namespace: Mapping[str, Any],
        *,
        strategy: str = "none",
        effects: tuple[str, str] = ("", ""),
    ) -> Explanation:
        """Explain a captured cell. `effects` says what the strategy does with a model and with a data loader."""
        names = {item.name: (item.value, item.reason) for item in captured.inputs}
        for name, way in reachable(captured.inputs, namespace).items():
            names.setdefault(name, (namespace[name], f"used by {' -> '.join(way)}"))
        sizes = payload.sizes({name: value for name, (value, _) in names.items()}, dict(namespace))
        return cls(
            rows=tuple(
                (name, type(value).__name__, size(sizes[name]) if sizes[name] else "cannot be sent", reason)
                for name, (value, reason) in names.items()
            ),
            strategy=strategy,
            changes=tuple((each.where, each.what, each.effect) for each in preview(captured, namespace, *effects)),
        )

    def __repr__(self) -> str:
        parts = [_as_text((_HEAD, *self.rows)) if self.rows else "Nothing of the notebook travels with this cell."]
        if self.changes:
            parts.append(_as_text((self._head, *self.changes)))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        tables = [(_HEAD, self.rows)] if self.rows else []
        tables += [(self._head, self.changes)] if self.changes else []
        return "".join(_as_html(*table) for table in tables) or escape(repr(self))

    @property
    def _head(self) -> _Row:
        return ("where", "what", f"with --strategy {self.strategy}")


def _as_text(table: tuple[_Row, ...]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def _as_html(head: _Row, rows: tuple[_Row, ...]) -> str:
    cells = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
