"""A kernel, as the agent sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import Hello


@dataclass(slots=True, kw_only=True, eq=False)
class Client:
    """One kernel."""

    link: Link
    hello: Hello | None = None
    pidfd: int = -1
    groups: dict[str, Any] = field(default_factory=dict)

    def described(self) -> list[dict[str, object]]:
        """Its worker groups, for the status."""
        if self.hello is None:
            return []
        return [
            {
                "group": group.name,
                "holder": self.hello.label,
                "session": self.hello.session,
                "workers": group.infos(),
                "run": group.run.command.run if group.run else "",
                "label": group.run.command.label if group.run else "",
                "kept": dict(group.kept),
            }
            for group in self.groups.values()
        ]
