"""The answer to `--explain`: the values that would travel to the ranks, with the reasons, and the effects of the
strategy; nothing runs. Kernel side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from jupyter_distrib.kernel.capture.capture import Captured, reachable
from jupyter_distrib.kernel.notebook.strategy_preview import preview
from jupyter_distrib.kernel.views.table import Row, TextTable
from jupyter_distrib.serialization import payload
from jupyter_distrib.system.formatting import size

_HEAD = ("name", "type", "size", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The tables of `--explain`, which show themselves as text or HTML."""

    rows: tuple[Row, ...]
    """Name, type, size and reason of each variable."""
    strategy: str = "none"
    changes: tuple[Row, ...] = ()
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
        """Explain a captured cell. `effects` describe what the strategy does with a model and with a data loader."""
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
        travels = [] if self.rows else ["Nothing of the notebook travels with this cell."]
        return "\n\n".join([*travels, *(table.as_text() for table in self._tables())])

    def _repr_html_(self) -> str:
        return "".join(table.as_html() for table in self._tables()) or escape(repr(self))

    def _tables(self) -> list[TextTable]:
        plan = ("where", "what", f"with --strategy {self.strategy}")
        return [
            each
            for each in (TextTable(head=_HEAD, rows=self.rows), TextTable(head=plan, rows=self.changes))
            if each.rows
        ]
