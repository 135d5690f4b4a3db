"""Private names of other software are those of the table in `system/private_names.py`, each used in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.system import private_names
from jupyter_distrib.system.private_names import LIBRARIES, Library
from tests.repository.package_code import trees, walked

ROOT = Path(__file__).parent.parent.parent
TABLE = "system/private_names.py"
DOCUMENTED = {
    "_current_frames", "_exit", "_fields", "_getframe", "_make", "_thread",  # Python
    "_exit_code", "_render_traceback_", "_repr_html_",  # IPython
    "_CONDOR_SCRATCH_DIR", "_NUM_THREADS", "_cuda_setDevice", "_magic_",  # variables, a message, and our own names
}  # fmt: skip
"""The names with an underscore that may be used anywhere."""
PRIVATE = re.compile(r"_(?!jupyter_distrib)[a-zA-Z]\w*")


@cache
def ours(tree: ast.Module) -> set[str]:
    """The names that a module gives to something itself."""
    found = set[str]()
    for node in walked(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                found.add(node.attr)
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                found |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
            case ast.arg():
                found.add(node.arg)
    return found


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything private that is not certainly the module's own."""
    imported = {
        alias.asname or alias.name
        for node in walked(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jupyter_distrib")
        for alias in node.names
    }
    for node in walked(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in imported:
                continue
            case ast.Attribute(attr=name) if PRIVATE.fullmatch(name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module)) if not module.startswith("jupyter_distrib"):
                names = [*module.split("."), *(alias.name for alias in node.names)]
                yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name))
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
                yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name))
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                yield from ((node.lineno, name) for name in text.split(".") if PRIVATE.fullmatch(name))


def names_of(library: Library) -> set[str]:
    return {part for full in private_names.every(library) for part in re.findall(r"\w+", full)}


def is_own_object(node: ast.expr) -> bool:
    """Whether this is `self`, `cls` or `super()`."""
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"), args=[]):
            return True
    return False


def unlisted(file: str, tree: ast.Module, everywhere: set[str]) -> list[str]:
    """The uses of private names that no library lists for this file.

    What `self` has may be inherited from another module of ours; what anything else has must be this module's own.
    """
    allowed = DOCUMENTED.union(*(names_of(each) for each in LIBRARIES if any(fnmatch(file, one) for one in each.files)))
    own = ours(tree)
    inherited = {
        node.attr for node in walked(tree) if isinstance(node, ast.Attribute) and is_own_object(node.value)
    } & everywhere
    return [f"{file}, line {line}: {name}" for line, name in uses(tree) if name not in allowed | own | inherited]


def test_every_private_name_is_in_the_table_and_used_where_the_table_says() -> None:
    everywhere = set[str]().union(*map(ours, trees().values()))
    assert [each for file, tree in trees().items() if file != TABLE for each in unlisted(file, tree, everywhere)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._cuda_init()",
        "from torch._utils import anything",
        "from torch.utils.data.dataloader import _BaseDataLoaderIter",
        "import torch._dynamo",
        "group = getattr(model, '_update_process_group', None)",
        "vars(loader)['_iterator'] = None",
        "sys.modules['torch._dynamo']",
        "self._buffers[name] = 1",
        "model._parameters",
    ],
)
def test_a_name_of_torch_in_any_other_module_is_found(source: str) -> None:
    assert unlisted("strategies/ddp.py", ast.parse(source), everywhere={"_ours"}) != []


def test_what_a_module_defines_or_inherits_from_ours_is_its_own() -> None:
    source = dedent("""\
        class A(B):
          def __init__(self):
            self._mine = self._inherited
          def f(self, other):
            return other._mine""")
    assert unlisted("strategies/ddp.py", ast.parse(source), everywhere={"_inherited"}) == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_each_name_of_the_table_is_used(library: Library) -> None:
    code = "\n".join(
        ast.unparse(tree)
        for file, tree in trees().items()
        if file != TABLE and any(fnmatch(file, one) for one in library.files)
    )
    names = {full.rpartition(" ")[2] for full in private_names.every(library)}
    assert {name for name in names if PRIVATE.fullmatch(name) and not re.search(rf"\b{name}\b", code)} == set()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_files_of_the_table_are_there(library: Library) -> None:
    assert [file for file in library.files if file != "*" and file not in trees()] == []


def test_the_map_of_the_code_names_the_files_for_those_of_torch() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    (sentence,) = re.findall(r"those of torch are used in (.*?)\. ", page, re.DOTALL)
    assert set(re.findall(r"`(.*?)`", sentence)) == set(private_names.TORCH.files)
