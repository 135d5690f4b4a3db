"""Maps the numbers of one worker group to its ranks, and keeps replaced ranks until they are gone. Runs in the agent's
loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jupyter_distrib.agent.ranks.rank import Rank


class RankTable:
    """The processes of one worker group."""

    def __init__(self) -> None:
        self._current: dict[int, Rank] = {}
        self._replaced: list[Rank] = []
        """Ranks that were replaced, and whose exit handlers may still be at work."""
        self._lost: set[int] = set()

    @property
    def current(self) -> Mapping[int, Rank]:
        """Return the current ranks by number; a live view."""
        return self._current

    def __iter__(self) -> Iterator[Rank]:
        """Return the current ranks."""
        return iter(self._current.values())

    def everyone(self) -> list[Rank]:
        """Return all ranks that may still have a process."""
        return [*self._current.values(), *self._replaced]

    @property
    def starting(self) -> bool:
        """Return whether any rank is still starting."""
        return any(rank.state == "starting" for rank in self)

    @property
    def living(self) -> bool:
        """Return whether any process has not been reaped yet."""
        return any(rank.process.living for rank in self.everyone())

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.everyone() if rank.pid]

    @property
    def marks(self) -> set[str]:
        return {rank.process.mark for rank in self.everyone()}

    def find(self, pid: int) -> Rank | None:
        return next((rank for rank in self.everyone() if rank.pid == pid), None)

    def put(self, rank: Rank) -> None:
        """Register a rank, in place of a dead one if there was one."""
        self._current[rank.number] = rank

    def is_current(self, rank: Rank) -> bool:
        return self._current.get(rank.number) is rank

    def retire_all(self) -> None:
        """Mark all ranks as replaced, because new ones will take their places."""
        self._replaced = self.everyone()

    def drop_all(self) -> None:
        """Mark all ranks as replaced and free their places, because fewer ranks will follow."""
        self.retire_all()
        self._lost |= self._current.keys()
        self._current = {}

    def remove_replaced(self, rank: Rank) -> None:
        """Remove a dead rank once it has been replaced."""
        if rank in self._replaced:
            self._replaced.remove(rank)

    def record_lost(self, number: int) -> None:
        self._lost.add(number)

    def pop_lost(self) -> tuple[int, ...]:
        """Return the numbers of the ranks lost since the last call."""
        lost, self._lost = tuple(sorted(self._lost)), set()
        return lost
