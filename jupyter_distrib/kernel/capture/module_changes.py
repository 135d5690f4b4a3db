"""Finds what the notebook has changed in modules, classes and registries, of which each rank has its own. Kernel side,
in the thread that runs the cell; imports nothing.

It reads the cells that were run: statements that assign to an attribute of something imported (`config.LR = 3`,
`nn.ReLU.forward = mine`), change a container of a local module, or register something (`@registry.register`,
`add_safe_globals([P])`). Constants of local modules that a cell reads are also compared with the module's file, and
functions and classes of the notebook are looked for in these modules, their classes and registries: whatever put them
there, such as a decorator or a function that patches, did not run on the ranks.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import getattr_static
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from jupyter_distrib.kernel.capture.capture import Input, reachable
from jupyter_distrib.system import file_owner
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.importable import is_only_here

_NOT_ON_RANKS = frozenset(
    {"IPython", "ipykernel", "ipywidgets", "matplotlib_inline", "traitlets", "google", "jupyter_distrib"}
)
"""Libraries of the kernel, whose state has no meaning on a rank."""
_KNOWN_TO_TRAVEL = (
    "torch.backends",
    "os",
    "sys",
    "warnings",
    "logging",
    "PIL.Image",
    "PIL.ImageFile",
    "atexit",
    "signal",
    "random",
)
"""Modules whose variables are sent as settings or environment, or that each process has for itself."""
_REGISTERS = re.compile(r"(?:^|_)register(?:_|$)|^add_safe_globals$|^custom_op$|^def_op$|^impl$")
_CHANGES_CONTAINER = frozenset(
    {"append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "add", "discard"}
)
_PERHAPS = re.compile(
    r"[\w\])]\.\w+[^=\n]*(?<![=!<>])=(?!=)|regist|add_safe_globals|setattr|custom_op|\.\w+\.(?:append|update)\("
)
"""Text without which no cell changes anything here: most need not be parsed."""
_MAGICS_THAT_RUN = ("time", "capture", "timeit", "prun")


@data_class
class Change:
    """A statement of the notebook that changes something outside of it."""

    target: str
    """The name that it changes or calls, as written: `config.LR`, `registry.register`."""
    module: str
    """The module that has it."""
    cell: str
    line: int
    registers: bool = False

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]

    @property
    def key(self) -> tuple[str, str]:
        return self.target, f"{self.cell}:{self.line}"


class ModuleChanges:
    """The changes that cells of this notebook have made so far. Each is reported once."""

    def __init__(self) -> None:
        self._read = 0
        """Number of cells that were looked at."""
        self._imports: dict[str, tuple[str, str]] = {}
        """The names that imports have bound: the module, and the name in it or an empty string."""
        self._found: dict[str, Change] = {}
        self._files: dict[str, tuple[int, _Constants]] = {}
        """Time of change and constants of local modules, by the file's path."""
        self._said: set[tuple[str, str]] = set()

    def sentences(
        self, source: str, inputs: Sequence[Input], namespace: Mapping[str, Any], setups: Callable[[], list[str]]
    ) -> list[str]:
        """Return a sentence on each change that matters to a cell and was not reported yet.

        Args:
            source: The cell.
            inputs: What it reads of the notebook.
            namespace: The names of the notebook.
            setups: Returns the sources of the set-ups, in which changes hold on the ranks.
        """
        self._scan_cells(namespace)
        touched = {each for each in self._touched(source, inputs, namespace) if not is_only_here(each)}
        if not touched:
            return []
        new = [each for each in self._found.values() if self._matters(each, touched, namespace)]
        of_setups = setups()
        done = _names_changed_by([source, *of_setups]) if new else set()
        found = [self._sentence(each) for each in new if each.name not in done]
        local = _local_modules(touched)
        return [*found, *self._other_constants(local, [source, *of_setups]), *self._own_definitions(local, of_setups)]

    def _touched(self, source: str, inputs: Sequence[Input], namespace: Mapping[str, Any]) -> set[str]:
        """Return the modules that a cell reads or imports, also in functions of the notebook."""
        values = [part for each in inputs for part in _parts(each.value)]
        if any(each.key not in self._said for each in self._found.values()):  # this takes longer than the rest
            values += [namespace[name] for name in reachable(inputs, namespace)]
        return {name for value in values if (name := _home(value))} | set(_imported_modules(source))

    def _scan_cells(self, namespace: Mapping[str, Any]) -> None:
        cells = namespace.get("In")
        if not isinstance(cells, list):
            return
        for number in range(self._read, len(cells)):
            text = cells[number]
            if isinstance(text, str) and ("import" in text or _PERHAPS.search(text)):
                self._scan_cell(text, f"Cell In[{number}]", namespace)
        self._read = len(cells)

    def _scan_cell(self, text: str, cell: str, namespace: Mapping[str, Any]) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
        for node in _statements(tree.body):
            if body := _body_of_magic(node):
                self._scan_cell("\n" + body, cell, namespace)
            for name, module, attribute in _bound_by_import(node):
                self._imports[name] = module, attribute
            for target, registers in _changed_by(node):
                module = self._owner(target, namespace, registers=registers)
                if module:
                    dotted, line = ast.unparse(target).rstrip("."), getattr(target, "lineno", node.lineno)
                    dotted = dotted if "." in dotted else f"{module}.{dotted}"
                    self._found[dotted] = Change(
                        target=dotted, module=module, cell=cell, line=line, registers=registers
                    )

    def _owner(self, target: ast.expr, namespace: Mapping[str, Any], *, registers: bool) -> str:
        """Return the name of the module that has the target; empty if it travels or is the notebook's own."""
        names = _chain(target)
        if names[:1] == [] or names[0] not in self._imports:
            return ""
        home, attribute = self._imports[names[0]]
        value: Any = namespace.get(names[0])
        with suppress(Exception):  # a module may compute its attributes
            if attribute and getattr(sys.modules.get(home), attribute, None) is not value:
                return ""
        if len(names) == 1:
            return _of_ranks(home) if registers else ""
        for name in names[1:-1]:
            try:
                value = vars(value)[name] if isinstance(value, ModuleType) else getattr(value, name)
            except Exception:  # noqa: BLE001 - foreign code
                return ""
            home = value.__name__ if isinstance(value, ModuleType) else home
        if registers:
            return _of_ranks(home)
        if isinstance(value, type):
            return _of_ranks(value.__module__)
        by_name = not attribute or isinstance(namespace.get(names[0]), type)  # an instance is sent with its state
        return _of_ranks(home) if isinstance(value, ModuleType) or (_is_local(home) and by_name) else ""

    def _matters(self, change: Change, touched: set[str], namespace: Mapping[str, Any]) -> bool:
        if change.key in self._said or not _near(change.module, touched):
            return False
        self._said.add(change.key)
        return change.registers or not (self._is_as_in_file(change) or self._was_restored(change, namespace))

    def _was_restored(self, change: Change, namespace: Mapping[str, Any]) -> bool:
        """Return whether the attribute has a function or class of its own library again."""
        value: Any = namespace.get(change.target.partition(".")[0])
        for name in change.target.split(".")[1:]:
            value = getattr(value, name, None)
        home = getattr(value, "__module__", None)
        return callable(value) and isinstance(home, str) and _top(home) == _top(change.module)

    def _is_as_in_file(self, change: Change) -> bool:
        module = sys.modules.get(change.module)
        name, constants = change.name, self._constants(module) if module is not None else {}
        return name in constants and _same(constants[name], getattr(module, name, None))

    def _sentence(self, change: Change) -> str:
        place = f"{change.cell}, line {change.line}"
        cure = "put that line into a cell with %%distributed_setup"
        if change.registers:
            return f"{change.target} was called in the notebook ({place}), and not on the ranks: {cure}"
        module, name = sys.modules.get(change.module), change.name
        constants = self._constants(module) if module is not None else {}
        self._said.add((f"{change.module}.{name}", repr(getattr(module, name, None))))
        there = f"have {constants[name]!r}" if name in constants else "have it as it is when it is imported"
        return f"{change.target} was changed in the notebook ({place}), and the ranks {there}: {cure}"

    def _other_constants(self, modules: Sequence[ModuleType], done: Sequence[str]) -> Iterator[str]:
        """Yield a sentence on each constant of a local module that the notebook has changed in another way."""
        for module in modules:
            name, constants = module.__name__, self._constants(module)
            if not constants:
                continue
            for constant, here in list(vars(module).items()):
                there = constants.get(constant, None if constant[0] == "_" or constants.star else _MISSING)
                if there is None and constant not in constants:
                    continue
                key = f"{name}.{constant}", "" if constant in constants.rebound else repr(here)[:1000]
                if type(here) not in _PLAIN or _same(here, there) or key in self._said:
                    continue
                if there is _MISSING and constant in constants.bound:
                    continue
                self._said.add(key)
                if constant in _names_changed_by(done):
                    continue
                lacking = "absent" if there is _MISSING else repr(there)
                yield (
                    f"{name}.{constant} is {here!r} in the notebook, and {lacking} on the ranks, which import "
                    f"{name} anew: set it in a cell with %%distributed_setup"
                )

    def _own_definitions(self, modules: Sequence[ModuleType], setups: Sequence[str]) -> Iterator[str]:
        """Yield a sentence on each place of a local module that holds functions or classes of the notebook, and of
        which no statement was reported."""
        reported = {each.module for each in self._found.values() if each.key in self._said and each.registers}
        names = {(each.module, each.name) for each in self._found.values()}
        prepared = {module for source in setups for module in _imported_modules(source)}
        for module in modules:
            if module.__name__ in prepared:
                continue
            for path, is_registry in _places_of_own(module):
                key = f"{module.__name__}.{path}", "own"
                if key in self._said or (module.__name__, path.rpartition(".")[2]) in names:
                    continue
                self._said.add(key)
                if is_registry and module.__name__ in reported:
                    continue
                what = "holds what the notebook has put into it" if is_registry else "was set in the notebook"
                yield (
                    f"{module.__name__}.{path} {what}, and the ranks have it as it is when it is imported: do that in "
                    "a cell with %%distributed_setup"
                )

    def _constants(self, module: ModuleType) -> _Constants:
        """Return the constants that a local module's file binds once; empty if the file has changed since it was
        first read, as ranks then have the new ones."""
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or not _is_local(module.__name__):
            return _Constants()
        try:
            changed_ns = os.stat(path).st_mtime_ns
            if path not in self._files:
                with open(path, encoding="utf-8") as file:
                    self._files[path] = changed_ns, _constants_in(ast.parse(file.read()))
        except (OSError, SyntaxError, ValueError):
            return _Constants()
        known_ns, constants = self._files[path]
        return constants if known_ns == changed_ns else _Constants()


