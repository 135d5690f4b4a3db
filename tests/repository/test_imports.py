"""Who may import what (docs/architecture.md), read from the sources without importing them.

An *eager* import runs when the module is imported. Those inside functions run later; those under `if TYPE_CHECKING`
never do.
"""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.repository.package_code import trees

PACKAGE = "jupyter_distrib"
FOLDER = Path(__file__).parent.parent.parent / PACKAGE

MAY_LOAD_TORCH = (
    "worker.pytorch", "worker.host_copy", "worker.autoparallel", "strategies", "checkpoints", "compat.horovod",
    "compat.serverless_gpu_data", "parallel", "dry_run",
)  # fmt: skip
MAY_USE_IPYTHON = ("kernel.notebook", "kernel.sidebar", "worker.output.displaying")

MAY_IMPORT: dict[str, set[str]] = {
    # at the top: what users, and authors of pools, strategies and observers, import
    "addresses": set(),
    "errors": {"addresses"},
    "gpu_types": set(),
    "options": {"errors", "system"},
    "runtime": set(),
    "testing": {"pools", "serialization", "wire"},
    "parallel": {"errors", "worker/autoparallel"},
    "extend": {"errors", "interfaces", "kernel/record", "options", "pools", "pools/command", "wire"},
    # shared layers
    "system": {"errors"},
    "wire": {"system"},
    "libraries": {"errors", "system"},
    "interfaces": {"errors", "libraries", "options", "system", "wire"},
    "serialization": {"errors", "libraries", "system", "wire"},
    "cells": {"interfaces", "serialization", "system", "wire"},
    # a rank
    "worker": {"errors", "interfaces", "libraries", "serialization", "system", "wire"},
    "worker/output": {"interfaces", "libraries", "system", "wire", "worker"},
    "worker/environment": {
        "cells",
        "errors",
        "interfaces",
        "libraries",
        "serialization",
        "system",
        "wire",
        "worker/output",
    },
    "worker/debugging": {"interfaces", "serialization", "system", "wire", "worker", "worker/environment"},
    "worker/process": {
        "cells",
        "errors",
        "interfaces",
        "runtime",
        "serialization",
        "system",
        "wire",
        "worker",
        "worker/debugging",
        "worker/environment",
        "worker/output",
    },
    "worker/pytorch": {"errors", "interfaces", "libraries", "serialization", "system", "wire", "worker/debugging"},
    "worker/autoparallel": {"errors", "options", "system", "worker/pytorch"},
    "worker/autoparallel/data": {
        "errors",
        "interfaces",
        "libraries",
        "system",
        "worker/autoparallel",
        "worker/pytorch",
    },
    "worker/autoparallel/checks": {
        "interfaces",
        "system",
        "worker",
        "worker/autoparallel",
        "worker/autoparallel/data",
        "worker/pytorch",
    },
    "worker/autoparallel/training": {
        "errors",
        "interfaces",
        "libraries",
        "serialization",
        "system",
        "worker",
        "worker/autoparallel",
        "worker/autoparallel/checks",
        "worker/autoparallel/data",
        "worker/pytorch",
    },
    "strategies": {
        "errors",
        "interfaces",
        "options",
        "system",
        "worker",
        "worker/autoparallel",
        "worker/autoparallel/training",
        "worker/pytorch",
    },
    "checkpoints": {
        "errors",
        "interfaces",
        "system",
        "worker",
        "worker/autoparallel",
        "worker/autoparallel/data",
        "worker/pytorch",
    },
    "dry_run": {
        "addresses",
        "cells",
        "errors",
        "interfaces",
        "libraries",
        "serialization",
        "system",
        "wire",
        "worker",
        "worker/autoparallel",
        "worker/environment",
        "worker/output",
        "worker/pytorch",
    },
    # a node, and several nodes
    "server": {"addresses", "errors", "system", "wire"},
    "agent/gpus": {"system", "wire"},
    "agent/ranks": {"agent/gpus", "server", "system", "wire"},
    "agent/runs": {"agent/gpus", "agent/ranks", "server", "system", "wire"},
    "agent/groups": {"agent/gpus", "agent/ranks", "agent/runs", "server", "system", "wire"},
    "agent": {
        "addresses",
        "agent/gpus",
        "agent/groups",
        "agent/ranks",
        "errors",
        "server",
        "system",
        "wire",
    },
    "coordinator": {"agent/ranks", "agent/runs", "errors", "options", "serialization", "server", "system", "wire"},
    # where ranks come from
    "pools": {"errors", "options", "system", "wire"},
    "pools/inline": {
        "agent/ranks",
        "cells",
        "errors",
        "interfaces",
        "options",
        "pools",
        "serialization",
        "system",
        "wire",
        "worker/debugging",
        "worker/environment",
        "worker/output",
        "worker/process",
    },
    "pools/machines": {"errors", "options", "system"},
    "pools/command": {"agent/gpus", "coordinator", "errors", "options", "pools", "pools/machines", "system", "wire"},
    "pools/spark": {"addresses", "coordinator", "errors", "options", "pools", "pools/ray", "wire"},
    "pools/ray": {"addresses", "coordinator", "errors", "options", "pools", "system", "wire"},
    # the notebook's kernel
    "kernel/record": {"libraries", "system", "wire"},
    "kernel/analysis": {"addresses", "errors", "kernel/record", "system", "wire"},
    "kernel/views": {"kernel/analysis", "kernel/record", "system", "wire"},
    "kernel/history": {"errors", "kernel/analysis", "kernel/record", "kernel/views", "system", "wire"},
    "kernel/capture": {"errors", "libraries", "serialization", "system", "wire"},
    "kernel/settings": {"errors", "interfaces", "kernel/trackers", "options", "pools", "system", "wire"},
    "kernel/session/runs": {
        "addresses",
        "errors",
        "kernel/analysis",
        "kernel/capture",
        "kernel/record",
        "kernel/settings",
        "kernel/trackers",
        "serialization",
        "system",
        "wire",
    },
    "kernel/session/pools": {
        "errors",
        "kernel/session/runs",
        "kernel/settings",
        "pools",
        "pools/machines",
        "system",
        "wire",
    },
    "kernel/session": {
        "addresses",
        "errors",
        "kernel/analysis",
        "kernel/capture",
        "kernel/history",
        "kernel/record",
        "kernel/session/pools",
        "kernel/session/runs",
        "kernel/settings",
        "kernel/trackers",
        "libraries",
        "pools",
        "pools/machines",
        "serialization",
        "system",
        "wire",
    },
    "compat": {
        "errors",
        "gpu_types",
        "interfaces",
        "kernel/analysis",
        "kernel/notebook",
        "kernel/record",
        "kernel/session",
        "kernel/session/runs",
        "kernel/settings",
        "pools",
        "runtime",
        "system",
        "wire",
        "worker/autoparallel",
        "worker/output",
        "worker/pytorch",
    },
    "compat/horovod": {"interfaces", "runtime", "worker", "worker/output"},
    "compat/spark": {
        "interfaces",
        "agent/ranks",
        "compat",
        "kernel/notebook",
        "kernel/record",
        "kernel/session",
        "kernel/session/runs",
        "system",
        "wire",
        "worker",
        "worker/output",
    },
    "kernel/trackers": {"addresses", "errors", "kernel/analysis", "kernel/record", "libraries", "system", "wire"},
    "kernel/sidebar": {
        "addresses",
        "errors",
        "kernel/analysis",
        "kernel/history",
        "kernel/record",
        "kernel/session",
        "kernel/session/pools",
        "kernel/session/runs",
        "kernel/settings",
        "kernel/views",
        "options",
        "pools",
        "system",
        "wire",
    },
    "kernel/notebook": {
        "addresses",
        "cells",
        "errors",
        "gpu_types",
        "interfaces",
        "kernel/analysis",
        "kernel/capture",
        "kernel/history",
        "kernel/record",
        "kernel/session",
        "kernel/session/pools",
        "kernel/session/runs",
        "kernel/settings",
        "kernel/sidebar",
        "kernel/views",
        "options",
        "serialization",
        "system",
        "wire",
    },
}
"""Each folder, and each module at the top, with all that it may import; imports for type checkers count as well.

The package itself (`__init__`) is not in it: it holds names that load on demand."""

