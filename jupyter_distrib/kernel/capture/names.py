"""The names that a program reads before it binds them. Pure: any thread of the kernel; never executes the program.

A forward pass over the statements of a module keeps the set of *settled* names: on every path to this point the program
has bound (or deleted) them, so what the name meant before the program started can no longer be seen. Where paths meet,
the sets are intersected; a path that ended (`raise`, `break`) does not count. What is read while it is not settled is
*needed*. A function body runs later, so what it reads is needed unless it was settled when the function was made.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jupyter_distrib.system import annotation_texts
from jupyter_distrib.system.data_class import data_class


@dataclass(slots=True, eq=False)
class _Scope:
    """A module, class or function, and the state of its names at the current point of the pass."""

    kind: Literal["module", "class", "function"]
    parent: _Scope | None = None
    settled: set[str] = field(default_factory=set)
    bound: dict[str, None] = field(default_factory=dict)
    """The names bound so far on any path."""
    declared_global: set[str] = field(default_factory=set)
    hidden: frozenset[str] = frozenset()
    """The variables of the comprehensions around this point, and type parameters: they hide outer names."""
    in_comprehension: bool = False
    in_generator: bool = False
    dead: bool = False
    """Whether no path leads to this point."""
    straight: bool = True
    """Whether every call of the function reaches this point, if nothing raises."""
    breaks: list[list[set[str]]] = field(default_factory=list)
    """The names settled at the `break`s of each loop around this point."""
    reads: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """The reads in a function: name -> first line, whether every call reads it. Which names are local is known only at
    its end."""


LAZY_ANNOTATIONS = sys.version_info >= (3, 14)
"""Whether annotations are evaluated only on demand (PEP 649)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A name whose value from before the program starts may be visible to it."""

    name: str
    line: int
    """The first line that reads it."""
    certain: bool
    """Whether the program is sure to read it; False if it may never read it, or may have bound it by then."""


@data_class
class Names:
    """The names that a program takes from its namespace, and the names that it binds in it."""

    needs: tuple[Need, ...]
    """The needs, one for each name, in the order of their lines."""
    defines: tuple[str, ...]
    """The names bound at module level, also by `global` in a function, in order."""


def analyse(program: ast.Module, *, future_annotations: bool = False) -> Names:
    """Return the names that `program`, executed as a module body, needs and defines."""
    walk = _Walk(future_annotations)
    walk.walk(*program.body)
    return walk.result()


class _Walk:
    """One pass over a program: its findings so far, and the current scope."""

    def __init__(self, future_annotations: bool) -> None:
        self.module = self.scope = _Scope("module")
        self.lazy_annotations = future_annotations or LAZY_ANNOTATIONS
        self.needs: dict[str, tuple[int, bool]] = {}
        self.later: list[tuple[str, int, bool, str | None]] = []
        """The reads in function bodies: name, line, whether every call reads it, and the function to call."""
        self.called: set[str] = set()
        self.guards = 0
        """Number of statements around this point that expect a NameError."""
        self.star = False

    def result(self) -> Names:
        for name, line, sure, owner in self.later:
            called = owner is None or owner in self.called
            self.need(name, line, sure and called and name not in self.module.bound)
        found = sorted(self.needs.items(), key=lambda item: item[1][0])
        needs = tuple(Need(name=name, line=line, certain=certain) for name, (line, certain) in found)
        return Names(needs=needs, defines=tuple(self.module.bound))

    # Names: the scope of each, and whether the module has settled the name.

    def need(self, name: str, line: int, certain: bool) -> None:
        known = self.needs.get(name)
        self.needs[name] = (line, certain) if known is None else (min(line, known[0]), certain or known[1])

    def read(self, name: str, line: int, *, later: bool = False, sure: bool = True, owner: str | None = None) -> None:
        """Find the scope of a name and record the read. `later`: the read is in a function made at this point, which
        does not see a class's names."""
        scope: _Scope | None = self.scope
        while scope is not None and name not in scope.hidden:
            if name in scope.declared_global:
                in_function = scope.kind == "function"
                later, sure, scope = later or in_function, sure and not in_function, self.module
            if scope.kind == "module":
                return self.read_in_module(name, line, sure, owner, later)
            if scope.kind == "function":
                first, known = scope.reads.get(name, (line, False))
                sure = sure and scope.straight and not (later or self.guards or scope.dead)
                scope.reads[name] = first, known or sure
                return None
            if not later and not scope.in_comprehension and name in scope.bound:
                if name in scope.settled:
                    return None
                sure = False
            scope = scope.parent
        return None

    def read_in_module(self, name: str, line: int, sure: bool, owner: str | None, later: bool) -> None:
        module = self.module
        if name in module.settled:
            return
        sure = sure and not (self.guards or self.star or module.dead)
        if later or module.in_generator:
            self.later.append((name, line, sure, owner))
        else:
            self.need(name, line, sure and name not in module.bound)

    def bind(self, name: str) -> None:
        scope = self.scope
        if name in scope.declared_global:
            self.module.bound.setdefault(name)
        else:
            scope.settled.add(name)
            scope.bound.setdefault(name)

    # Paths.

    def branch(self, *nodes: ast.AST, sometimes: bool = True, dead: bool = False) -> set[str] | None:
        """Follow one of several paths, then restore the state before it. Return the names settled at its end; None if
        the end is never reached."""
        scope = self.scope
        before = scope.settled, scope.dead, scope.straight
        scope.settled = set(scope.settled)
        scope.dead = scope.dead or dead
        scope.straight = scope.straight and not sometimes
        self.walk(*nodes)
        end = self.here()
        scope.settled, scope.dead, scope.straight = before
        scope.straight = scope.straight and not (sometimes and end is None and not dead)  # it may have returned
        return end

    def join(self, *ends: set[str] | None) -> None:
        live = [end for end in ends if end is not None]
        if live:
            self.scope.settled = set.intersection(*live)
        else:
            self.scope.dead = True

    def here(self) -> set[str] | None:
        return None if self.scope.dead else self.scope.settled

    def walk(self, *nodes: ast.AST | None) -> None:
        """Walk nodes in the order of execution, without recursion if possible, since `a + b + c + ...` nests deeply."""
        stack: list[Any] = list(reversed(nodes))
        while stack:
            node = stack.pop()
            kind = type(node)
            visit, children = _PLANS.get(kind) or _plan(kind)
            if visit is not None:
                visit(self, node)
                continue
            if kind is ast.Call and type(node.func) is ast.Name and self.scope is self.module:
                self.called.add(node.func.id)
            for attribute in children:
                child = getattr(node, attribute, None)
                if type(child) is list:
                    stack += child[::-1]
                elif child is not None:
                    stack.append(child)

    # Expressions.

    def visit_name(self, node: ast.Name) -> None:
        if type(node.ctx) is ast.Store:
            return self.bind(node.id)
        if self.scope is self.module and node.id in self.module.settled:
            return None  # the most frequent case, without a search
        self.read(node.id, node.lineno)
        if type(node.ctx) is ast.Del:
            self.scope.settled.add(node.id)
            if self.scope.kind == "function":
                self.bind(node.id)  # makes it a local
        return None

    def visit_ifexp(self, node: ast.IfExp) -> None:
        self.walk(node.test)
        self.join(self.branch(node.body), self.branch(node.orelse))

    def visit_boolop(self, node: ast.BoolOp) -> None:
        self.walk(node.values[0])
        self.branch(*node.values[1:])

    def visit_compare(self, node: ast.Compare) -> None:
        self.walk(node.left, node.comparators[0])
        if len(node.comparators) > 1:
            self.branch(*node.comparators[1:])

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        scope, generators = self.scope, node.generators
        self.walk(generators[0].iter)
        outside = scope.hidden, scope.in_comprehension, scope.in_generator
        targets = (part for each in generators for part in ast.walk(each.target))
        scope.hidden |= {part.id for part in targets if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        scope.in_comprehension = True
        scope.in_generator = scope.in_generator or isinstance(node, ast.GeneratorExp)
        inner = [part for each in generators for part in (each.iter, *each.ifs)][1:]
        result = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        self.branch(*inner, *result, sometimes=False)
        scope.hidden, scope.in_comprehension, scope.in_generator = outside

    def capturing_pattern(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        self.walk(*ast.iter_child_nodes(node))
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None:
            self.bind(name)

    # Functions and classes.

    def visit_lambda(self, node: ast.Lambda) -> None:
        self.walk(*node.args.defaults, *node.args.kw_defaults)
        self.walk_later(node.body, arguments=_arguments_of(node.args))

    def visit_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = _arguments_of(node.args)
        self.walk(*node.decorator_list, *node.args.defaults, *node.args.kw_defaults)
        outside = self.enter_type_parameters(node)
        self.annotations(*(argument.annotation for argument in arguments), node.returns)
        self.walk_later(*node.body, arguments=arguments, owner=node.name if self.scope is self.module else None)
        self.scope.hidden = outside
        self.bind(node.name)

    def visit_classdef(self, node: ast.ClassDef) -> None:
        self.walk(*node.decorator_list)
        outer, outside = self.scope, self.enter_type_parameters(node)
        self.walk(*node.bases, *node.keywords)
        implicit = {"__module__", "__qualname__"}
        self.scope = _Scope("class", outer, settled=implicit, bound=dict.fromkeys(implicit))
        self.walk(*node.body)
        self.scope, outer.hidden = outer, outside
        self.bind(node.name)

    def walk_later(self, *nodes: ast.AST | None, arguments: Sequence[ast.arg] = (), owner: str | None = None) -> None:
        """Walk the body of a function made at this point, and pass on the reads of names that are not its own."""
        outer, guards = self.scope, self.guards
        self.scope = inner = _Scope("function", outer, bound=dict.fromkeys(each.arg for each in arguments))
        self.guards = 0
        self.walk(*nodes)
        self.scope, self.guards = outer, guards
        for name, (line, sure) in inner.reads.items():
            if name not in inner.bound and name != "__class__":
                self.read(name, line, later=True, sure=sure and owner is not None, owner=owner)

    def annotations(self, *nodes: ast.expr | None) -> None:
        if self.lazy_annotations:
            self.walk_later(*nodes)
        else:
            self.walk(*nodes)
        for node in filter(None, nodes):
            self.walk_later(*annotation_texts.nested(node))

    def enter_type_parameters(self, node: ast.AST) -> frozenset[str]:
        """Hide the names of `[T, ...]`. Return the names hidden before, which the caller puts back."""
        outside = self.scope.hidden
        parameters = getattr(node, "type_params", ())
        self.scope.hidden = outside.union(each.name for each in parameters)
        for each in parameters:
            self.walk_later(getattr(each, "bound", None), getattr(each, "default_value", None))
        return outside

    def visit_typealias(self, node: Any) -> None:  # ast.TypeAlias is new in Python 3.12
        outside = self.enter_type_parameters(node)
        self.walk_later(node.value)
        self.scope.hidden = outside
        self.bind(node.name.id)

    # Statements.

    def visit_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read(node.target.id, node.lineno)
        self.walk(node.value, node.target)

    def visit_annassign(self, node: ast.AnnAssign) -> None:
        self.walk(node.value)
        in_function = self.scope.kind == "function"  # a function does not evaluate its annotations
        if not in_function:
            self.annotations(node.annotation)
        if in_function or node.value is not None or not node.simple:
            self.walk(node.target)

    def visit_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.bind(alias.asname or alias.name.partition(".")[0])

    def visit_importfrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.star = True
            else:
                self.bind(alias.asname or alias.name)
            self.lazy_annotations |= node.module == "__future__" and alias.name == "annotations"

    def visit_global(self, node: ast.Global) -> None:
        if self.scope is not self.module:
            self.scope.declared_global.update(node.names)

    def visit_if(self, node: ast.If) -> None:
        ends = []
        while True:  # an `elif` chain nests deeply too
            self.walk(node.test)
            always = _is_constant(node.test, True)
            ends.append(self.branch(*node.body, dead=_is_constant(node.test, False)))
            if always or len(node.orelse) != 1 or not isinstance(node.orelse[0], ast.If):
                break
            node = node.orelse[0]
        self.join(*ends, self.branch(*node.orelse, dead=always))

    def visit_for(self, node: ast.For | ast.AsyncFor) -> None:
        self.walk(node.iter)
        breaks = self.loop(node.target, *node.body)
        self.walk(*node.orelse)
        self.join(self.here(), *breaks)

    def visit_while(self, node: ast.While) -> None:
        self.walk(node.test)
        breaks = self.loop(*node.body)
        end = self.branch(*node.orelse, dead=_is_constant(node.test, True), sometimes=False)
        self.join(end, *breaks)

    def loop(self, *nodes: ast.AST) -> list[set[str]]:
        """Walk a loop's body. Return the names settled at each `break`; the end of the body is ignored, since it may
        never have run."""
        breaks: list[set[str]] = []
        self.scope.breaks.append(breaks)
        self.branch(*nodes, sometimes=False)
        self.scope.breaks.pop()
        return breaks

    def leave(self, node: ast.Return | ast.Raise | ast.Continue | ast.Break) -> None:
        self.walk(*ast.iter_child_nodes(node))
        if isinstance(node, ast.Break) and self.scope.breaks and not self.scope.dead:
            self.scope.breaks[-1].append(set(self.scope.settled))
        self.scope.dead = True

    def visit_try(self, node: ast.Try) -> None:
        expects = any(_mentions_name_error(handler.type) for handler in node.handlers)
        self.guards += expects
        ends = [self.branch(*node.body, *node.orelse, sometimes=False)]
        self.guards -= expects
        ends += [self.handler(handler) for handler in node.handlers]
        before = self.scope.settled
        last = self.branch(*node.finalbody, sometimes=False)  # from the start's state: the body may raise anywhere
        self.join(*ends)
        if last is None:
            self.scope.dead = True
        else:
            self.scope.settled = self.scope.settled | (last - before)

    def handler(self, node: ast.ExceptHandler) -> set[str] | None:
        self.walk(node.type)
        if node.name is None:
            return self.branch(*node.body)
        known = node.name in self.scope.bound
        end = self.branch(ast.Name(node.name, ast.Store()), *node.body)
        if not known and self.scope.kind != "function":  # Python deletes it after the handler
            self.scope.bound.pop(node.name, None)
        return end

    def visit_with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.walk(item.context_expr, item.optional_vars)
        if any(_suppresses_exceptions(item.context_expr) for item in node.items):
            self.guards += 1
            self.branch(*node.body, sometimes=False)
            self.guards -= 1
        else:
            self.walk(*node.body)

    def visit_match(self, node: ast.Match) -> None:
        self.walk(node.subject)
        ends = [self.branch(*filter(None, (case.pattern, case.guard)), *case.body) for case in node.cases]
        last = node.cases[-1]
        always = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        self.join(*ends, None if always else self.here())


_Visit = Callable[[_Walk, Any], None]
_PLANS: dict[type, tuple[_Visit | None, tuple[str, ...]]] = {type(None): (None, ())}
_ALIKE = {"asyncfunctiondef": "functiondef", "asyncfor": "for", "asyncwith": "with", "trystar": "try"}
_OTHERS: dict[type, _Visit] = {
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), _Walk.comprehension),
    **dict.fromkeys((ast.MatchAs, ast.MatchStar, ast.MatchMapping), _Walk.capturing_pattern),
    **dict.fromkeys((ast.Return, ast.Raise, ast.Continue, ast.Break), _Walk.leave),
}
_ORDER = {ast.NamedExpr: ("value", "target"), ast.Assign: ("value", "targets")}
_NOT_NODES = {"ctx", "op", "ops", "attr", "arg", "kind", "type_comment", "conversion", "names", "kwd_attrs", "str"}


def _plan(kind: type[ast.AST]) -> tuple[_Visit | None, tuple[str, ...]]:
    """Return the plan to walk a class of nodes: a method, or the attributes that hold its children, last first."""
    name = kind.__name__.lower()
    visit = _OTHERS.get(kind) or getattr(_Walk, f"visit_{_ALIKE.get(name, name)}", None)
    fields = () if kind in (ast.Constant, ast.MatchSingleton) else _ORDER.get(kind, kind._fields)
    _PLANS[kind] = plan = visit, tuple(field for field in reversed(fields) if field not in _NOT_NODES)
    return plan


def _arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters of a function."""
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def _is_constant(test: ast.expr, truth: bool) -> bool:
    """Return whether a condition is a constant with this truth."""
    return isinstance(test, ast.Constant) and bool(test.value) is truth


def _mentions_name_error(caught: ast.expr | None) -> bool:
    """Return whether an `except` clause names NameError."""
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(part, ast.Name) and part.id == "NameError" for part in parts)


def _suppresses_exceptions(context: ast.expr) -> bool:
    """Return whether a context manager is `contextlib.suppress`, by its name."""
    function = context.func if isinstance(context, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", "")) == "suppress"
