"""The program of a cell's text: Python, or IPython's syntax translated, with each line in its place.

Pure: in the kernel's main thread; executes nothing of the cell."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Iterator
from typing import Any

from jupyter_distrib.errors import CaptureError

MAGICS = frozenset({"run", "time", "timeit", "cd", "env", "pwd", "matplotlib"})
"""Line magics that a rank's `get_ipython()` knows, besides `system` and `getoutput`."""

Transform = Callable[[str], str]
"""A function that translates IPython's syntax into Python: `shell.transform_cell`."""


def without_time(body: str, first_line: int) -> tuple[str, bool]:
    """Return the cell with `%%time` replaced by an empty line, and whether it was there."""
    top = len(body) - len(body.lstrip())
    first, newline, rest = body[top:].partition("\n")
    if first.split(maxsplit=1)[:1] != ["%%time"]:
        return body, False
    if first.strip() != "%%time":
        line = first_line + body.count("\n", 0, top)
        raise CaptureError(
            f"line {line}: %%time must stand alone in its line; the code to time begins in the next line"
        )
    return body[:top] + newline + rest, True


def program_of(body: str, filename: str, first_line: int, transform: Transform | None) -> tuple[str, ast.Module]:
    """Return the source and its program; translate with IPython, which is slower, only if the text is not Python."""
    padding = "\n" * (first_line - 1)
    source = padding + body
    program = _parse(source, filename)
    if isinstance(program, SyntaxError):
        top = len(body) - len(body.lstrip())
        if body.startswith("%%", top):
            raise _no_cell_magic(body[top + 2 :], first_line + body.count("\n", 0, top))
        source = padding + (_translate(body, transform) if transform else body)
        program = _parse(source, filename)
    if isinstance(program, SyntaxError):
        raise program
    _compile(program, source, filename)
    return source, program


_CALLS = {"run_line_magic": "%", "system": "!", "getoutput": "!"}
_CALL = re.compile(rf"get_ipython\(\)\.({'|'.join(_CALLS)})(\(.*\))$")


def as_typed(line: str) -> str:
    """Return a line of a program as it is in the cell: `y = %time f(x)` for the call that IPython makes of it."""
    found = _CALL.search(line)
    try:
        arguments = ast.literal_eval(f"{found[2][:-1]},)") if found else ()
    except (SyntaxError, ValueError):
        arguments = ()
    return f"{line[: found.start()]}{_CALLS[found[1]]}{' '.join(arguments).strip()}" if found and arguments else line


def _parse(source: str, filename: str) -> ast.Module | SyntaxError:
    try:
        return ast.parse(source, filename)
    except SyntaxError as error:
        return error.with_traceback(None)