A_POOL = {"coordinator", "errors", "options", "pools", "pools/command", "pools/ray", "serialization", "system", "wire"}
"""All that the folder of any other kind of pool may import."""
OTHER_POOLS = {f"pools/{file.parent.name}" for file in FOLDER.glob("pools/*/pool.py")} - MAY_IMPORT.keys()
MAY_IMPORT |= dict.fromkeys(OTHER_POOLS, A_POOL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    module: str
    """Who imports, without the package's name: `agent.main`; empty for the package itself."""
    target: str
    """What, with its full name: `torch.distributed`, `jupyter_distrib.events`."""
    line: int
    eager: bool
    runs: bool

    @property
    def ours(self) -> str | None:
        """The target without the package's name, or None for other people's modules."""
        top, _, rest = self.target.partition(".")
        return rest if top == PACKAGE else None

    def __str__(self) -> str:
        return f"{self.module or '__init__'}, line {self.line}: {self.target}"


def imports_of(folder: Path) -> list[Import]:
    """Every import statement of a package."""
    names = {name_of(file, folder) for file in folder.rglob("*.py")}
    found = []
    for file in sorted(folder.rglob("*.py")):
        module = name_of(file, folder)
        here = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node, eager, runs in statements(tree_of(file), eager=True, runs=True):
            for target in targets(node, here, names):
                found.append(Import(module=module, target=target, line=node.lineno, eager=eager and runs, runs=runs))
    return found


@cache
def our_imports() -> list[Import]:
    return imports_of(FOLDER)


def tree_of(file: Path) -> ast.Module:
    if file.is_relative_to(FOLDER):
        return trees()[file.relative_to(FOLDER).as_posix()]
    return ast.parse(file.read_text(encoding="utf-8"))


def name_of(file: Path, folder: Path) -> str:
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def statements(node: ast.AST, *, eager: bool, runs: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, eager, runs
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        eager = False
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.body:
            yield from statements(child, eager=eager, runs=False)
        for child in node.orelse:
            yield from statements(child, eager=eager, runs=runs)
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # no expression contains a statement
            yield from statements(child, eager=eager, runs=runs)


def targets(node: ast.Import | ast.ImportFrom, here: str, names: set[str]) -> list[str]:
    """What one statement imports; `from package import module` counts as the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parents = here.split(".") if here else []
        kept = parents[: len(parents) - (node.level - 1)]
        base = ".".join([PACKAGE, *kept, *([base] if base else [])])
    inside = base == PACKAGE or base.startswith(f"{PACKAGE}.")
    prefix = base.removeprefix(PACKAGE).removeprefix(".")
    return [
        f"{base}.{alias.name}" if inside and ".".join(filter(None, (prefix, alias.name))) in names else base
        for alias in node.names
    ]


def is_in(module: str, *parts: str) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


# ----------------------------------------------------------------------------------------------------------- the rules


def cycle(imports: list[Import]) -> list[str]:
    """One cycle of imports, or nothing; those inside functions and for type checkers count as well."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.ours and one.ours != one.module:
            graph.setdefault(one.module, set()).add(one.ours)
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def heavy(imports: list[Import]) -> list[Import]:
    return [
        one
        for one in imports
        if one.eager
        and (
            (is_in(one.target, "torch") and not is_in(one.module, *MAY_LOAD_TORCH))
            or (is_in(one.target, "ray") and not is_in(one.module, "compat"))
        )
    ]


def front_end(imports: list[Import]) -> list[Import]:
    return [
        one
        for one in imports
        if one.runs and is_in(one.target, "IPython") and one.module and not is_in(one.module, *MAY_USE_IPYTHON)
    ]


def folder_of(module: str, folders: Iterable[str]) -> str:
    """The folder of a module as `MAY_IMPORT` names it; a module at the top is its own."""
    path = module.replace(".", "/")
    fitting = (folder for folder in folders if path == folder or path.startswith(f"{folder}/"))
    return max(fitting, key=len, default=path)


def layers(imports: list[Import], table: Mapping[str, set[str]] = MAY_IMPORT) -> list[Import]:
    """Imports between folders that the table does not have."""
    return [
        one
        for one in imports
        if one.module
        and one.ours
        and (here := folder_of(one.module, table)) != (there := folder_of(one.ours, table))
        and there not in table.get(here, ())
    ]


RULES = (cycle, heavy, front_end, layers)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert [str(found) for found in rule(our_imports())] == []


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (
            cycle,
            {
                "one.py": "from jupyter_distrib import two",
                "two.py": "from .three import x",
                "three.py": "import jupyter_distrib.one",
            },
        ),
        (cycle, {"one.py": "from . import two", "two.py": "def f():\n    from . import one"}),
        (cycle, {"one.py": "from . import two", "two.py": "if TYPE_CHECKING:\n    from .one import X"}),
        (
            cycle,
            {"one/__init__.py": "from .two import x", "one/two.py": "def f():\n    from jupyter_distrib import one"},
        ),
        (heavy, {"serialization/payload.py": "import torch.distributed"}),
        (heavy, {"agent/main.py": "try:\n    from torch import nn\nexcept ImportError:\n    pass"}),
        (heavy, {"pools/__init__.py": "import ray"}),
        (front_end, {"kernel/session/runs/run.py": "def show():\n    from IPython.display import display"}),
        (layers, {"agent/main.py": "from ..kernel.record import record", "kernel/record/record.py": ""}),
        (
            layers,
            {
                "worker/process/main.py": "def f():\n    from jupyter_distrib.kernel import capture",
                "kernel/capture.py": "",
            },
        ),
        (layers, {"pools/local.py": "if TYPE_CHECKING:\n    import jupyter_distrib.kernel.session.runs.run"}),
        (layers, {"wire/link.py": "from jupyter_distrib import errors", "errors.py": ""}),
    ],
)
def test_a_rule_finds_what_breaks_it(rule, files, tmp_path):
    assert rule(imports_of(package_of(files, tmp_path)))


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (
            cycle,
            {
                "one.py": "from . import two, three",
                "two.py": "from . import three",
                "three.py": "import jupyter_distrib",
            },
        ),
        (heavy, {"strategies/ddp.py": "import torch", "serialization/payload.py": "def f():\n    import torch"}),
        (heavy, {"kernel/session/runs/results.py": "if TYPE_CHECKING:\n    import torch"}),
        (front_end, {"kernel/notebook/magic.py": "import IPython"}),
        (
            layers,
            {"agent/main.py": "from jupyter_distrib.wire import link\nfrom . import rank", "agent/ranks/rank.py": ""},
        ),
    ],
)
def test_a_rule_lets_the_rest_pass(rule, files, tmp_path):
    files = {"wire/link.py": ""} | files
    assert not rule(imports_of(package_of(files, tmp_path)))


