"""Executes a cell as the body of a fresh `__main__` module. Main thread of a rank or of an inline pool.

The cell's definitions live in that module's dict, which also holds the globals of the notebook's functions that came
with the cell; the module is `sys.modules["__main__"]`, so that `global`, `exec`, pickling of the cell's classes and
DataLoader workers behave as in a notebook.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import builtins
import inspect
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

from jupyter_distrib.cells import event_loops, timing
from jupyter_distrib.serialization import definitions
from jupyter_distrib.system.nested_code import names_in, undecorated
from jupyter_distrib.wire import messages as m

_VALUE = "__distributed_value__"
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class _Main(types.ModuleType):
    """The main module, in which pickle also finds what has come with a value of the notebook, such as the class of a
    model, without the cell having its name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return definitions.received_by_name()[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


def fresh_module() -> types.ModuleType:
    module = _Main("__main__")
    module.__dict__["__builtins__"] = builtins
    return module


def become_main(module: types.ModuleType) -> None:
    """Make a module the main one, also under the name that multiprocessing gives it in a spawned process, by which that
    process sends objects of a script back."""
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def add_sources(cell: m.Cell) -> None:
    """Let Python find the source of the cell, and of the cells whose functions it uses."""
    for filename, source in ((cell.filename, cell.shown or cell.source), *cell.sources.items()):
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def execute(
    cell: m.Cell,
    namespace: dict[str, object],
    adapted: Callable[[types.CodeType], types.CodeType] = lambda code: code,
    repair: Callable[[], None] = lambda: None,
) -> object:
    """Run the cell and return the value of its last statement if that is an expression, else None.

    Args:
        cell: The cell.
        namespace: The globals of the cell.
        adapted: Called with the compiled cell; returns the code to execute.
        repair: Called after the cell's code, unless that raises, and before anything else.
    """
    tree = ast.parse(cell.source, cell.filename)
    if cell.shown:
        _place_in(tree, cell.shown)
    if not tree.body:
        return None
    if isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        target = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
    flags = FLAGS | (__future__.annotations.compiler_flag if cell.future_annotations else 0)
    code = compile(tree, cell.filename, "exec", flags=flags, dont_inherit=True)
    code = adapted(code)
    if cell.timed:
        with timing.PrintedTimes():
            _execute(code, namespace, repair)
    else:  # not a context manager: an interrupt that C code has held up would be raised in it, not in the cell
        _execute(code, namespace, repair)
    if not any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        linecache.cache.pop(cell.filename, None)  # no function or class is left that could need its source
    return namespace.pop(_VALUE, None)


def _place_in(tree: ast.Module, shown: str) -> None:
    """Give all of a program the place of the one line for which it is shown."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.keyword):
            node.col_offset, node.end_col_offset = 0, len(shown.encode())


def _execute(code: types.CodeType, namespace: dict[str, object], repair: Callable[[], None]) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        _run(eval(code, namespace))  # noqa: S307 - the user's cell
        repair()
    else:
        exec(code, namespace)
        repair()
        event_loops.warn_of_pending(None)


def _run(coroutine: Any) -> None:
    """Run the cell's top-level `await`s in a new event loop; in a kernel (the inline pool), the kernel's own loop waits
    meanwhile."""
    outer = asyncio._get_running_loop()  # noqa: SLF001 - asyncio has no public way to step out of a loop
    if outer is None:
        _run_in_new_loop(coroutine)
        return
    task = asyncio.tasks._swap_current_task(outer, None) if sys.version_info >= (3, 12) else None  # type: ignore[attr-defined]  # noqa: SLF001
    asyncio._set_running_loop(None)  # noqa: SLF001
    try:
        _run_in_new_loop(coroutine)
    finally:
        asyncio.set_event_loop(outer)
        asyncio._set_running_loop(outer)  # noqa: SLF001
        if sys.version_info >= (3, 12):
            asyncio.tasks._swap_current_task(outer, task)  # type: ignore[attr-defined]  # noqa: SLF001


def _run_in_new_loop(coroutine: Any) -> None:
    """Run a coroutine as `asyncio.run` does; if a waiting cell is interrupted, the traceback shows its line."""
    with asyncio.Runner() as runner:
        try:
            runner.run(coroutine)
            event_loops.warn_of_pending(runner.get_loop())
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(_waiting_at(coroutine) or interrupt.__traceback__) from None


def _waiting_at(coroutine: Any) -> types.TracebackType | None:
    """Return the stack of a waiting coroutine, which is on no thread's stack; None if the coroutine has ended."""
    if coroutine is None or (frame := getattr(coroutine, "cr_frame", None)) is None:
        return None
    return types.TracebackType(_waiting_at(coroutine.cr_await), frame, frame.f_lasti, frame.f_lineno)


def defines_code(namespace: dict[str, object]) -> bool:
    """Return whether functions or classes in a namespace refer to it as their globals, so that only a garbage
    collection can free it."""
    code = (types.FunctionType, type)
    return any(isinstance(value, code) and value.__module__ == "__main__" for value in namespace.values())


def keep_only(namespace: dict[str, object], names: tuple[str, ...]) -> None:
    """Drop the values that neither `names` nor the cell's functions and classes need, so that a kept model does not
    keep the cell's data alive."""
    needed = {*names, *(name for name in namespace if name.startswith("__"))}
    for name, value in list(namespace.items()):
        if isinstance(value, types.ModuleType):
            needed.add(name)
        elif isinstance(value, (types.FunctionType, type)):
            needed |= {name, *globals_read(value)}
    for name in namespace.keys() - needed:
        del namespace[name]


def globals_read(value: object) -> set[str]:
    """Return the names that a function or class of the cell looks up when it runs, including attribute names."""
    if isinstance(value, type):
        if value.__module__ != "__main__":
            return set()
        return set().union(*(globals_read(undecorated(item)) for item in vars(value).values()))
    return names_in(value.__code__) if isinstance(value, types.FunctionType) else set()
