"""The capture of a cell: a program with the front end's line numbers, and the notebook's values that it reads.

Pure: runs in the kernel's main thread, executes nothing of the cell, pickles nothing. `kernel/capture/program.py` makes
the program of the cell's text, `kernel/capture/names.py` finds out which names it reads before it binds them; this file
looks them up, with the submodules that the cell reads as attributes: `import torch.distributed.checkpoint` in the
notebook binds `torch` alone, and the cell reads `torch.distributed.checkpoint.save`.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import functools
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from jupyter_distrib.errors import CaptureError
from jupyter_distrib.kernel.capture import names_in_texts
from jupyter_distrib.kernel.capture.names import Need, analyse
from jupyter_distrib.kernel.capture.program import MagicsRead, Transform, imported, program_of, without_time
from jupyter_distrib.system import annotation_texts, call_parts
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.nested_code import codes_in
from jupyter_distrib.wire import messages as m

MODULE_NAMES = frozenset(
    {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__", "__builtin__", "__annotations__"}
)
"""Names that every module has for itself; the notebook's values under them never travel."""
PROVIDED = MODULE_NAMES.union(call_parts.NAMES_OF_RANKS)
"""Names that a rank puts into the cell's namespace by itself."""

_HIDDEN_BUILTINS = frozenset({"exit", "quit"})


@data_class
class Input:
    """A value of the notebook that the cell needs."""

    name: str
    value: object
    line: int
    """The first line of the cell that reads it (the magic line is line 1); 0 if only `--with` names it."""
    certain: bool
    """Whether the cell is sure to read it; False in a function that may not run, or if the cell may have bound it by
    then."""
    reason: str
    submodules: tuple[str, ...] = ()
    """The submodules that the notebook has imported and the cell reads as attributes, if the value is a module."""


@data_class
class Captured:
    """A cell that compiles, and everything that it needs from the notebook."""

    cell: m.Cell
    inputs: tuple[Input, ...]
    defines: tuple[str, ...]
    """The names that the cell binds at module level, in order."""
    imports: frozenset[str]
    """The names among `defines` that an import binds."""
    reads: frozenset[str]
    """The names that it reads, or perhaps reads, before it binds them."""
    missing: tuple[tuple[str, int], ...]
    """The names that it certainly reads although nothing defines them, each with its line."""


@data_class
class Dropped:
    """A name that a distributed cell defined on the ranks only."""

    cell: str
    """The label of that cell: `Cell In[3]`."""
    imported: bool = False
    kept: bool = False
    """Whether it was to keep the name, and failed, or was stopped before every rank had it."""
    failed: bool = False
    """Whether it was stopped or failed, perhaps before it had defined the name."""

    def explained(self, name: str, place: str = "") -> str:
        if self.kept:
            return (
                f"`{name}`{place} is not in this notebook: {self.cell}, which is to keep it, failed, or was stopped "
                "before every rank had it. Run that cell again."
            )
        if self.failed and not self.imported:
            return (
                f"`{name}`{place} is not in this notebook: {self.cell}, which is to define it on the ranks, was "
                f"stopped or failed. Run it again with `--keep {name}`."
            )
        did, cure = "defined", f"Add `--keep {name}` to that cell."
        if self.imported:
            did, cure = "imported", "Import it in this cell, or in a cell of its own."
        return (
            f"`{name}`{place} is not in this notebook: {self.cell} {did} it on the ranks, "
            f"where it ended with that run. {cure}"
        )


def capture(
    body: str,
    namespace: Mapping[str, object],
    *,
    filename: str,
    with_names: Sequence[str] = (),
    dropped: Mapping[str, Dropped] | None = None,
    first_line: int = 2,
    provided: Collection[str] = PROVIDED,
    transform: Transform | None = None,
) -> Captured:
    """Turn the text of a cell into a program and its inputs.

    `body` is the cell without its magic line and begins on the front end's `first_line`. `dropped` are the names that
    earlier cells defined on the ranks only. `provided` are the names that ranks have by themselves; the notebook's
    own value under such a name takes precedence. `transform` is IPython's `shell.transform_cell`, called only for a
    cell that is not Python.

    Raises:
        SyntaxError: The cell is not valid; the error has the front end's line and comes before anything is started.
        CaptureError: The cell has a magic that ranks do not have, a cell magic, or an unknown `--with` name.
    """
    body, timed = without_time(body, first_line)
    source, program = program_of(body, filename, first_line, transform)
    inherited = namespace.get("annotations") is __future__.annotations  # IPython compiles all later cells that way
    imports = frozenset(imported(program))
    if "get_ipython" in source:
        program = MagicsRead(transform).visit(program)
    if names_in_texts.MARK.search(source):
        names_in_texts.add(program)
    names = analyse(program, future_annotations=inherited)
    inputs = {need.name: _input(need, namespace) for need in names.needs if _travels(need.name, namespace, provided)}
    for name, modules in read_submodules(program, {name: each.value for name, each in inputs.items()}).items():
        inputs[name] = replace(inputs[name], submodules=modules)
    for name in with_names:
        inputs[name] = _named(name, namespace, inputs.get(name), dropped or {})
    known = {*inputs, *provided, *MODULE_NAMES}
    return Captured(
        cell=m.Cell(source=source, filename=filename, future_annotations=inherited, timed=timed),
        inputs=tuple(inputs.values()),
        defines=names.defines,
        imports=imports,
        reads=frozenset(need.name for need in names.needs),
        missing=tuple(
            (need.name, need.line)
            for need in names.needs
            if need.certain and need.name not in known and not _is_builtin(need.name)
        ),
    )


