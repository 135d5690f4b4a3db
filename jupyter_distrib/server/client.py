"""A kernel, as the process that serves it sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jupyter_distrib.server.worker_group import ServedWorkerGroup
from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link

G = TypeVar("G", bound=ServedWorkerGroup)


@dataclass(slots=True, kw_only=True, eq=False)
class Client(Generic[G]):
    """One kernel."""

    link: Link
    hello: m.Hello | None = None
    pidfd: int = -1
    groups: dict[str, G] = field(default_factory=dict)
    gathering: Timer | None = None
    """Timer after which the queued events are sent, if all of them can wait for what follows."""

    def gather_no_more(self) -> None:
        """Cancel the timer, because the queued events are sent now."""
        if self.gathering is not None:
            self.gathering.cancel()
            self.gathering = None

    def statuses(self) -> list[m.GroupStatus]:
        """Return the status of each of its worker groups."""
        if self.hello is None:
            return []
        return [
            m.GroupStatus(
                group=group.name,
                holder=self.hello.label,
                session=self.hello.session,
                workers=group.infos(),
                run=group.current.run if group.current else "",
                label=group.current.label if group.current else "",
                kept=dict(group.kept),
            )
            for group in self.groups.values()
        ]
