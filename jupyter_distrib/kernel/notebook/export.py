"""The export of a cell's program as a script for torchrun: `%distributed_export job train.py`.

    imports, plain values  |  functions and classes, each after what it needs  |  other values, from a file beside it
    the names that a rank has; for a training strategy, the call that runs the rest under it
    the cell

Kernel side, in the thread that executes the magic. Plain values and code that the cell itself names are those of the
run; the others are taken from the notebook as it is now, because a run must not keep them alive.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import linecache
import os
import pickle
import re
import shlex
import stat
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

from jupyter_distrib.errors import CaptureError, OptionsError
from jupyter_distrib.interfaces.framework import TORCH
from jupyter_distrib.interfaces.strategy import load as load_strategy
from jupyter_distrib.kernel.capture.capture import PROVIDED, global_names, read_submodules
from jupyter_distrib.kernel.notebook.decorator import DistributedFunction
from jupyter_distrib.kernel.session.runs.program import Program, is_literal
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.available import for_strategy
from jupyter_distrib.system import record_file
from jupyter_distrib.system.nested_code import undecorated
from jupyter_distrib.system.record_file import DamagedFile

_RANK_NAMES = {
    "rank": 'int(os.environ["RANK"])',
    "local_rank": 'int(os.environ["LOCAL_RANK"])',
    "world_size": 'int(os.environ["WORLD_SIZE"])',
    "device": 'torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")',
    "get_ipython": "lambda: RankShell(globals())",
}
_IMPORTED_FOR = {
    "device": "import torch",
    "display": "from IPython.display import display",
    "get_ipython": "from jupyter_distrib.worker.environment.shell import RankShell",
    "jupyter_distrib": "import jupyter_distrib",
}
"""The imports for names that ranks provide."""
_WRITTEN = re.compile(r'\A""".* as a script: torchrun --nproc-per-node N ')
"""The beginning of every script that an export has written."""
_MISSING = object()
_UNKNOWN = "its source is not known"
_ARGUMENTS = "a run keeps the arguments of its call only if they are short plain values"
_NOT_KEPT = {
    "arguments": _ARGUMENTS,
    "keywords": _ARGUMENTS,
    "function": "a run keeps the function that it calls only if that is a function, and not a method, a partial or "
    "another object",
}
"""Reasons why the run of a call has no value of a part of it."""


def write(run: Run, path: str, notebook: Mapping[str, object]) -> str:
    """Write the program of a run as a script, and values that are not code to a file beside it. Return a sentence
    that says where.

    Raises:
        OptionsError: The run has no program, or the files cannot be written.
        CaptureError: A value can be written neither as code nor into the file; it names all of them.
    """
    if run.program is None:
        raise OptionsError(f"{run.id} cannot be exported: only cells and functions of this notebook can")
    script = _Script(run, Path(path).expanduser(), notebook)
    text = script.text()
    if not script.may_be_written():
        raise OptionsError(f"{path} is there already, and no export has written it: choose another name")
    of_export = script.has_data_of_export()
    if script.data and os.path.lexists(script.data_path) and not (of_export and _is_file_itself(script.data_path)):
        raise OptionsError(
            f"{script.data_path} is there already, and no export has written it: choose another name for the script"
        )
    problem = ""
    try:
        script.path.write_text(text, "utf-8")
        if script.data:
            script.data_path.write_bytes(script.pickled)
        elif of_export:
            script.data_path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
    if problem:
        raise OptionsError(problem)
    beside = f" and {script.data_path}" if script.data else ""
    return f"{path}{beside} written: torchrun --nproc-per-node {run.record.world_size} {shlex.quote(str(script.path))}"


