"""A state that changes by a table of moves only."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from jupyter_distrib.server.worker_group import StateMachine


class Door(Enum):
    OPEN = auto()
    SHUT = auto()
    LOCKED = auto()


class Hand(Enum):
    PUSH = auto()
    TURN = auto()


MOVES = {(Door.OPEN, Hand.PUSH): Door.SHUT, (Door.SHUT, Hand.TURN): Door.LOCKED, (Door.LOCKED, Hand.TURN): Door.SHUT}


@pytest.mark.parametrize("trigger", Hand)
@pytest.mark.parametrize("state", Door)
def test_a_move_of_the_table_is_made_and_any_other_is_refused(state: Door, trigger: Hand) -> None:
    machine = StateMachine(state, MOVES)
    moved = machine.move(trigger)
    assert (moved, machine.state) == ((state, trigger) in MOVES, MOVES.get((state, trigger), state))
