"""Who may import what (docs/architecture.md), read from the sources without importing them.

An *eager* import runs when the module is imported. Those inside functions run later; those under `if TYPE_CHECKING`
never do.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "jupyter_distrib"
FOLDER = Path(__file__).parent.parent / PACKAGE

MAY_LOAD_TORCH = ("worker", "compat", "checkpoints")
MAY_USE_IPYTHON = ("magic", "completion", "widget", "api", "frontend", "worker.displaying", "comment")
# What crosses, how it crosses, and `report`/`progress`, which cells call on a rank.
WHAT_CROSSES = {
    "control_groups",
    "errors",
    "events",
    "arguments",
    "options",
    "payload",
    "link",
    "paths",
    "shared_memory",
    "tensors",
    "reporting",
    "diagnose",
    "words",
    "environment",
}


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
        for node, eager, runs in statements(ast.parse(file.read_text(encoding="utf-8")), eager=True, runs=True):
            for target in targets(node, here, names):
                found.append(Import(module=module, target=target, line=node.lineno, eager=eager and runs, runs=runs))
    return found


def name_of(file: Path, folder: Path) -> str:
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def statements(node: ast.AST, *, eager: bool, runs: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, eager, runs
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        eager = False
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.body:
            yield from statements(child, eager=eager, runs=False)
        for child in node.orelse:
            yield from statements(child, eager=eager, runs=runs)
        return
    for child in ast.iter_child_nodes(node):
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
    """One cycle of eager imports, or nothing. A submodule's import of its own package's `__init__` is not counted."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.eager and one.ours is not None and not is_in(one.module, one.ours) and one.ours:
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
    return [one for one in imports if one.runs and is_in(one.target, "IPython") and one.module not in MAY_USE_IPYTHON]


def kernel_side(imports: list[Import]) -> list[Import]:
    """What the agent and the workers take from the kernel's side and should not; types count, since they couple too."""
    return [
        one
        for one in imports
        if is_in(one.module, "agent", "worker")
        and one.ours  # the package itself holds nothing but names that load on demand
        and not is_in(one.ours, "agent", "worker")
        and one.ours.split(".")[0] not in WHAT_CROSSES
    ]


def pools_that_know_runs(imports: list[Import]) -> list[Import]:
    return [one for one in imports if is_in(one.module, "pools") and is_in(one.ours or "", "run")]


RULES = (cycle, heavy, front_end, kernel_side, pools_that_know_runs)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert [str(found) for found in rule(imports_of(FOLDER))] == []


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
        (heavy, {"payload.py": "import torch.distributed"}),
        (heavy, {"agent/main.py": "try:\n    from torch import nn\nexcept ImportError:\n    pass"}),
        (heavy, {"pools/__init__.py": "import ray"}),
        (front_end, {"run.py": "def show():\n    from IPython.display import display"}),
        (kernel_side, {"agent/main.py": "from ..record import RunRecord", "record.py": ""}),
        (kernel_side, {"worker/main.py": "def f():\n    from jupyter_distrib import capture", "capture.py": ""}),
        (pools_that_know_runs, {"pools/local.py": "from jupyter_distrib.run import Run", "run.py": ""}),
    ],
)
def test_a_rule_finds_what_breaks_it(rule, files, tmp_path):
    assert rule(imports_of(package_of(files, tmp_path)))


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (cycle, {"one.py": "from . import two", "two.py": "def f():\n    from . import one"}),
        (cycle, {"one.py": "from . import two", "two.py": "if TYPE_CHECKING:\n    from . import one"}),
        (heavy, {"worker/strategies/ddp.py": "import torch", "payload.py": "def f():\n    import torch"}),
        (heavy, {"results.py": "if TYPE_CHECKING:\n    import torch"}),
        (front_end, {"magic.py": "import IPython"}),
        (kernel_side, {"agent/main.py": "from jupyter_distrib import events, link\nfrom ..worker import main"}),
        (pools_that_know_runs, {"magic.py": "from .run import Run", "pools/local.py": "from . import protocol"}),
    ],
)
def test_a_rule_lets_the_rest_pass(rule, files, tmp_path):
    files = {"events.py": "", "link.py": "", "run.py": "", "pools/protocol.py": "", "worker/main.py": ""} | files
    assert not rule(imports_of(package_of(files, tmp_path)))


def test_the_kernel_knows_every_strategy_without_torch():
    program = "import sys, jupyter_distrib.strategies as s; print(*s.STRATEGIES); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["none", "ddp"]


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
