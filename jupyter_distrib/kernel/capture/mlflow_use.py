"""Finds out whether a cell or function uses MLflow, and the experiment and store that it names itself. Kernel side,
in the thread that runs the cell; nothing is executed or imported, and code that does not contain the word costs only
a search for it.

A cell counts as using MLflow if its code, the notebook's functions that travel with it, or a module of the user's own
that these import names it: `import mlflow`, `MLFlowLogger`, `report_to="mlflow"`. Installed packages are not read.
"""

from __future__ import annotations

import ast
import dis
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from jupyter_distrib.libraries.mlflow_store import MLflowUse
from jupyter_distrib.system import record_file
from jupyter_distrib.system.nested_code import codes_in

WORD = "mlflow"
_SPELLINGS = (b"mlflow", b"MLflow", b"MLFlow")
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)\s+(\w+)", re.MULTILINE)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST_FILES = 200
"""Number of files of one package to read."""
_ITEMS = 20
"""Number of items of a list or attributes of an object to look at."""
_DEPTH = 3
"""A trainer holds its arguments, which hold the names of the trackers."""


def of(source: str, data: bytes, sent: Iterable[object], values: Mapping[str, object]) -> MLflowUse | None:
    """Return how a cell uses MLflow; None if it does not.

    Args:
        source: The program that the ranks execute.
        data: The pickle of its inputs.
        sent: The notebook's functions and classes in that pickle.
        values: The inputs.
    """
    functions = list(_functions(sent))
    codes: list[tuple[CodeType, Mapping[str, Any]]] = []
    if WORD in source.lower() and (compiled := _compiled(source)) is not None:
        codes.append((compiled, values))
    if any(spelling in data for spelling in _SPELLINGS):
        codes += [(function.__code__, function.__globals__) for function in functions]
    read = {id(value): value for value in (*values.values(), *_read_by(functions))}.values()
    named = any(_names_it(code) for code, _ in codes) or any(_holds(value, _DEPTH) for value in read)
    if not named and not _modules_name_it(source, functions, read):
        return None
    found = {name: value for code, names in codes for name, value in _named_places(code, names)}
    return MLflowUse(**found)


def _functions(sent: Iterable[object]) -> Iterator[FunctionType]:
    for item in sent:
        members = vars(item).values() if isinstance(item, type) else (item,)
        for member in members:
            function = getattr(member, "__func__", member)  # of a static or class method
            if isinstance(function, FunctionType):
                yield function


def _compiled(source: str) -> CodeType | None:
    try:
        compiled: CodeType = compile(source, "", "exec", dont_inherit=True, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return None
    return compiled


def _names_it(code: CodeType) -> bool:
    """Return whether code names MLflow: as a name or attribute, or as a string of just that name."""
    for each in codes_in(code):
        if any(WORD in name.lower() for name in (*each.co_names, *each.co_freevars)):
            return True
        if any(map(_is_its_name, each.co_consts)):
            return True
    return False


def _is_its_name(constant: object) -> bool:
    if isinstance(constant, (tuple, frozenset, list)):
        return any(map(_is_its_name, list(constant)[:_ITEMS]))
    return isinstance(constant, str) and constant.lower() == WORD


# What the inputs hold.


def _read_by(functions: list[FunctionType]) -> Iterator[object]:
    """Yield the values of the notebook that its functions look up."""
    for function in functions:
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        yield from (function.__globals__[name] for name in names & function.__globals__.keys())


def _holds(value: object, depth: int) -> bool:
    """Return whether a value comes from MLflow, or has an attribute that names it, such as the arguments of a
    trainer."""
    if isinstance(value, (str, bytes, int, float, type(None))):
        return False
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == WORD
    kind = value if isinstance(value, type) else type(value)
    if WORD in f"{kind.__module__}.{kind.__qualname__}".lower():
        return True
    if isinstance(value, FunctionType):
        return str(value.__module__).partition(".")[0] == WORD
    if not depth or isinstance(value, type) or kind.__module__ in ("torch", "numpy", "torch.nn.parameter"):
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds(each, depth - 1) for each in value[:_ITEMS])
    if isinstance(value, dict):
        return any(_holds(each, depth - 1) for each in list(value.values())[:_ITEMS])
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return False
    if any(_is_its_name(own.get(name)) for name in ("report_to", "log_with")):
        return True
    return any(_holds(each, depth - 1) for each in list(own.values())[:_ITEMS] if not isinstance(each, FunctionType))


# The user's own modules.


