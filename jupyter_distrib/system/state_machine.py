"""One explicit state, which changes by a table of moves only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=Enum)


class StateMachine(Generic[S, T]):
    """A state, and the moves that are allowed from it.

    Args:
        first: The initial state.
        moves: The next state, by state and trigger.
    """

    def __init__(self, first: S, moves: Mapping[tuple[S, T], S]) -> None:
        self.state = first
        self._moves = moves

    def move(self, trigger: T) -> bool:
        """Make the move that the table has for this trigger; return False, in the same state, if it has none."""
        if (self.state, trigger) not in self._moves:
            return False
        self.state = self._moves[self.state, trigger]
        return True
