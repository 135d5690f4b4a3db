"""The answer to `--explain`: the values that would be sent to the ranks, with the reasons, and the effects of the
strategy. Kernel side.

The effects are read from the text of the cell and of the functions and classes that travel with it; nothing runs. The
calls inside a library cannot be seen in this text; the head of the run says what was really done.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from types import FunctionType
from typing import Any

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.interfaces import manual_parallelism
from jupyter_distrib.kernel.capture.capture import Captured, reachable
from jupyter_distrib.kernel.views.table import Row, TextTable
from jupyter_distrib.serialization import payload
from jupyter_distrib.serialization.value_cache import LARGE_BYTES
from jupyter_distrib.system.formatting import size

_HEAD = ("name", "type", "size", "why")
_MAX_TEXT = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The tables of `--explain`, with representations as text and HTML."""

    rows: tuple[Row, ...]
    """Name, type, size and reason of each variable."""
    sent: str = ""
    """A sentence on large values: how much would be sent, and how much the machines of the ranks have already."""
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
        unchanged_bytes: Callable[[payload.Packed], int] = lambda packed: 0,
        reads_files: Callable[[], bool] = bool,
    ) -> Explanation:
        """Explain a captured cell.

        Args:
            captured: The cell.
            namespace: The names of the notebook.
            strategy: The name of its strategy.
            effects: Descriptions of what the strategy does with a model and with a data loader.
            unchanged_bytes: Returns how much of the inputs the machines of the ranks have already.
            reads_files: Returns whether the ranks have the files of this machine, so that mapped ones are not copied.
        """
        names = {item.name: (item.value, item.reason) for item in captured.inputs}
        for name, way in reachable(captured.inputs, namespace).items():
            names.setdefault(name, (namespace[name], f"used by {' -> '.join(way)}"))
        sizes = payload.sizes({name: value for name, (value, _) in names.items()}, dict(namespace), reads_files)
        return cls(
            rows=tuple(
                (name, type(value).__name__, size(sizes[name]) if sizes[name] else "cannot be sent", reason)
                for name, (value, reason) in names.items()
            ),
            sent=_sent(captured, dict(namespace), unchanged_bytes, reads_files),
            strategy=strategy,
            changes=tuple((each.where, each.what, each.effect) for each in _preview(captured, namespace, *effects)),
        )

    def __repr__(self) -> str:
        travels = [] if self.rows else ["Nothing of the notebook is sent with this cell."]
        return "\n\n".join([*travels, *(table.as_text() for table in self._tables()), *filter(None, [self.sent])])

    def _repr_html_(self) -> str:
        tables = "".join(table.as_html() for table in self._tables())
        return tables + (f"<div>{escape(self.sent)}</div>" if self.sent else "") or escape(repr(self))

    def _tables(self) -> list[TextTable]:
        plan = ("where", "what", f"with --strategy {self.strategy}")
        return [
            each
            for each in (TextTable(head=_HEAD, rows=self.rows), TextTable(head=plan, rows=self.changes))
            if each.rows
        ]


def _sent(
    captured: Captured,
    namespace: dict[str, Any],
    unchanged_bytes: Callable[[payload.Packed], int],
    reads_files: Callable[[], bool],
) -> str:
    inputs = {item.name: item.value for item in captured.inputs}
    try:
        packed = payload.pack_inputs(inputs, namespace, reads_files=reads_files)
    except PayloadError:  # the table names the value
        return ""
    if packed.size_bytes < LARGE_BYTES:
        return ""
    known_bytes = unchanged_bytes(packed)
    if not known_bytes:
        return f"{size(packed.size_bytes)} would be sent: the machines of the ranks have none of it yet."
    return (
        f"{size(packed.size_bytes - known_bytes)} would be sent; {size(known_bytes)} has not changed since the "
        "machines of the ranks got it, and is not sent again."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedChange:
    """A place that a strategy will change or leave unchanged."""

    where: str
    """The place: `line 5`, or `fit, its line 2` for a function of another cell."""
    what: str
    effect: str


def _preview(captured: Captured, namespace: Mapping[str, Any], model: str, data: str) -> tuple[_PlannedChange, ...]:
    """Return the places, in the cell and in code and values sent with it, where a strategy takes effect.

    Args:
        captured: The cell.
        namespace: The names of the notebook.
        model: The strategy's effect on a model; empty if it has none.
        data: Its effect on a data loader.
    """
    if not model:
        return ()
    effects = f"its model is {model}", data
    changes = list(_in_source(captured.cell.source, "line {}", namespace, effects))
    values = {item.name: item.value for item in captured.inputs}
    values |= {name: namespace[name] for name in reachable(captured.inputs, namespace)}
    for name, value in values.items():
        if functions := _functions(name, value):
            for place, function in functions.items():
                changes += _in_source(_source(function), f"{place}, its line {{}}", namespace, effects)
        elif _is_a(value, "torch.optim.optimizer.Optimizer"):
            changes.append(_PlannedChange(where="captured", what=name, effect=effects[0]))
        elif _is_a(value, "torch.utils.data.dataloader.DataLoader"):
            changes.append(_PlannedChange(where="captured", what=name, effect=effects[1]))
    return tuple(changes)


def _functions(name: str, value: object) -> dict[str, FunctionType]:
    """Return a function itself, or the methods of a class, since the source of a notebook's class can only be found
    through them."""
    if isinstance(value, FunctionType):
        return {name: value}
    if not isinstance(value, type) or value.__module__ != "__main__":
        return {}
    methods = {key: getattr(each, "__func__", each) for key, each in vars(value).items()}
    return {f"{name}.{key}": each for key, each in methods.items() if isinstance(each, FunctionType)}


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def _in_source(
    source: str, where: str, namespace: Mapping[str, Any], effects: tuple[str, str]
) -> Iterator[_PlannedChange]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(node.func)
        if effect := _effect(name, tree, namespace, effects):
            text = ast.unparse(node)
            short = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
            yield _PlannedChange(where=where.format(node.lineno), what=short, effect=effect)


def _effect(name: str, tree: ast.AST, namespace: Mapping[str, Any], effects: tuple[str, str]) -> str:
    last = name.rpartition(".")[2]
    if last in manual_parallelism.EFFECTS:
        return manual_parallelism.EFFECTS[last]
    if last == "DataLoader":
        return effects[1]
    if _is_optimizer(name, tree, namespace):
        return effects[0]
    return ""


def _is_optimizer(name: str, tree: ast.AST, namespace: Mapping[str, Any]) -> bool:
    first, *rest = name.split(".")
    value = namespace.get(first)
    for part in rest:
        value = getattr(value, part, None) if inspect.ismodule(value) else None
    if inspect.isclass(value):
        return _has_base(value, "torch.optim.optimizer.Optimizer")
    if "optim" in (first, *rest[:-1]):
        return rest[-1][:1].isupper()
    return name in _imported_from_optim(tree)


def _imported_from_optim(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.optim":
            yield from (alias.asname or alias.name for alias in node.names)


def _is_a(value: object, base: str) -> bool:
    return _has_base(type(value), base)


def _has_base(kind: type, base: str) -> bool:
    """Return whether a class has a base with this name; names need no import."""
    return any(f"{each.__module__}.{each.__qualname__}" == base for each in kind.__mro__)