@dataclass(slots=True)
class _Script:
    """The parts of one script, in the order in which they are found."""

    run: Run
    path: Path
    notebook: Mapping[str, object]
    imports: dict[str, str] = field(default_factory=dict)
    modules: dict[str, ModuleType] = field(default_factory=dict)
    definitions: list[str] = field(default_factory=list)
    literals: dict[str, object] = field(default_factory=dict)
    data: dict[str, object] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    in_headers: set[str] = field(default_factory=set)
    """The names that functions and classes read as they are defined."""
    pickled: bytes = b""

    @property
    def data_path(self) -> Path:
        return self.path.with_suffix(".pkl")

    @property
    def program(self) -> Program:
        assert self.run.program is not None
        return self.run.program

    def may_be_written(self) -> bool:
        """Return whether nothing is lost by writing the script: no file is there, or that of an earlier export. A link
        to a file that does not exist would make one elsewhere, and a FIFO would be waited for."""
        if self.path.is_fifo() or (self.path.is_symlink() and not self.path.exists()):
            return False
        if not self.path.is_file() or not self.path.stat().st_size:
            return True
        try:
            return _WRITTEN.search(record_file.text_of(self.path, through_links=True)) is not None
        except (OSError, DamagedFile):
            return False

    def has_data_of_export(self) -> bool:
        """Return whether the script that is there reads the file beside it, as one of an earlier export does."""
        try:
            return self._data in record_file.text_of(self.path, through_links=True)
        except (OSError, DamagedFile):
            return False

    @property
    def _data(self) -> str:
        return f"pickle.loads(pathlib.Path(__file__).with_name({self.data_path.name!r}).read_bytes())"

    def text(self) -> str:
        self.done |= self.program.of_setups
        for name in self.program.names:
            self._add(name)
        self._keep_shared()
        self._pickle()
        if self.refused:
            raise CaptureError(
                "the script would miss "
                + "; ".join(f"`{name}` ({why})" for name, why in self.refused.items())
                + ". Make it in the cell, and export that."
            )
        strategy, own_options = self._strategy()
        about = f"{self.run.record.label} as a script: torchrun --nproc-per-node N {self.path.name}"
        about = about.replace("\\", "\\\\").replace('"', '\\"')  # the label may quote an argument
        parts = [f'"""{about}"""\n']
        if self.notebook.get("annotations") is __future__.annotations:  # IPython compiles all later cells that way
            parts.append("from __future__ import annotations")
        names, needed = self._names_of_ranks() if strategy == "none" else ([], [])
        imports = dict.fromkeys([*self.imports.values(), *self._submodules(), *needed])
        if self.data:
            imports |= dict.fromkeys(["import pathlib", "import pickle"])
        parts += ["\n".join(sorted(imports)), "\n".join(names)]
        given = [f"{name} = _values[{name!r}]" for name in self.data]
        values = ["\n".join([f"_values = {self._data}", *given])] if given else []
        parts += [*self.definitions, *values] if self._needs_definitions else [*values, *self.definitions]
        parts += [source.strip("\n") for source in self.program.setups]
        if strategy != "none":
            options = f", options={own_options!r}" if own_options else ""
            parts.append(
                "from jupyter_distrib.worker.process import under_torchrun\n\n"
                f"under_torchrun.run(__file__, strategy={strategy!r}{options})"
            )
        parts.append(_as_script(self.program.source).strip("\n"))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _strategy(self) -> tuple[str, dict[str, str]]:
        """Return the name of the strategy and its options in the form that ranks get: a script has no names of the
        notebook."""
        name = self.program.options.strategy or "none"
        if load_strategy(name).framework not in ("", TORCH):
            raise OptionsError(
                f"a cell with --strategy {name} cannot become a script for torchrun, whose ranks compute with torch: "
                "run its text with the launcher of its own library"
            )
        return name, dict(for_strategy(self.program.options, self.program.cell_options.size).strategy_options)

    def _names_of_ranks(self) -> tuple[list[str], list[str]]:
        """Return the lines that define the names that ranks provide and the script reads, and the imports for them."""
        texts = (*self.definitions, self.program.source)
        codes = [compile(each, "", "exec", dont_inherit=True, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT) for each in texts]
        read = set().union(*map(_names_in, codes))
        if "get_ipython" in read:  # a shell command reads names in its text
            read |= {name for name in _RANK_NAMES if re.search(rf"\b{name}\b", self.program.source)}
        lines = [f"{name} = {text}" for name, text in _RANK_NAMES.items() if name in read]
        if "device" in read and "local_rank" not in read:
            lines.insert(0, f"local_rank = {_RANK_NAMES['local_rank']}")
        imports = [text for name, text in _IMPORTED_FOR.items() if name in read]
        return lines, ["import os", *imports] if any("os.environ" in each for each in lines) else imports

    def _submodules(self) -> list[str]:
        """Return the imports of modules that the script reads as attributes of others."""
        texts = (*self.definitions, *self.program.setups, self.program.source)
        found = [read_submodules(ast.parse(each), self.modules) for each in texts]
        return [f"import {module}" for each in found for modules in each.values() for module in modules]

    def _add(self, name: str) -> None:
        """Add a name, after everything that it needs."""
        if name in self.done or (name in PROVIDED and name not in self.program.values):
            return
        self.done.add(name)
        value = self._value(name)
        if hasattr(builtins, name) and getattr(value, "__module__", "") in ("builtins", "io"):
            return  # IPython has its own `open` among the names of the notebook
        match value:
            case ModuleType():
                self.imports[name], self.modules[name] = _import(value, name), value
            case DistributedFunction():
                self._define(name, undecorated(value))
            case FunctionType() | type():
                self._define(name, value)
            case _ if value is _MISSING:
                self.refused[name] = _NOT_KEPT.get(name.rstrip("_"), "the notebook no longer has it")
            case _ if is_literal(value):
                self.literals[name] = value
                self.definitions.append(f"{name} = {value!r}")
            case _ if (place := _place(value)) is not None:
                module, own = place
                self.imports[name] = f"from {module} import {own}" + (f" as {name}" if name != own else "")
                if module == "__main__":  # such as a TypeVar
                    self.refused[name] = _UNKNOWN
            case _:
                for other in sorted(global_names(value)):
                    self._add_if_known(other)
                if type(value).__module__ == "__main__":
                    self._add_if_known(type(value).__name__)
                self.data[name] = value

    def _add_if_known(self, name: str) -> None:
        if name in self.program.values or name in self.notebook:
            self._add(name)

    def _define(self, name: str, value: FunctionType | type) -> None:
        own = value.__name__
        if value.__module__ not in ("__main__", None):
            root = value.__qualname__.partition(".")[0]
            self.imports[name] = f"from {value.__module__} import {root}" + (f" as {name}" if name != root else "")
            if "." in value.__qualname__:
                self.refused[name] = f"it is {value.__qualname__} of {value.__module__}"
            return
        of_own_name = self._value(own)
        if name != own and undecorated(of_own_name) is value:
            self._add(own)
            self.definitions.append(f"{name} = {own}")
            return
        source = _source(value, self.notebook.get("In"))
        if isinstance(source, _NoSource):
            self.refused[name] = source.text
            return
        if name != own:  # another definition may have its name by now
            source = _renamed(source, name) if of_own_name is not _MISSING else f"{source}\n\n{name} = {own}"
        if isinstance(value, FunctionType):
            source = self._with_defaults(name, source, value)
        read = _names_in_header(source)
        self.in_headers |= read
        for other in sorted({*global_names(value), *read} - {name}):
            self._add_if_known(other)
        self.definitions.append(source)

    def _with_defaults(self, name: str, source: str, function: FunctionType) -> str:
        """Return the source with the defaults that the function has: names in them may have other values by now."""
        given = ast.parse(source).body[0].args  # type: ignore[attr-defined]
        of_keywords = function.__kwdefaults__ or {}
        defaults = list(zip(reversed(given.defaults), reversed(function.__defaults__ or ()), strict=False))
        defaults += [
            (node, of_keywords[each.arg])
            for each, node in zip(given.kwonlyargs, given.kw_defaults, strict=True)
            if node is not None and each.arg in of_keywords
        ]
        encoded = source.encode().split(b"\n")
        for node, default in sorted(defaults, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
            is_name = isinstance(node, ast.Name)
            if is_name and self._value(node.id) is default:
                continue
            if is_literal(default) and any(isinstance(each, ast.Name) for each in ast.walk(node)):
                first, last = node.lineno - 1, node.end_lineno - 1
                text = encoded[first][: node.col_offset] + repr(default).encode() + encoded[last][node.end_col_offset :]
                encoded[first : last + 1] = [text]
            elif is_name and node.id in self.notebook:
                self.refused[name] = f"its default `{node.id}` has another value by now"
        return b"\n".join(encoded).decode()

    def _value(self, name: str) -> object:
        return self.program.values.get(name, self.notebook.get(name, _MISSING))

    def _keep_shared(self) -> None:
        """Move plain values that share a list, dict or set with another value into the file beside the script: the
        text of both would make two of it."""
        met = {name: set(_containers(value)) for name, value in self.literals.items()}
        if not any(met.values()):
            return
        for name, value in self.data.items():
            visitor = _Visitor()
            with suppress(Exception):  # foreign code; what cannot be pickled is refused below
                visitor.dump(value)
            met[name] = visitor.met
        for name, value in self.literals.items():
            if any(met[name] & of_other for other, of_other in met.items() if other != name):
                self.definitions.remove(f"{name} = {value!r}")
                self.data[name] = value

    def _pickle(self) -> None:
        for name, value in list(self.data.items()):
            try:
                pickle.dumps(value)
            except Exception as error:  # noqa: BLE001 - foreign code
                self.refused[name] = f"{type(value).__name__}: {error}"
                del self.data[name]
        self.pickled = pickle.dumps(self.data) if self.data else b""
        if self._needs_definitions:
            for name in self.data.keys() & self.in_headers:
                self.refused[name] = "a function or class reads it as it is defined, and it is itself of such a class"

    @property
    def _needs_definitions(self) -> bool:
        """Return whether the values in the file beside the script refer to functions or classes of the notebook."""
        return b"__main__" in self.pickled


class _Visitor(pickle.Pickler):
    """Finds the lists, dicts and sets in a value, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(self, protocol=5)
        self.met: set[int] = set()

    def write(self, _: bytes) -> int:
        return 0

    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, (list, dict, set)):
            self.met.add(id(obj))


def _containers(value: object) -> Iterator[int]:
    """Yield the ids of the lists, dicts and sets in a plain value."""
    if isinstance(value, (list, dict, set)):
        yield id(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for each in items:
        yield from _containers(each)


@dataclass(frozen=True, slots=True)
class _NoSource:
    """The reason why the source of a value cannot be written."""

    text: str


def _as_script(source: str) -> str:
    """Return the program as a script can have it: one that awaits at its top level becomes a coroutine function.

    Raises:
        CaptureError: It cannot be one, as it has a statement that stands at the top level only.
    """
    code = compile(source, "", "exec", dont_inherit=True, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        return source
    bound = sorted({each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"})
    head = "async def _main():\n" + (f"    global {', '.join(bound)}\n" if bound else "")
    body = ast.parse(source).body
    text = head + textwrap.indent(source, "    ")
    if [ast.dump(each) for each in ast.parse(text).body[0].body[bool(bound) :]] != [ast.dump(each) for each in body]:  # type: ignore[attr-defined]
        # indentation has changed a string of several lines
        text = head + textwrap.indent("\n".join(map(ast.unparse, body)), "    ")
    try:
        compile(text, "", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CaptureError(
            "the cell awaits at its top level, which a script cannot, and has what no function can have "
            f"({error.msg}): call a coroutine function of its own by asyncio.run()"
        ) from None
    return f"import asyncio\n\n{text.rstrip()}\n\nasyncio.run(_main())"


def _import(module: ModuleType, name: str) -> str:
    own = module.__name__
    if own == name:
        return f"import {own}"
    return f"import {own} as {name}"


def _source(value: FunctionType | type, cells: object) -> str | _NoSource:
    """Return the source of a function or class. `cells` are the texts of the cells that IPython has run."""
    if isinstance(value, FunctionType) and value.__closure__:
        return _NoSource("a function made in another one, which holds its names")
    try:
        text = _class_text(value, cells) if isinstance(value, type) else inspect.getsource(value)
        text = textwrap.dedent(text).strip("\n")
        (statement,) = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return _NoSource(_UNKNOWN)
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        first = statement.lineno - 1  # without @distributed, which would need a pool
        return "\n".join([*_other_decorators(statement, text), *text.split("\n")[first:]])
    return _NoSource("a lambda")


def _renamed(source: str, name: str) -> str:
    """Return a definition with this name."""
    (statement,) = ast.parse(source).body
    lines = source.split("\n")
    line = lines[statement.lineno - 1]
    lines[statement.lineno - 1] = re.sub(r"\b(def|class)(\s+)\w+", rf"\g<1>\g<2>{name}", line, count=1)
    return "\n".join(lines)


def _class_text(value: type, cells: object) -> str:
    """Return the source of a notebook's class, which Python looks for in a file. Raises `OSError`."""
    for item in vars(value).values():
        code = getattr(undecorated(item), "__code__", None)
        if code is None:
            continue
        lines = linecache.getlines(code.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if not isinstance(node, ast.ClassDef) or node.name != value.__name__:
                continue
            if node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):  # a cell may define two of a name
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    for text in reversed(cells) if isinstance(cells, list) else ():  # it has no function, as many a dataclass
        found = [each for each in _parsed(text) if isinstance(each, ast.ClassDef) and each.name == value.__name__]
        if found and _is_definition(found[-1], value):
            lines = text.split("\n")
            first = min([found[-1].lineno, *(each.lineno for each in found[-1].decorator_list)])
            return "\n".join(lines[first - 1 : found[-1].end_lineno])
    return inspect.getsource(value)


def _parsed(text: object) -> list[ast.stmt]:
    try:
        return ast.parse(text).body if isinstance(text, str) else []
    except (SyntaxError, ValueError):
        return []


def _is_definition(node: ast.ClassDef, value: type) -> bool:
    """Return whether a class may come from this definition: it has its fields, its constants and its docstring."""
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    if fields != set(value.__annotations__) or ast.get_docstring(node, clean=False) not in (None, value.__doc__):
        return False
    for each in node.body:
        target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
        if isinstance(target, ast.Name) and isinstance(constant := getattr(each, "value", None), ast.Constant):
            now = vars(value).get(target.id, constant.value)
            now = getattr(now, "value", now)  # a member of an enum
            if type(now) is type(constant.value) and now != constant.value:
                return False
    return True


def _other_decorators(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, text: str) -> list[str]:
    written = [ast.get_source_segment(text, each) or "" for each in statement.decorator_list]
    return [f"@{each}" for each in written if "distributed(" not in each]


def _names_in_header(source: str) -> set[str]:
    """Return the names that a definition reads immediately: in decorators, defaults, annotations, bases and the body
    of a class."""
    read, bound = set[str](), set[str]()
    waiting = list[ast.AST](ast.parse(source).body)
    while waiting:
        match waiting.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                waiting += [*function.decorator_list, function.args, *filter(None, [function.returns])]
            case ast.Lambda() as function:
                waiting.append(function.args)
            case ast.Name() as name:
                (read if isinstance(name.ctx, ast.Load) else bound).add(name.id)
            case node:
                waiting += ast.iter_child_nodes(node)
    return read - bound


def _place(value: object) -> tuple[str, str] | None:
    """Return the module and the name by which a value is imported, such as `typing.Optional` and `math.sqrt`."""
    try:
        name = value.__reduce_ex__(5)
        module = pickle.whichmodule(value, name) if isinstance(name, str) else ""  # type: ignore[attr-defined]
        found = bool(module) and getattr(sys.modules.get(module), str(name), None) is value
    except Exception:  # noqa: BLE001 - foreign code
        return None
    return (module, str(name)) if found else None


def _names_in(code: object) -> set[str]:
    names = set(getattr(code, "co_names", ()))
    for constant in getattr(code, "co_consts", ()):
        names |= _names_in(constant) if hasattr(constant, "co_names") else set()
    return names


def _is_file_itself(path: Path) -> bool:
    """Return whether there is a regular file, and no link: whoever made the folder may have put one there."""
    return stat.S_ISREG(path.lstat().st_mode)


def check_path(path: str) -> None:
    """Raise `OptionsError` for a path that does not name a Python script."""
    if os.path.splitext(path)[1] != ".py":
        raise OptionsError(f"{path} is not the name of a Python script: write NAME.py")
    if os.path.isdir(os.path.expanduser(path)):
        raise OptionsError(f"{path} is a folder: write the name of a script in it")