@pytest.mark.parametrize(("subject", "allowed"), [("torch", MAY_LOAD_TORCH), ("IPython", MAY_USE_IPYTHON)])
def test_the_page_names_the_same_places(subject: str, allowed: tuple[str, ...]) -> None:
    page = (FOLDER.parent / "docs" / "architecture.md").read_text("utf-8")
    (sentence,) = re.findall(rf"^- {subject} is imported.*?;$", page, re.MULTILINE | re.DOTALL)
    places = {
        place.removesuffix("/").removesuffix(".py").replace("/", ".") for place in re.findall(r"`(.*?)`", sentence)
    }
    assert places == set(allowed)


def test_the_table_of_folders_has_no_circle() -> None:
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_every_row_of_the_table_is_needed() -> None:
    seen = {(folder_of(one.module, MAY_IMPORT), folder_of(one.ours, MAY_IMPORT)) for one in our_imports() if one.ours}
    assert {(here, there) for here, row in MAY_IMPORT.items() if row is not A_POOL for there in row} - seen == set()


def test_every_module_is_in_a_folder_of_the_table() -> None:
    modules = {name_of(file, FOLDER) for file in FOLDER.rglob("*.py")} - {"", "kernel"}
    assert {module for module in modules if folder_of(module, MAY_IMPORT) not in MAY_IMPORT} == set()


