"""Finds models of the notebook that a cell has trained on the ranks and left there: the notebook's own stay as they
were before, and are easily taken for the trained ones. Rank's main thread."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Container, Iterable, Iterator
from dis import get_instructions
from itertools import pairwise
from types import CodeType
from typing import TypeGuard
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.system import call_parts
from jupyter_distrib.system.nested_code import codes_in, own_functions
from jupyter_distrib.worker.autoparallel import object_collectives, ownership
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch import private

_WRITES = re.compile(r"save|dump|export|push_to_hub|checkpoint", re.IGNORECASE)
"""Names of functions that write a model somewhere."""
_WRITES_OTHERS = re.compile(
    r"saved|savefig|savetxt|imsave|save_?(all_)?(im(age|g)|fig|plot|grid|video|gif|audio|sample|for_backward|on_cpu)"
    r"|save_hyperparameters|(gradient|activation)_checkpoint|(load|resume|restore)\w*checkpoint",
    re.IGNORECASE,
)
"""Names of saved objects, and of functions that save something other than a model."""
_DEPTH = 4
"""Depth of the search for a model in a value."""
_MOST_PARTS = 100
_said: dict[str, int] = {}
"""Digest of the text of the cell that has the note on a model, by the model's name. The same cell gets it again when it
is run again, since its output is then a new one."""


class NotebookModels:
    """The models that one run has from the notebook."""

    def __init__(self, run: StrategyRun) -> None:
        self._run = run
        self._names: list[tuple[ref[nn.Module], str]] = []
        self._trained: dict[str, tuple[ref[nn.Module], int]] = {}
        """Models with an optimizer by name, with the sum of their parameters' versions before its steps."""
        self._text = ""
        """The text of the cell."""
        self._returned = self._saved = False

    def begin(self, patches: Patches, kept_values: Iterable[object]) -> None:
        """Record the models; called before the cell.

        Args:
            patches: Replaces functions for the time of the cell.
            kept_values: Values that earlier cells have left on this rank.
        """
        if identity.rank() != 0 or self._run.keep is None or not object_collectives.others.have_values:
            return
        seen = {id(model) for value in kept_values for model in _models_in(value)}
        given = call_parts.arguments(self._run.names)
        named = [(name, each) for name, each in (*self._run.names.items(), *given.items()) if name[:1] != "_"]
        direct = [(name, each) for name, each in named if _is_model(each)]
        for name, value in (*direct, *named):
            for model in _models_in(value):
                if id(model) not in seen:
                    seen.add(id(model))
                    self._names.append((ref(model), name))
        if self._names:
            patches.replace(torch, "save", self._saving)

    def adopted(self, roots: Iterable[nn.Module]) -> None:
        """Record that an optimizer is to train these models, which have their own parameters by now. A model of the
        notebook may be a part of one that the cell has made: `DataParallel(net)`, a backbone with a new head."""
        named = {id(model): (weak, name) for weak, name in self._names if (model := weak()) is not None}
        for root in roots:
            for model in _outermost(root, named):
                weak, name = named[id(model)]
                if name not in self._trained:
                    self._train(weak, name, _version(model))

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer, which no strategy manages, has trained the models that have its parameters."""
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for weak, name in self._names:
            model = weak()
            own = ownership.own_parameters(model) if model is not None else ()
            if name not in self._trained and not trained.isdisjoint(map(id, own)):
                self._train(weak, name, 0)

    def returning(self, value: object) -> None:
        """Record the value that the cell returns."""
        self._returned = bool(self._names) and holds_weights(value)

    def note(self) -> None:
        """Add a note on each trained model that stays on the ranks; called unless the cell has failed."""
        is_call = call_parts.FUNCTION in self._run.names
        for name in self._left():
            what, cure = "cell", f"add --keep {name}, and read {name}[0] in the notebook, or end the cell with `{name}`"
            if is_call:
                what, cure = "function", "return it from the function"
            self._run.note(
                f"`{name}` of the notebook is as it was before: the {what} has trained its copies on the ranks. For "
                f"the trained one {cure}"
            )

    def _train(self, weak: ref[nn.Module], name: str, version: int) -> None:
        self._trained[name] = weak, version
        self._text = "".join(linecache.getlines(self._run.filename))  # gone when the cell has ended

    def _left(self) -> Iterator[str]:
        """Yield the name of each trained model that stays on the ranks, unless another cell has a note on it."""
        if self._returned or self._saved or not self._trained:
            return
        values = [self._run.names.get(name) for name in self._run.keep or ()]
        kept = {id(each) for value in values for model in _models_in(value) for each in ownership.own_parameters(model)}
        for name, (weak, version) in self._trained.items():
            model, cell = weak(), hash(self._text)
            if model is None or _version(model) == version or self._writes():
                continue
            if kept.issuperset(map(id, ownership.own_parameters(model))):  # also in a wrapper, or in a larger model
                continue
            if _said.setdefault(name, cell) == cell:
                yield name

    def _writes(self) -> bool:
        """Return whether the cell, or a function or class of the notebook that it has, names a function that writes
        models; `torch.save` is observed instead."""
        codes = (each.__code__ for each in own_functions(self._run.names))
        names = [*_names_in_text(self._text), *(name for code in codes for name in _names_in(code))]
        return any(_WRITES.search(_WRITES_OTHERS.sub("", name)) for name in names)

    def _saving(self, original: object) -> object:
        def save(*args: object, **keywords: object) -> object:
            self._saved = self._saved or holds_weights(args[0] if args else keywords.get("obj"))
            return original(*args, **keywords)  # type: ignore[operator]

        return save


def _names_in_text(text: str) -> Iterator[str]:
    """Yield the names that a cell reads, its keywords and the methods that it calls; a text that is not Python as it
    is. A keyword that switches something off does not count."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        yield text
        return
    for node in ast.walk(tree):
        match node:
            case ast.keyword(value=ast.Constant(False | None | "no")):
                pass
            case ast.Name(id=name, ctx=ast.Load()) | ast.keyword(arg=str(name)):
                yield name
            case ast.Call(func=ast.Attribute(attr=name) as called) if ast.unparse(called) != "torch.save":
                yield name


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the globals and attributes that a function and those inside it use, without `torch.save`."""
    for part in codes_in(code):
        for before, each in pairwise(get_instructions(part)):
            if each.argval in part.co_names and (before.argval, each.argval) != ("torch", "save"):
                yield each.argval


def holds_weights(value: object, depth: int = _DEPTH) -> bool:
    """Return whether a value has a model or a parameter in it, or a dict of tensors, such as a `state_dict`."""
    if _is_model(value) or issubclass(type(value), nn.Parameter):
        return True
    if depth == 0:
        return False
    parts = _parts(value)
    if issubclass(type(value), dict) and any(issubclass(type(each), torch.Tensor) for each in parts):
        return True
    return any(holds_weights(each, depth - 1) for each in parts)


def _models_in(value: object, depth: int = _DEPTH) -> Iterator[nn.Module]:
    """Yield a model, and those in its lists, which register none; or those in a container or in an object of the
    notebook's classes."""
    if _is_model(value):
        yield value
        lists = [each for name, each in vars(value).items() if name[:1] != "_" and isinstance(each, (list, tuple))]
        for part in lists[:_MOST_PARTS] if depth else ():
            yield from _models_in(part, depth - 1)
    elif depth:
        for each in _parts(value):
            yield from _models_in(each, depth - 1)


def _outermost(model: nn.Module, ids: Container[int]) -> Iterator[nn.Module]:
    """Yield the model if its id is one of these; else those of its parts, without parts of parts."""
    if id(model) in ids:
        yield model
    else:
        for part in model.children():
            yield from _outermost(part, ids)


def _parts(value: object) -> list[object]:
    if issubclass(type(value), dict):
        return list(value.values())[:_MOST_PARTS]  # type: ignore[attr-defined]
    if issubclass(type(value), (list, tuple)):
        return list(value[:_MOST_PARTS])  # type: ignore[index]
    if type(value).__module__ == "__main__" and not issubclass(type(value), type):
        return list(getattr(value, "__dict__", {}).values())[:_MOST_PARTS]
    return []


def _is_model(value: object) -> TypeGuard[nn.Module]:
    return issubclass(type(value), nn.Module)  # not isinstance(), which may run any code of a proxy


def _version(model: nn.Module) -> int:
    return sum(private.version_of(each) for each in ownership.own_parameters(model))
