"""Where bytes from a file, a socket or a message become objects or code: only in the files that the table of
docs/security.md names, each with what makes it safe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.repository.package_code import trees, walked

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "docs" / "security.md"

MODULES = {
    "pickle": "load loads Unpickler _Unpickler _load _loads",
    "_pickle": "load loads Unpickler",
    "cloudpickle": "load loads",
    "cloudpickle.cloudpickle": "load loads",
    "dill": "load loads",
    "joblib": "load",
    "marshal": "load loads",
    "shelve": "open",
    "yaml": "load load_all unsafe_load unsafe_load_all full_load full_load_all",
    "numpy": "load fromregex",
    "pandas": "read_pickle",
    "torch": "load",
    "torch.serialization": "load",
    "torch.jit": "load",
    "torch.hub": "load load_state_dict_from_url",
    "torch.distributed.checkpoint": "load save async_save load_state_dict save_state_dict FileSystemReader",
    "torch.distributed.checkpoint.state_dict_loader": "load load_state_dict",
    "torch.distributed.checkpoint.state_dict_saver": "save async_save save_state_dict",
    "torch.distributed.checkpoint.filesystem": "FileSystemReader",
    "torch.distributed.pipelining": "PipelineStage",
    "ray": "get",
    "multiprocessing.connection": "Client Listener",
    "multiprocessing": "Pipe Queue SimpleQueue Manager",
    "runpy": "run_path run_module",
    "code": "interact InteractiveConsole InteractiveInterpreter",
}
"""What makes objects of bytes, or executes text, by module."""
OBJECT_COLLECTIVES = frozenset({
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
})  # fmt: skip
BUILT_IN = frozenset({"exec", "eval"})
IN_TEXT = re.compile(r"\b(exec|eval|(?:pickle|cloudpickle|marshal)\.loads?|runpy\.run_\w+)\(")
"""Programs that the package writes for other processes."""


@cache
def loaders() -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module, names in MODULES.items() for name in names.split())


def found_in(tree: ast.Module) -> set[str]:
    """The names in a module that make objects of bytes, whether they are called or handed on."""
    names = local_names(tree)
    documentation = {id(text) for text in docstrings(tree)}
    found = set()
    for node in walked(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILT_IN and name not in names:
                found.add(name)
            case ast.Name() | ast.Attribute():
                full = dotted(node, names)
                if full in loaders():
                    found.add(full)
                elif full.rpartition(".")[2] in OBJECT_COLLECTIVES:
                    found.add(full.rpartition(".")[2])
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                found |= set(IN_TEXT.findall(text))
            case ast.ImportFrom(module=str(module)):
                imported = {f"{module}.{each.name}" for each in node.names}
                found |= imported & loaders()
                found |= {each.name for each in node.names} & OBJECT_COLLECTIVES
    return found


def local_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for."""
    names = {}
    for node in walked(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname: each.name for each in node.names if each.asname}
            tops = [each.name.partition(".")[0] for each in node.names if not each.asname]
            names |= dict(zip(tops, tops, strict=True))
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute(value=value, attr=attribute):
            return f"{dotted(value, names)}.{attribute}"
    return "?"


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in walked(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def in_the_package() -> dict[str, set[str]]:
    every = {path: found_in(tree) for path, tree in trees().items()}
    return {path: found for path, found in every.items() if found}


def in_the_table() -> dict[str, set[str]]:
    """The rows of the table: a file, its calls, and what makes it safe."""
    section = TABLE.read_text("utf-8").partition("## Where bytes become objects")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and row[2].strip() for row in rows)
    return {row[0].strip(" `"): set(re.findall(r"`([^`]+)`", row[1])) for row in rows}


def test_the_table_names_every_place_and_no_other():
    assert in_the_package() == in_the_table()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle\npickle.loads(b'')", {"pickle.loads"}),
        ("import pickle as p\np.load(f)", {"pickle.load"}),
        ("def f():\n    from pickle import loads\n    return loads", {"pickle.loads"}),
        ("import pickle\nclass A(pickle.Unpickler): ...", {"pickle.Unpickler"}),
        ("import pickle\nread = map(pickle.loads, parts)", {"pickle.loads"}),
        ("import torch\ntorch.load('x', weights_only=True)", {"torch.load"}),
        ("import numpy as np\nnp.load('x')", {"numpy.load"}),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", {"all_gather_object"}),
        ("def f(distributed):\n    distributed.broadcast_object_list(a)", {"broadcast_object_list"}),
        ("from torch.distributed import gather_object", {"gather_object"}),
        ("from torch.distributed.checkpoint.state_dict_saver import save as s", {
            "torch.distributed.checkpoint.state_dict_saver.save"
        }),
        ("exec(text)", {"exec"}),
        ("run = eval", {"eval"}),
        ("program = f'import pickle; pickle.loads({data!r})'", {"pickle.loads"}),
    ],
)  # fmt: skip
def test_the_rule_finds_what_breaks_it(text: str, found: set[str]):
    assert found_in(ast.parse(text)) == found


@pytest.mark.parametrize(
    "text",
    [
        "import json\njson.loads(text)",
        "import pickle\npickle.dumps(1)",
        "'''pickle.loads() is not called here'''",
        "model.load(path)",
        "import torch\ntorch.save(a, b)",
    ],
)
def test_the_rule_leaves_alone_what_keeps_it(text: str):
    assert found_in(ast.parse(text)) == set()