def _modules_name_it(source: str, functions: list[FunctionType], read: Iterable[object]) -> bool:
    names = set(_IMPORTED.findall(source)) if "import" in source else set()
    for function in functions:
        names.update(name.partition(".")[0] for code in codes_in(function.__code__) for name in code.co_names)
    names.update(_home(value) for value in _items(read))
    names -= _NOT_OF_USERS
    if not names:
        return False
    seen, modules = set[str](), _notebook_modules()
    return any(_module_names_it(name, seen) for name in names if name in sys.modules or name in modules)


def _notebook_modules() -> set[str]:
    """Return the names of the modules in the notebook's folder."""
    try:
        return {name.removesuffix(".py") for name in os.listdir(".")}
    except OSError:
        return set()


def _items(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        yield value
        if isinstance(value, (tuple, list)):
            yield from value[:_ITEMS]
        elif isinstance(value, dict):
            yield from list(value.values())[:_ITEMS]


def _home(value: object) -> str:
    """Return the top-level module that a value comes from."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0]
    kind = value if isinstance(value, (type, FunctionType)) else type(value)
    return str(getattr(value, "__module__", None) or kind.__module__).partition(".")[0]


def _module_names_it(name: str, seen: set[str]) -> bool:
    """Return whether a module of the user's own, or another one that it imports, names MLflow."""
    if name in seen or name in _NOT_OF_USERS or not name.isidentifier():
        return False
    seen.add(name)
    for file in _files(name):
        named, imported = _read(file)
        if named or any(_module_names_it(each, seen) for each in imported):
            return True
    return False


_NOT_OF_USERS = sys.stdlib_module_names | {
    "__main__", "torch", "numpy", "pandas", "IPython", "jupyter_distrib", "transformers", WORD
}  # fmt: skip
"""Modules that are not the user's own, so that their files are not looked for."""


def _files(name: str) -> Iterator[str]:
    """Yield the files of a module of the user's own."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    places = [loaded] if loaded else [f"{name}.py", os.path.join(name, "__init__.py")]
    for place in places:
        if not place.endswith(".py") or any(part in place for part in _INSTALLED) or not os.path.isfile(place):
            continue
        if os.path.basename(place) != "__init__.py":
            yield place
            return
        inside = (os.path.join(folder, file) for folder, _, files in os.walk(os.path.dirname(place)) for file in files)
        for _, file in zip(range(_MOST_FILES), (each for each in inside if each.endswith(".py")), strict=False):
            yield file
        return


_known: dict[str, tuple[tuple[int, int], tuple[bool, frozenset[str]]]] = {}
"""For each file its time and size, and what was read from it."""


def _read(file: str) -> tuple[bool, frozenset[str]]:
    """Return whether a file names MLflow, and the modules that it imports."""
    try:
        state = os.stat(file)
        stamp = state.st_mtime_ns, state.st_size
        key = os.path.abspath(file)
        if (known := _known.get(key)) is not None and known[0] == stamp:
            return known[1]
        text = record_file.beginning_of(file)
    except OSError:
        return False, frozenset()
    code = _compiled(text) if WORD in text.lower() else None
    found = code is not None and _names_it(code), frozenset(_IMPORTED.findall(text))
    _known[key] = stamp, found
    return found


# The experiment and the store.


_CALLS = {"set_experiment": "experiment", "set_tracking_uri": "uri"}
_OF_CALL = ("PRECALL", "CALL", "KW_NAMES", "CALL_KW")


def _named_places(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the strings that code passes to `set_experiment` and `set_tracking_uri`: literals, and globals that are
    strings."""
    for each in codes_in(code):
        if not _CALLS.keys() & set(each.co_names):
            continue
        steps = [step for step in dis.get_instructions(each) if step.opname not in ("CACHE", "PUSH_NULL", "NOP")]
        for called, given, then in zip(steps, steps[1:], steps[2:], strict=False):
            if (kind := _CALLS.get(str(called.argval))) is None or not given.opname.startswith("LOAD_"):
                continue
            value = given.argval if "CONST" in given.opname else names.get(str(given.argval))
            if "CONST" not in given.opname and not given.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
                continue
            keywords = then.argval if isinstance(then.argval, tuple) else ()
            if not isinstance(value, str) or not (then.opname in _OF_CALL or keywords):
                continue
            by_id = kind == "experiment" and "experiment_id" in _keywords(each, then)
            yield ("experiment_id" if by_id else kind), value


def _keywords(code: CodeType, step: dis.Instruction) -> tuple[str, ...]:
    """Return the keywords of a call, which the instruction after its only argument names."""
    if isinstance(step.argval, tuple):
        return step.argval
    if step.opname == "KW_NAMES" and step.arg is not None:
        constant = code.co_consts[step.arg]
        return constant if isinstance(constant, tuple) else ()
    return ()
