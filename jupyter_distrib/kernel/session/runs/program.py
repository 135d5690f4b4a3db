"""The program of a run, kept for `%distributed_export` without keeping large values alive. In the thread that begins
the run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from types import FunctionType, ModuleType

from jupyter_distrib.kernel.capture.capture import Input
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.settings import CellOptions
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

LITERAL_CHARACTERS = 2000
"""Maximum length of a value that is written as a literal."""
SHORT_ITEMS = 20
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, dict)


@data_class
class Program:
    """The program executed by a run."""

    source: str
    names: tuple[str, ...]
    """The names that it captured."""
    values: Mapping[str, object]
    """The captured values that are code, or short and plain, as they were."""
    cell_options: CellOptions
    setups: tuple[str, ...] = ()
    """The sources of the set-ups that each rank runs before it."""
    of_setups: frozenset[str] = frozenset()
    """The names that these bind."""

    @property
    def options(self) -> Options:
        """The options with all defaults."""
        return self.cell_options.filled

    def after(self, setup: m.Setup, inputs: tuple[Input, ...]) -> Program:
        """Return the program with one more set-up and the values that it had captured."""
        before, values = _kept(inputs), self.values
        names = (*(each.name for each in inputs if each.name not in self.names), *self.names)
        sources, bound = (*self.setups, setup.cell.source), self.of_setups | set(setup.defines)
        return replace(self, names=names, values={**before, **values}, setups=sources, of_setups=bound)

    @classmethod
    def of(cls, cell: m.Cell, inputs: tuple[Input, ...], options: CellOptions) -> Program:
        names = tuple(each.name for each in inputs)
        return cls(source=cell.source, names=names, values=_kept(inputs), cell_options=options)


def _kept(inputs: tuple[Input, ...]) -> dict[str, object]:
    return {
        each.name: each.value
        for each in inputs
        if isinstance(each.value, (ModuleType, type, FunctionType)) or _is_short(each.value)
    }


def _is_short(value: object) -> bool:
    """Return, quickly, whether a value is plain and takes little memory."""
    if type(value) in (tuple, dict) and len(value) < SHORT_ITEMS:  # type: ignore[arg-type]
        items = value.values() if isinstance(value, dict) else value
        return all(isinstance(each, _PLAIN) and _is_short(each) for each in items)  # type: ignore[attr-defined]
    return isinstance(value, _PLAIN) and (not isinstance(value, (str, bytes)) or len(value) < LITERAL_CHARACTERS)


def is_literal(value: object) -> bool:
    """Return whether Python reads the text of a value back as an equal value of the same types."""
    if type(value) not in (*_PLAIN, *_CONTAINERS):
        return False
    try:
        text = repr(value)
        equal = (len(text) < LITERAL_CHARACTERS or _is_short(value)) and bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError, MemoryError, TypeError):  # `nan` is a name; an integer may have too many digits
        return False
    return equal and _is_of_plain_types(value)


def _is_of_plain_types(value: object) -> bool:
    if type(value) not in _CONTAINERS:
        return type(value) in _PLAIN
    items = (*value, *value.values()) if isinstance(value, dict) else value
    return all(map(_is_of_plain_types, items))  # type: ignore[call-overload]