def _compile(program: ast.Module, source: str, filename: str) -> None:
    """Raise the errors that the parser does not find, such as `return` outside a function, before anything starts."""
    try:
        compile(program, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        if error.text is None and error.lineno is not None:  # the compiler looks for the source in a file
            error.text = "".join(source.splitlines(keepends=True)[error.lineno - 1 : error.lineno])
        raise


def _translate(body: str, transform: Transform) -> str:
    """Translate with IPython and keep each line in its place: IPython drops empty lines at the top and joins after
    `\\`."""
    try:
        translated = transform(body).splitlines()
    except SyntaxError:
        return body
    lines = body.splitlines()
    top = next((index for index, line in enumerate(lines) if line.strip()), 0)
    result, at = lines[:top], top
    for line in translated:
        last = at
        if not line.endswith("\\"):
            while last < len(lines) - 1 and lines[last].endswith("\\"):
                last += 1
        result += [line, *[""] * (last - at)]
        at = last + 1
    return "\n".join(result) + "\n"


_OF_SHELLS = "write !COMMAND to run a command on every rank"
_INSTEAD = {
    "timeit": "write %timeit before the statement to time",
    **dict.fromkeys(("bash", "sh", "script", "system", "sx", "!"), _OF_SHELLS),
}
"""Advice in place of a cell magic, by its name."""


def _no_cell_magic(text: str, line: int) -> CaptureError:
    name = (text.split() or [""])[0]
    instead = _INSTEAD.get(name, "put it in a cell of its own")
    return CaptureError(f"line {line}: %%{name} cannot stand inside a distributed cell; {instead}")


def imported(program: ast.AST) -> Iterator[str]:
    """Yield the names that imports bind at module level."""
    for node in ast.iter_child_nodes(program):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                yield from imported(node)


def _of_timeit(text: str) -> str:
    """Return the statement of `%timeit`, without its options."""
    return re.sub(r"\A\s*(?:-(?:[nrpv]\s*\w+|[a-z])\s+)*", "", text)


_TIMED: dict[str, Callable[[str], str]] = {"time": str, "timeit": _of_timeit}
"""The magics whose text is a statement, and the functions that return the statement."""


class MagicsRead(ast.NodeTransformer):
    """A transformer that replaces `get_ipython().run_line_magic(...)` and similar calls by the names that their text
    reads and binds.

    Only for the analysis: the rank gets the calls, with its own `get_ipython()`.
    """

    def __init__(self, transform: Transform | None) -> None:
        self.transform = transform

    def visit_Expr(self, node: ast.Expr) -> Any:
        method, magic, text = _shell_call(node.value)
        if method == "run_line_magic" and magic in _TIMED:
            return self.statements(_TIMED[magic](text), node.lineno)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        method, magic, text = _shell_call(node)
        match method:
            case "run_cell_magic":
                raise _no_cell_magic(magic, node.lineno)
            case "run_line_magic" if magic not in MAGICS and not _is_autoreload(magic, text):
                raise _no_magic(magic, node.lineno)
            case "run_line_magic" if magic in _TIMED:
                parts: list[ast.stmt] = self.statements(_TIMED[magic](text), node.lineno)
                return _all_of([part.value for part in parts if isinstance(part, ast.Expr)], node)
            case "run_line_magic" | "system" | "getoutput":
                # IPython leaves the text alone if a name in it is unknown: none of them is read for certain
                nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
                return ast.copy_location(ast.Lambda(args=nothing, body=_all_of(_in_text(text), node)), node)
            case _:
                return self.generic_visit(node)

    def statements(self, text: str, line: int) -> list[ast.stmt]:
        try:
            parsed = ast.parse(text if self.transform is None else self.transform(text))
        except SyntaxError:
            return []  # the rank will report the error
        found: list[ast.stmt] = self.visit(ast.increment_lineno(parsed, line - 1)).body
        return found


def _shell_call(node: ast.AST) -> tuple[str, str, str]:
    """Return method, magic and text of a call that IPython's translation made; empty strings for any other node."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython"), args=[]), attr=str(method)),
            args=[*arguments],
        ):
            texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if method in ("system", "getoutput") and len(texts) == 1:
                return method, "", texts[0]
            if method in ("run_line_magic", "run_cell_magic") and len(texts) >= 2:
                return method, texts[0], texts[1]
    return "", "", ""


def _is_autoreload(magic: str, text: str) -> bool:
    """Return whether a magic switches IPython's `autoreload` on: ranks import changed modules anew in any case."""
    return magic == "autoreload" or (magic in ("load_ext", "reload_ext") and text.strip() == "autoreload")


def _no_magic(name: str, line: int) -> CaptureError:
    if name.startswith("%"):
        return _no_cell_magic(name[1:], line)
    shown = {"pinfo": "`?`", "pinfo2": "`??`", "psearch": "`?`"}.get(name, f"%{name}")
    return CaptureError(f"line {line}: {shown} cannot run on a rank; run it in a cell of its own")


def _all_of(expressions: list[ast.expr], where: ast.expr) -> ast.expr:
    for part in (part for each in expressions for part in ast.walk(each)):
        ast.copy_location(part, where)
    return ast.copy_location(ast.Tuple(elts=expressions, ctx=ast.Load()), where)


def _in_text(text: str) -> list[ast.expr]:
    """Return the expressions that IPython evaluates in a magic's text: `{expression}` and `$name`."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError:  # a lone brace: IPython leaves such text alone
        return []
    found: list[ast.expr] = []
    for plain, field, form, _ in pieces:
        inside = f"{field}:{form}" if form else field or ""  # `{x[1:2]}` looks like a format
        for code in (*re.findall(r"\$([^\W\d]\w*)", plain), inside.strip()):
            try:
                found.append(ast.parse(code, mode="eval").body)
            except SyntaxError:
                continue  # `awk '{print $1}'`
    return found