_PLAIN = (bool, int, float, str, bytes, type(None), tuple)
_MISSING = object()
_DEPTH = 200
"""The number of entries of a registry that are looked at."""


class _Constants(dict[str, Any]):
    """The constants that a module's file binds."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: set[str] = set()
        """All names that it binds anywhere."""
        self.rebound: set[str] = set()
        """Constants that one of its functions binds anew: they may change all the time."""
        self.star = False
        """Whether it imports names that it does not mention."""


def _local_modules(touched: set[str]) -> list[ModuleType]:
    """Return the local modules of these names, and the local modules that those use."""
    found, left = dict[str, ModuleType](), [name for name in touched if _is_local(name)]
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        if name in found or not isinstance(module, ModuleType):
            continue
        found[name] = module
        used = {home for value in list(vars(module).values()) if (home := _home(value)) and home not in found}
        left += [home for home in used if _is_local(home)]
    return [found[name] for name in sorted(found)]


def _places_of_own(module: ModuleType) -> Iterator[tuple[str, bool]]:
    """Yield the places in a module that hold a function or class of the notebook: its own names, those of its classes,
    and registries; and whether it is a registry."""
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if _is_of_notebook(value):
            yield name, False
        elif _holds_of_notebook(value):
            yield name, True
        elif isinstance(value, type):
            if value.__module__ == module.__name__:
                for inner, each in list(vars(value).items()):
                    if _is_of_notebook(each):
                        yield f"{name}.{inner}", False
                    elif _holds_of_notebook(each):
                        yield f"{name}.{inner}", True
        elif _is_local(type(value).__module__):
            state = getattr(value, "__dict__", None)
            if type(state) is dict and any(map(_holds_of_notebook, list(state.values()))):
                yield name, True


def _is_of_notebook(value: object) -> bool:
    cls = type(value)
    if cls is partial:
        return _is_of_notebook(value.func)  # type: ignore[attr-defined]
    if issubclass(cls, FunctionType):
        return value.__globals__.get("__name__") == "__main__"  # type: ignore[attr-defined, no-any-return]
    if issubclass(cls, (staticmethod, classmethod)):
        return _is_of_notebook(value.__func__)  # type: ignore[attr-defined]
    if cls is property:
        return _is_of_notebook(value.fget)  # type: ignore[attr-defined]
    if issubclass(cls, type):
        return value.__module__ == "__main__"
    return cls.__module__ == "unittest.mock"


def _holds_of_notebook(value: object) -> bool:
    if isinstance(value, dict):
        entries: Iterator[object] = iter(list(value.values()))
    elif isinstance(value, (list, set, tuple)):
        entries = iter(list(value))
    else:
        return False
    return any(map(_is_of_notebook, islice(entries, _DEPTH)))


def _parts(value: object) -> Iterator[object]:
    """Yield a value, and what a list, tuple or dictionary holds, as the arguments of a call do."""
    yield value
    if type(value) in (list, tuple, dict):
        held = value.values() if type(value) is dict else value
        yield from islice(held, _DEPTH)  # type: ignore[call-overload]


def _called(value: Any) -> object:
    """Return the function that a method, a partial, a decorated or a cached function calls; others as they are."""
    seen = set[int]()
    while id(value) not in seen:
        seen.add(id(value))
        cls = type(value)
        if cls is partial:
            value = value.func
        elif cls is MethodType:
            value = value.__func__
        elif issubclass(cls, (FunctionType, type)) or not callable(value):
            return value
        elif (inner := getattr_static(value, "__wrapped__", None)) is not None:
            value = inner
        else:
            return value
    return value  # it wraps itself


def _home(value: object) -> str:
    """Return the module that a value of the notebook comes from; empty if it is the notebook's own."""
    value = _called(value)
    cls = type(value)  # `isinstance` would read the `__class__` of proxies, which loads their target
    if issubclass(cls, ModuleType):
        return str(getattr(value, "__name__", ""))
    is_definition = issubclass(cls, (type, FunctionType, BuiltinFunctionType))
    home = getattr(value, "__module__", None) if is_definition else cls.__module__
    return "" if not isinstance(home, str) or home in ("__main__", "builtins") else home


