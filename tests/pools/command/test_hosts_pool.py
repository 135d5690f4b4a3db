"""What a subclass of `HostsPool` gives, and what is refused before anything is started."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.pools.command.hosts_pool import HostsPool
from jupyter_distrib.pools.server_home import Home
from tests.notebook import ROOT


class Box(HostsPool):
    kind = "box"

    def command(self, host: str, python: Sequence[str]) -> list[str]:
        return ["enter", host, " ".join(python)]

    def explain(self, host: str, status: int | None, said: str) -> str:
        return f"{host} is switched off." if "off" in said else ""


def connect(pool: HostsPool) -> None:
    pool.connect(KernelIdentity().hello(), lambda *_: None, lambda _: None)


def test_the_command_runs_the_words_of_the_interpreter() -> None:
    assert Box(hosts="a", python="/p/python").words("a") == ["enter", "a", "/p/python -I -m code"]


def test_a_failure_is_what_the_subclass_makes_of_it_or_shows_the_command() -> None:
    assert Box().failure("a", 1, "power off\n") == "a is switched off."
    assert Box().failure("a", 1, "no\n") == (
        "`enter a python3` ended with status 1 before a Python answered (no): try `enter a 'python3 --version'`."
    )


def test_an_option_that_is_needed_is_named_with_an_example() -> None:
    with pytest.raises(PoolError, match=r"^this pool needs hosts: write --hosts a,b, or hosts = \.\.\. in a settings"):
        connect(Box())


def test_a_class_that_no_other_process_can_import_is_refused() -> None:
    class Local(Box):
        kind = "local_box"

    with pytest.raises(PoolError, match=r"Local of the local_box pool cannot be imported by the process that holds"):
        connect(Local(hosts="a"))


@pytest.mark.parametrize("kind", ["../box", 'a"b', "", "two words"])
def test_a_kind_is_a_word_since_files_are_named_by_it(kind: str) -> None:
    with pytest.raises(TypeError, match="has to be a word"):
        type("Odd", (Box,), {"kind": kind})


GIVEN = """
import os, sys
from jupyter_distrib.pools.command.hosts_pool import HostsPool

class Given(HostsPool):
    kind = "given"

    def __init__(self, **given):
        super().__init__(**given)
        if "STARTED" in os.environ:
            print("made with", self.given["hosts"], flush=True)
            sys.exit()

class Outer:
    class Inner(Given):
        pass
"""


@pytest.mark.parametrize(
    ("file", "module", "name"),
    [("brought.py", "brought", "Given"), ("one/two.py", "one.two", "Given"), ("one/two/__init__.py", "one.two", "Outer.Inner")],
)  # fmt: skip
def test_the_process_of_the_connections_finds_the_class_in_a_folder_of_the_notebooks_path(
    file: str, module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(GIVEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = attrgetter(name)(importlib.import_module(module))(hosts="a,b")
    started: list[Home] = []

    def reach(home: Home) -> None:
        started.append(home)

    monkeypatch.setattr(Home, "reach", reach)
    with pytest.raises(AttributeError):  # there is no connection
        connect(pool)
    for each in [each for each in sys.modules if each.partition(".")[0] == module.partition(".")[0]]:
        del sys.modules[each]

    (home,) = started
    done = subprocess.run(
        [sys.executable, "-m", home.module, "0", str(tmp_path), home.name],
        input=home.stdin_text, env={**os.environ, "PYTHONPATH": str(ROOT), "STARTED": "1"}, cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("made with a,b\n", "")
