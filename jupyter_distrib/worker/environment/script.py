"""The execution of a Python file or module by `%run`, as IPython does it: a fresh `__main__` with its own arguments,
whose names the cell has afterwards. Rank's main thread.
"""

from __future__ import annotations

import getopt
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_OPTIONS = "niem:"
_REFUSED = "dtpN:b:D:l:rs:T:G"
"""The options of `%run` for debugging, timing and profiling."""


def run(words: Sequence[str], namespace: dict[str, object]) -> None:
    """Run a program and put its names into the namespace.

    Args:
        words: The arguments of `%run`: `[-n] [-i] [-e] file.py ...` or `-m module ...`.
        namespace: The names of the cell; the program sees them with `-i`.

    Raises:
        SystemExit: The program has left with another status than 0, and there is no `-e`.
    """
    options, arguments = _parsed(words)
    before = dict(namespace) if "-i" in options else {}
    made: dict[str, object] = {}
    try:
        if "-m" in options:
            made.update(_run_module(options["-m"], arguments, before))
        else:
            _run_file(arguments, before, made, name="" if "-n" in options else "__main__")
    except SystemExit as left:
        if left.code not in (None, 0) and "-e" not in options:
            raise
    namespace.update((name, value) for name, value in made.items() if not name.startswith("__"))


def _parsed(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    try:
        options, arguments = getopt.getopt(list(words), _OPTIONS + _REFUSED)
    except getopt.GetoptError as error:
        raise ValueError(f"%run: {error}.") from None
    for option, _ in options:
        if option[1] not in _OPTIONS:
            raise NameError(f"%run {option} cannot run on a rank; run it in a cell of its own.")
    return dict(options), arguments


def _run_module(name: str, arguments: Sequence[str], before: dict[str, object]) -> dict[str, object]:
    with _arguments(["-m", *arguments]):
        return runpy.run_module(name, init_globals=before, run_name="__main__", alter_sys=True)


def _run_file(arguments: Sequence[str], before: dict[str, object], made: dict[str, object], *, name: str) -> None:
    """Run a file, and leave its names in `made`, also if it ends by an exception."""
    path = _found(arguments[0] if arguments else "")
    module = types.ModuleType(name or os.path.splitext(os.path.basename(path))[0])
    module.__dict__.update(before, __name__=module.__name__, __file__=path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    cell = sys.modules["__main__"]
    sys.modules["__main__"] = module  # classes of the program are pickled by this name
    try:
        with _arguments([path, *arguments[1:]]), _folder(os.path.dirname(os.path.abspath(path))):
            exec(code, module.__dict__)
    finally:
        sys.modules["__main__"] = cell
        made.update(module.__dict__)


def _found(path: str) -> str:
    path = os.path.expanduser(path)
    if not path or path.endswith(".ipynb"):
        raise ValueError("%run on a rank takes a Python file (`%run train.py --x 1`) or `-m module`.")
    for each in (path, f"{path}.py"):
        if os.path.isfile(each):
            return each
    raise FileNotFoundError(f"%run: there is no file {path} in {os.getcwd()}.")


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _folder(folder: str) -> Iterator[None]:
    """Put the program's folder in front of the path, from which it imports its neighbours."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
