"""The state of one scope during the pass over a program in `names.py`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class or function, with what is known of its names at the point that the pass has reached."""

    kind: Literal["module", "class", "function"]
    parent: Scope | None = None
    settled: set[str] = field(default_factory=set)
    bound: dict[str, None] = field(default_factory=dict)
    """The names bound so far on any path."""
    declared_global: set[str] = field(default_factory=set)
    hidden: frozenset[str] = frozenset()
    """The variables of the comprehensions around this point, and type parameters: they hide outer names."""
    in_comprehension: bool = False
    in_generator: bool = False
    dead: bool = False
    """Whether no path leads to this point."""
    straight: bool = True
    """Whether every call of the function reaches this point, if nothing raises."""
    breaks: list[list[set[str]]] = field(default_factory=list)
    """The names settled at the `break`s of each loop around this point."""
    reads: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """The reads in a function: name -> first line, whether every call reads it. Which names are local is known only at
    its end."""
