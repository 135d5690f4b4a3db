"""The code of the package as syntax trees, which several tests walk: each process parses it once."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "jupyter_distrib"


@cache
def trees() -> dict[str, ast.Module]:
    """Each module, by its path below the package."""
    gc.disable()  # else the 600 000 nodes are gone through again and again while they become more
    try:
        return {
            file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
            for file in sorted(PACKAGE.rglob("*.py"))
        }
    finally:
        gc.freeze()
        gc.enable()


@cache
def walked(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree."""
    return list(ast.walk(tree))
