"""The facts about TensorBoard: a `SummaryWriter` that every rank of a cell makes for one folder writes on the rank that
logs. TensorBoard would draw the curves of all ranks as one. One that a single rank makes writes there."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from jupyter_distrib.libraries import tracking
from jupyter_distrib.libraries.library import Library
from jupyter_distrib.system import file_owner

_OF_A_RANK = r"(?i:rank|worker|gpu|proc\w*|device|cuda|node)[\s_=:-]*{0}(?!\d)|(?:^|/){0}(?:/|$)"
"""A rank's number in the name of a folder: `rank1`, `gpu_1_of_2`, `runs/1`."""
_MAYBE_OF_A_RANK = r"(?<!\d){0}(?:/|$)"
"""The same in a name that may count something else, such as `exp_1`."""
_PARTS = 2
"""Number of parts of a path that belong to the run, counted from its end."""
_RANKS = frozenset({"rank", "global_rank", "get_rank", "get_global_rank"})
"""Names of variables and functions whose value differs between any two ranks."""


class SilentWriter:
    """A `FileWriter` that writes nothing."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def get_logdir(self) -> str:
        return self._folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: Any, **__: Any) -> None: ...


def is_of_rank(folder: str, rank: str, *, asks_rank: bool) -> bool:
    """Return whether a folder is named after a rank, so that other ranks do not write there.

    Args:
        folder: The path of the folder.
        rank: The number of the rank.
        asks_rank: Whether the code that has made the name reads the rank.
    """
    name = "/".join(folder.rstrip("/").split("/")[-_PARTS:])
    return bool(
        re.search(_OF_A_RANK.format(rank), name) or (asks_rank and re.search(_MAYBE_OF_A_RANK.format(rank), name))
    )


def _asks_rank() -> bool:
    """Return whether the user's code that is being executed reads its rank."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and not file_owner.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    code = frame.f_code
    words = (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_consts)
    return any("rank" in each.lower() for each in words if isinstance(each, str))


def _is_singled_out() -> bool:
    """Return whether what is being executed is inside an `if` of the user's code that only one rank enters."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        path = frame.f_code.co_filename
        if file_owner.is_users(path) and any(frame.f_lineno in lines for lines in _lines_of_one_rank(path)):
            return True
        frame = frame.f_back
    return False


def _lines_of_one_rank(path: str) -> Iterator[range]:
    """Yield the lines inside each `if` that compares the rank with a number: `if rank == world_size - 1:`."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):  # it has changed since, or is no file of Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _names_one_rank(node.test):
            yield range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)


def _names_one_rank(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(op=ast.And(), values=parts):
            return any(map(_names_one_rank, parts))
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return _is_rank(left) != _is_rank(right)
    return False


def _is_rank(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=function, args=[], keywords=[]):
            return _is_rank(function)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _RANKS
    return False


def _writes(folder: str) -> bool:
    """Return whether this rank writes to a folder."""
    if not tracking.is_silent() or is_of_rank(folder, os.environ.get("RANK", ""), asks_rank=_asks_rank()):
        return True
    return _is_singled_out()


def _mended(module: ModuleType) -> None:
    original: Any = module.FileWriter

    class FileWriter(original):  # type: ignore[misc]  # a class, whose methods MLflow's autologging replaces
        def __new__(cls, log_dir: Any, *arguments: Any, **keywords: Any) -> Any:
            folder = str(log_dir)
            return super().__new__(cls) if _writes(folder) else SilentWriter(folder)

    module.__dict__["FileWriter"] = FileWriter


TENSORBOARD = Library(
    modules=("tensorboard",),
    stays={"torch.utils.tensorboard:SummaryWriter": "it writes from a thread of the notebook: make one in the cell"},
    mend={"torch.utils.tensorboard.writer": _mended},
)
