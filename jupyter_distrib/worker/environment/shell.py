"""The `get_ipython()` of a rank, with the methods for `!command`, `%run`, `%time`, `%cd` and `%env`.

`kernel/capture/capture.py` refuses every other magic before anything starts, with its line. Runs in the rank's main
thread."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jupyter_distrib.worker.environment import script


@contextmanager
def time_told() -> Iterator[None]:
    """Print at the end how long the block took."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        print(f"CPU times: {time.process_time() - cpu:.3g} s, wall time: {time.perf_counter() - wall:.3g} s")


class RankShell:
    """A stand-in for IPython's shell in the code to which IPython translates `!` and `%` lines."""

    def __init__(self, namespace: dict[str, object]) -> None:
        self.user_ns = namespace
        self.config: dict[str, object] = {}

    def system(self, command: str) -> None:
        """Run a shell command, whose output goes to the rank's streams, and set `_exit_code` to its status."""
        self.user_ns["_exit_code"] = subprocess.run(self._expand(command), shell=True, check=False).returncode  # noqa: S602

    def getoutput(self, command: str, split: bool = True) -> list[str] | str:
        """Run a shell command and return its output, as lines if `split`."""
        done = subprocess.run(  # noqa: S602
            self._expand(command), shell=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.stdout.splitlines() if split else done.stdout

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> object:
        magic = getattr(self, f"_magic_{name}", None)
        if magic is None:
            raise NameError(f"%{name} cannot run on a rank; run it in a cell of its own.")
        return magic(line)

    def _magic_time(self, line: str) -> object:
        with time_told():
            try:
                return eval(compile(line, "<timed exec>", "eval"), self.user_ns)  # noqa: S307
            except SyntaxError:
                exec(compile(line, "<timed exec>", "exec"), self.user_ns)
                return None

    def _magic_run(self, line: str) -> None:
        script.run(shlex.split(self._expand(line)), self.user_ns)

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
