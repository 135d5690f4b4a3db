"""The object that `get_ipython()` returns on a rank, with the methods for `!command`, `%run`, `%time`, `%timeit`,
`%cd` and `%env`.

`kernel/capture/capture.py` refuses every other magic before anything starts, naming its line. Runs in the rank's main
thread. `%run` executes a file or module as IPython does: in a fresh `__main__` with its own arguments, whose names
the cell has afterwards."""

from __future__ import annotations

import getopt
import os
import runpy
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jupyter_distrib.cells import cell, timing
from jupyter_distrib.worker.environment import terminal


class RankShell:
    """Stands in for IPython's shell in the code that IPython generates from `!` and `%` lines."""

    def __init__(self, namespace: dict[str, object]) -> None:
        self.user_ns = namespace
        self.config: dict[str, object] = {}

    def system(self, command: str) -> None:
        """Run a shell command with output to the rank's streams, and set `_exit_code` to its status."""
        self.user_ns["_exit_code"] = terminal.run(self._expand(command))

    def getoutput(self, command: str, split: bool = True) -> list[str] | str:
        """Run a shell command and return its output, as lines if `split`."""
        printed = terminal.read(self._expand(command))
        return printed.splitlines() if split else printed

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> object:
        magic = getattr(self, f"_magic_{name}", None)
        if magic is None:
            raise NameError(f"%{name} cannot run on a rank; run it in a cell of its own.")
        return magic(line)

    def _magic_time(self, line: str) -> object:
        try:
            code = compile(line, "<timed exec>", "eval")
        except SyntaxError:
            code = compile(line, "<timed exec>", "exec")
        with timing.PrintedTimes():
            return eval(code, self.user_ns)  # noqa: S307 - None for statements

    def _magic_timeit(self, line: str) -> timing.Timing | None:
        return timing.measure(line, self.user_ns)

    def _magic_run(self, line: str) -> None:
        run_program(shlex.split(self._expand(line)), self.user_ns)

    def _magic_cd(self, line: str) -> None:
        os.chdir(os.path.expanduser(self._expand(line.strip()) or "~"))
        print(os.getcwd())

    def _magic_pwd(self, line: str) -> str:
        return os.getcwd()

    def _magic_env(self, line: str) -> str | None:
        name, equals, value = line.partition("=")
        if not equals:
            return os.environ.get(name.strip())
        os.environ[name.strip()] = self._expand(value.strip())
        return None

    _magic_set_env = _magic_env

    def _magic_autoreload(self, line: str) -> None:
        """Accept and ignore `%autoreload`, and its `%load_ext`: a rank imports changed modules anew in any case."""

    _magic_load_ext = _magic_reload_ext = _magic_autoreload

    def _magic_matplotlib(self, line: str) -> None:
        """Accept and ignore `%matplotlib`: there is no window on a rank."""

    def _expand(self, command: str) -> str:
        """Expand `{expression}` and `$name` as IPython does, if they refer to names of the cell."""
        out, rest = "", command
        while "{" in rest:
            before, _, tail = rest.partition("{")
            expression, closed, after = tail.partition("}")
            try:
                text = str(eval(expression, self.user_ns)) if closed else "{" + expression  # noqa: S307
            except Exception:  # noqa: BLE001 - not an expression: a shell's own braces
                text = "{" + expression + closed
            out, rest = out + before + text, after
        words = (out + rest).split("$")
        return words[0] + "".join(self._variable(word) for word in words[1:])

    def _variable(self, word: str) -> str:
        name = word[: next((i for i, c in enumerate(word) if not (c.isalnum() or c == "_")), len(word))]
        return str(self.user_ns[name]) + word[len(name) :] if name and name in self.user_ns else "$" + word


_OPTIONS = "niem:"
_REFUSED = "dtpN:b:D:l:rs:T:G"
"""The options of `%run` for debugging, timing and profiling."""


def run_program(words: Sequence[str], namespace: dict[str, object]) -> None:
    """Run a program and put its names into the namespace.

    Args:
        words: The arguments of `%run`: `[-n] [-i] [-e] file.py ...` or `-m module ...`.
        namespace: The names of the cell; the program sees them with `-i`.

    Raises:
        SystemExit: The program exited with a status other than 0, and `-e` was not given.
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
        words = list(words)
        place = words.index("-m") if "-m" in words[:-1] else -1
        cure = (
            f": write %run {shlex.join(words[: place + 2])} -- {shlex.join(words[place + 2 :])}" if place >= 0 else "."
        )
        raise ValueError(f"%run: {error}{cure}") from None
    for option, _ in options:
        if option[1] not in _OPTIONS:
            raise NameError(f"%run {option} cannot run on a rank; run it in a cell of its own.")
    return dict(options), arguments


def _run_module(name: str, arguments: Sequence[str], before: dict[str, object]) -> dict[str, object]:
    with _program_arguments(["-m", *arguments]):
        return runpy.run_module(name, init_globals=before, run_name="__main__", alter_sys=True)


def _run_file(arguments: Sequence[str], before: dict[str, object], made: dict[str, object], *, name: str) -> None:
    """Run a file and collect its names in `made`, even if it raises."""
    path = _program_file(arguments[0] if arguments else "")
    module = types.ModuleType(name or os.path.splitext(os.path.basename(path))[0])
    module.__dict__.update(before, __name__=module.__name__, __file__=path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    of_cell = sys.modules["__main__"]
    cell.become_main(module)  # classes of the program are pickled by this name
    try:
        with _program_arguments([path, *arguments[1:]]), _program_folder(os.path.dirname(path)):
            exec(code, module.__dict__)
    finally:
        cell.become_main(of_cell)
        made.update(module.__dict__)


def _program_file(path: str) -> str:
    path = os.path.expanduser(path)
    if not path or path.endswith(".ipynb"):
        raise ValueError("%run on a rank takes a Python file (`%run train.py --x 1`) or `-m module`.")
    for each in (path, f"{path}.py"):
        if os.path.isfile(each):
            return os.path.abspath(each)  # processes that it spawns read it again, perhaps from another folder
    raise FileNotFoundError(f"%run: there is no file {path} in {os.getcwd()}.")


@contextmanager
def _program_arguments(words: list[str]) -> Iterator[None]:
    before = getattr(sys, "argv", [])
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _program_folder(folder: str) -> Iterator[None]:
    """Put the program's folder first on `sys.path`, so that it can import its sibling modules."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
