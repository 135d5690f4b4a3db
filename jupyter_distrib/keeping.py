"""Handles to what ranks keep of a run; they drop a value that nobody in the notebook has a handle to any more."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from jupyter_distrib.connection import Crew
from jupyter_distrib.events import Forget
from jupyter_distrib.results import RankValue
from jupyter_distrib.run import Run


class Keeper:
    """Makes the handles of one notebook.

    Args:
        fetch: Gives a copy of a key's value from one rank of a crew.
    """

    def __init__(self, fetch: Callable[[Crew, str, int], Any]) -> None:
        self._fetch = fetch
        self._forgotten: queue.SimpleQueue[tuple[Crew, str]] = queue.SimpleQueue()

    def handles(self, crew: Crew, run: Run, names: Iterable[str]) -> dict[str, RankValue]:
        """Those of the names that some rank defined."""
        out: dict[str, RankValue] = {}
        for name in names:
            types = {rank.rank: rank.kept[name] for rank in run.record.ranks.values() if name in rank.kept}
            if types:
                out[name] = self._handle(crew, run, name, types)
        return out

    def _handle(self, crew: Crew, run: Run, name: str, types: dict[int, str]) -> RankValue:
        key, forgotten, held = f"{run.id}/{name}", self._forgotten, weakref.ref(crew)

        def drop(key: str) -> None:
            if (crew := held()) is not None:
                forgotten.put((crew, key))

        handle = RankValue(
            name=name,
            key=key,
            crew=crew.name,
            ranks=types,
            type_names=types,
            pool=run.pool,
            since=run.record.label,
            sharded=any(name in rank.sharded for rank in run.record.ranks.values()),
            fetch=lambda rank: self._fetch(crew, key, rank),
            on_drop=drop,
        )
        crew.handles.add(handle)
        return handle

    def pass_on(self) -> None:
        """Tell the ranks which values are not wanted any more. (Handles go at any moment, in any thread.)"""
        keys: dict[str, tuple[Crew, list[str]]] = {}
        while not self._forgotten.empty():
            crew, key = self._forgotten.get()
            keys.setdefault(crew.name, (crew, []))[1].append(key)
        for crew, dropped in keys.values():
            if crew.state == "open":
                crew.connection.node.send(Forget(crew=crew.name, keys=tuple(dropped)))