def test_the_kernel_knows_every_strategy_without_torch():
    program = "import sys, jupyter_distrib.kernel.settings.available as a; print(*a.STRATEGIES); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["none", "auto"]


def package_of(files: dict[str, str], tmp_path: Path) -> Path:
    for name, source in files.items():
        file = tmp_path / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return tmp_path / PACKAGE


def test_importing_the_package_loads_only_the_standard_library():
    program = """
import json, sys
before = set(sys.modules)
import jupyter_distrib
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert loaded - set(sys.stdlib_module_names) == {PACKAGE}
    assert not loaded & {"asyncio", "multiprocessing"}  # the standard library's own slow ones


def test_loading_the_extension_loads_no_view_and_nothing_of_detached_runs_or_of_other_conversations():
    program = """
import json, sys
import jupyter_distrib.kernel.notebook.extension
print(json.dumps([name for name in sys.modules if name.startswith("jupyter_distrib.")]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("jupyter_distrib.").removeprefix("kernel.") for name in json.loads(done.stdout)}
    assert {"notebook.magic", "wire.messages.kernel"} <= loaded
    assert not loaded & {"views.html", "views.png", "views.state", "notebook.widget_model", "session.detached"}
    assert not loaded & {f"wire.messages.{name}" for name in ("every", "node", "relay", "status", "worker")}


def test_the_coordinator_names_no_engine() -> None:
    """In its code: comments may say where something comes from."""
    for file in (FOLDER / "coordinator").glob("*.py"):
        code = ast.unparse(tree_of(file))
        assert not re.search(r"\bray\b|Ray|RAY", code), file.name