def explain_missing(captured: Captured, dropped: Mapping[str, Dropped]) -> CaptureError | None:
    """Return an error that names the cell which defined a missing name on the ranks; None if no missing name was ever
    defined on the ranks."""
    for name, line in captured.missing:
        if (was := dropped.get(name)) is not None:
            return CaptureError(was.explained(name, f" (line {line})"))
    return None


def global_names(value: object) -> set[str]:
    """Return the names that a function, class or instance of the notebook looks up as globals or builtins when it
    runs, or when its type hints are resolved."""
    return {name for each in _definitions(value, set()) for name in _looked_up(each)}


def reachable(inputs: Iterable[Input], namespace: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the names of the notebook that are reachable only through functions, classes and instances among the
    inputs.

    Returns:
        Name -> the names that lead to it, the input first: `{"model": ("train", "helper")}`.
    """
    start: tuple[str, ...] = ()
    queue = deque((each.name, each.value, start) for each in inputs)
    seen = {name for name, _, _ in queue}
    found: dict[str, tuple[str, ...]] = {}
    while queue:
        owner, value, way = queue.popleft()
        for name in sorted(global_names(value)):
            if name not in seen and _travels(name, namespace, PROVIDED):
                seen.add(name)
                found[name] = (*way, owner)
                queue.append((name, namespace[name], found[name]))
    return found


# Inputs.


def _travels(name: str, namespace: Mapping[str, object], provided: Collection[str]) -> bool:
    if name not in namespace or name in MODULE_NAMES:
        return False
    return not ((name in provided or _is_builtin(name)) and _is_ipythons(namespace[name]))


def _is_builtin(name: str) -> bool:
    """Return whether the name is a builtin of Python, even one that IPython hides while it executes a cell."""
    return hasattr(builtins, name) or name in _HIDDEN_BUILTINS


def _is_ipythons(value: object) -> bool:
    """Return whether IPython itself puts a value into every notebook, such as `get_ipython`, `exit` and `open`."""
    # its `open` is a function whose `__module__` is that of the builtin
    module = value.__globals__["__name__"] if isinstance(value, FunctionType) else getattr(value, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("IPython", "ipykernel")


def _input(need: Need, namespace: Mapping[str, object]) -> Input:
    reason = f"{'' if need.certain else 'perhaps '}read on line {need.line}"
    return Input(name=need.name, value=namespace[need.name], line=need.line, certain=need.certain, reason=reason)


def _named(name: str, namespace: Mapping[str, object], known: Input | None, dropped: Mapping[str, Dropped]) -> Input:
    if name in namespace:
        line = known.line if known else 0
        return Input(name=name, value=namespace[name], line=line, certain=True, reason="named by --with")
    if name in dropped:
        raise CaptureError(dropped[name].explained(name, " (named by --with)"))
    near = get_close_matches(name, [each for each in namespace if not each.startswith("_")], n=1)
    hint = f" Did you mean `{near[0]}`?" if near else " Define it in an earlier cell, or leave it out."
    raise CaptureError(f"--with names `{name}`, which is not in this notebook.{hint}")


# The names that the notebook's functions and classes lead to.


def _definitions(value: object, seen: set[int]) -> Iterator[FunctionType | type]:
    """Yield the notebook's functions and classes that travel with a value."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType) and value.__globals__.get("__name__") == "__main__":
        yield value
    if isinstance(value, type) and value.__module__ == "__main__":
        yield value
    for part in _parts(value):
        yield from _definitions(part, seen)


def _parts(value: object) -> Iterator[object]:
    match value:
        case FunctionType():  # a library's decorator holds the notebook's function in its closure
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
            if isinstance(registry := value.__dict__.get("registry"), MappingProxyType):  # functools.singledispatch
                yield from registry.values()
        case MethodType():
            yield from (value.__func__, value.__self__)
        case property():
            yield from (value.fget, value.fset, value.fdel)
        case staticmethod() | classmethod():
            yield value.__func__
        case functools.partial() | functools.cached_property():
            yield value.func
        case type():
            if value.__module__ == "__main__":
                yield from (*vars(value).values(), *value.__bases__)
        case ModuleType():
            return
        case _:
            yield getattr(value, "__dict__", {}).get("__wrapped__")  # functools.lru_cache
            if type(value).__module__ == "__main__":
                yield type(value)


_EMPTY = CellType()
_LOOKUPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL"})


def _looked_up(definition: FunctionType | type) -> Iterator[str]:
    yield from annotation_texts.names_of(definition)
    for nested in codes_in(definition.__code__) if isinstance(definition, FunctionType) else ():
        yield from (each.argval for each in dis.get_instructions(nested) if each.opname in _LOOKUPS)


def read_submodules(program: ast.AST, values: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the loaded modules inside each value's module that the program reads, by the value's name."""
    modules: dict[str, Any] = {name: value for name, value in values.items() if issubclass(type(value), ModuleType)}
    if not modules:
        return {}
    found: dict[str, dict[str, None]] = {}
    for base, attributes in _chains(program):
        if base in modules:
            found.setdefault(base, {}).update(dict.fromkeys(_loaded(modules[base], attributes)))
    return {name: tuple(names) for name, names in found.items() if names}


def _chains(program: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the attributes of every `name.attribute.attribute`."""
    for node in ast.walk(program):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if attributes and isinstance(node, ast.Name):
            yield node.id, attributes[::-1]


def _loaded(module: ModuleType, attributes: list[str]) -> Iterator[str]:
    """Yield the names of the modules among the attributes, from the outside in."""
    for attribute in attributes:
        name = f"{module.__name__}.{attribute}"
        inner = getattr(module, attribute, None)
        if not isinstance(inner, ModuleType) or inner.__name__ != name or sys.modules.get(name) is not inner:
            return
        yield name
        module = inner
