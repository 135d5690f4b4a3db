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
    crews: dict[str, Any] = field(default_factory=dict)

    def described(self) -> list[dict[str, object]]:
        """Its crews, for the status."""
        if self.hello is None:
            return []
        return [
            {
                "crew": crew.name,
                "holder": self.hello.label,
                "session": self.hello.session,
                "workers": crew.infos(),
                "run": crew.run.command.run if crew.run else "",
                "label": crew.run.command.label if crew.run else "",
                "kept": dict(crew.kept),
            }
            for crew in self.crews.values()
        ]