def _same(here: object, there: object) -> bool:
    return type(here) is type(there) and here == there


def _top(module: str) -> str:
    return module.partition(".")[0]


def _of_ranks(module: str) -> str:
    """Return the module; empty if what is set in it travels, or has no meaning on a rank."""
    travels = _top(module) in _NOT_ON_RANKS or module == "__main__"
    return (
        "" if travels or any(module == each or module.startswith(f"{each}.") for each in _KNOWN_TO_TRAVEL) else module
    )


def _is_local(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and file_owner.is_users(file)


def _near(module: str, touched: set[str]) -> bool:
    """Return whether a cell that touches these modules may reach this one: in the same library, or both local."""
    top, local = _top(module), _is_local(module)
    return any(_top(each) == top or (local and _is_local(each)) for each in touched)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements that run when the cell runs, also those inside others."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _body_of_magic(node: ast.stmt) -> str:
    """Return the text that a cell magic of IPython runs in the notebook; empty for other statements."""
    match node:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(attr="run_cell_magic"),
                args=[ast.Constant(value=str(name)), _, ast.Constant(value=str(text))],
            )
        ) if name in _MAGICS_THAT_RUN:
            return text
    return ""


def _bound_by_import(node: ast.stmt) -> Iterator[tuple[str, str, str]]:
    """Yield the names that an import binds, each with the module, and the name in it or an empty string."""
    match node:
        case ast.Import():
            for alias in node.names:
                yield alias.asname or _top(alias.name), alias.name if alias.asname else _top(alias.name), ""
        case ast.ImportFrom(module=str(module)):
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield alias.asname or alias.name, *((inner, "") if inner in sys.modules else (module, alias.name))


def _names_changed_by(sources: Sequence[str]) -> set[str]:
    """Return the last names of what these programs change."""
    found: set[str] = set()
    for source in sources:
        with suppress(SyntaxError, ValueError):
            changes = (each for node in _statements(ast.parse(source).body) for each in _changed_by(node))
            found |= {ast.unparse(target).rstrip(".").rpartition(".")[2] for target, _ in changes}
    return found


def _changed_by(node: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """Yield what a statement may change outside of the notebook, and whether it does so by registering."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from ((part, False) for target in targets for part in _attributes(target))
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield from ((part, False) for part in _attributes(target))
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if _registers(called):
                    yield called, True
        case ast.Expr(value=ast.Call(func=func, args=args)):
            yield from _changed_by_call(func, args)


def _changed_by_call(func: ast.expr, args: Sequence[ast.expr]) -> Iterator[tuple[ast.expr, bool]]:
    match func, args:
        case ast.Name(id="setattr"), [owner, ast.Constant(value=str(name)), _]:
            yield ast.Attribute(value=owner, attr=name, ctx=ast.Load()), False
        case ast.Attribute(value=ast.Attribute() as container, attr=method), _ if method in _CHANGES_CONTAINER:
            yield ast.Attribute(value=container, attr="", ctx=ast.Load()), False
        case _ if _registers(func):
            yield func, True
        case ast.Call(), _ if _registers(func.func):  # `register("name")(thing)`
            yield func.func, True


def _attributes(target: ast.expr) -> Iterator[ast.expr]:
    match target:
        case ast.Attribute():
            yield target
        case ast.Subscript(value=ast.Attribute() as container):
            yield ast.Attribute(value=container, attr="", ctx=ast.Load())
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _attributes(part)


def _registers(called: ast.expr) -> bool:
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return bool(_REGISTERS.search(name))


def _chain(node: ast.expr) -> list[str]:
    """Return the names of `base.attribute.attribute`; none for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _imported_modules(source: str) -> Iterator[str]:
    """Yield the names of the modules that the text of a cell imports."""
    for match in re.finditer(r"(?:^|;)[ \t]*(?:from\s+([\w.]+)\s+import\b|import\s+([\w., ]+))", source, re.MULTILINE):
        if match[1]:
            yield match[1]
        yield from (part.split()[0] for part in (match[2] or "").split(",") if part.strip())


def _constants_in(tree: ast.Module) -> _Constants:
    """Return the constants that a module binds by one literal. A number that one of its functions binds anew is not a
    constant, but a counter."""
    bound: dict[str, list[ast.expr | None]] = {}
    found = _Constants()
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names):
                found.rebound.update(names)
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.bound.add(name)
            case ast.AsyncFunctionDef(name=name):
                found.bound.add(name)
            case ast.alias(name=name, asname=as_name):
                found.star = found.star or name == "*"
                found.bound.add(as_name or _top(name))
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                found.bound.add(name)
    found.bound |= found.rebound
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.setdefault(node.target.id, []).append(node.value)
    for name, values in bound.items():
        if len(values) == 1 and values[0] is not None and name[0] != "_":
            with suppress(ValueError, TypeError, SyntaxError, MemoryError):
                value = ast.literal_eval(values[0])
                if type(value) in _PLAIN and not (name in found.rebound and type(value) in (int, float)):
                    found[name] = value
    return found
