"""The decorator `@distributed(gpus=8)`, which runs a function on ranks as `%%distributed` runs a cell.

    train(0.1)               here, as without the decorator; on a rank, there
    train.distributed(0.1)   on every rank; returns one value for each
    train.submit(0.1)        on every rank, while the notebook goes on; returns a `Run`

In the thread that calls the function.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, overload

from jupyter_distrib.addresses import without_secret, without_secrets
from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.kernel.capture import inputs as inputs_module
from jupyter_distrib.kernel.capture.capture import PROVIDED, Input
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.cell_order import CellRequest
from jupyter_distrib.kernel.session.runs.interrupt_presses import early_interrupt
from jupyter_distrib.kernel.session.runs.program import Program
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings import find_files
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, OF_CELLS, Options
from jupyter_distrib.kernel.settings.keywords import from_keywords, in_call, with_options
from jupyter_distrib.kernel.settings.option_keywords import OptionKeywords
from jupyter_distrib.kernel.settings.settings import CellOptions, Settings
from jupyter_distrib.system import call_parts, file_owner, formatting, importable, interrupts, process_environment
from jupyter_distrib.system.nested_code import undecorated
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.kernel.views.dry_run import DryRun, DryRuns

P = ParamSpec("P")
R = TypeVar("R")

LABEL_CHARACTERS = 60
_CALL = f"{call_parts.FUNCTION}(*{call_parts.ARGUMENTS}, **{call_parts.KEYWORDS})"


@overload
def distributed(function: Callable[P, R], /) -> DistributedFunction[P, R]: ...
@overload
def distributed(
    *, remote: bool | None = None, timeout: float | None = None, **options: Unpack[OptionKeywords]
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...
def distributed(
    function: Callable[P, R] | None = None,
    /,
    *,
    remote: bool | None = None,
    timeout: float | None = None,
    **options: Unpack[OptionKeywords],
) -> DistributedFunction[P, R] | Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Give a function the methods `distributed` and `submit`, which run it on every rank of a pool.

    Without `strategy`, each rank finds torchrun's environment and no process group.

    Args:
        function: The function, where the decorator stands without parentheses.
        remote: True for the pool that the settings name as `remote`, False for this machine.
        timeout: The same as `timeout_s`.
        options: The options of `%%distributed`.

    Raises:
        OptionsError: It names the keyword that is wrong.
    """
    if identity.is_rank():  # a module that a rank imports: its settings are not the notebook's
        return _given(function, Options())
    settings = session.current().settings
    given = {**options, **_pool_option(remote, options, settings), **_timeout_option(timeout, options)}
    chosen = from_keywords(given, **settings.possible)
    for name in OF_CELLS:
        if getattr(chosen, name):
            raise OptionsError(
                f"{name} is an option of cells only: a function has arguments and a return value instead"
            )
    return _given(function, chosen)


with_options(distributed)


def _given(
    function: Callable[P, R] | None, options: Options
) -> DistributedFunction[P, R] | Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    if function is None:
        return lambda function: _checked(function, options)
    if not callable(function):
        raise OptionsError(f"distributed takes its options by name, as in distributed(gpus=8); got {function!r}")
    return _checked(function, options)


def _checked(function: Callable[P, R], options: Options) -> DistributedFunction[P, R]:
    """Return the decorated function. Raises `OptionsError` for a class."""
    if isinstance(function, type):
        raise OptionsError(
            f"{function.__name__} is a class, and ranks run functions: put @distributed above the method that is to "
            "run on them. An object stays on its rank from one cell to the next with --keep."
        )
    return DistributedFunction(function, options)


def remote_option(settings: Settings) -> str:
    """Return the pool of functions with `remote=True`. Raises `OptionsError` if the settings name none."""
    return _pool_option(True, {}, settings)["pool"]


def _pool_option(remote: bool | None, options: OptionKeywords, settings: Settings) -> dict[str, str]:
    if remote is None:
        return {}
    if not isinstance(remote, bool):
        raise OptionsError(f"remote must be True or False; got {remote!r}")
    if options.get("pool") is not None:
        raise OptionsError("remote and pool both choose where the ranks are: leave one of them out")
    if not remote:
        return {"pool": DEFAULT_POOL}
    if (pool := settings.remote_pool()) is not None:
        return {"pool": pool}
    raise OptionsError(
        f'remote=True needs a pool that the settings name as remote: add the line remote = "NAME" at the top of '
        f"{find_files.user_file()}, with the name of a pool, as [pools.NAME] defines it."
    )


def _timeout_option(timeout: float | None, options: OptionKeywords) -> dict[str, float]:
    if timeout is None:
        return {}
    if options.get("timeout_s") is not None:
        raise OptionsError("timeout and timeout_s are the same option: leave one of them out")
    return {"timeout_s": timeout}


class DistributedFunction(Generic[P, R]):
    """A function that can also run on every rank of a pool."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        # The attributes of a callable object are not copied: one of them may be called `submit`.
        functools.update_wrapper(self, function, updated=("__dict__",) if inspect.isroutine(function) else ())
        self._path = _path(function)
        self._name = self._path.rpartition(".")[2]
        self.function, self.options = function, options
        self.subject: Callable[..., Any] = function
        """The function that views and trackers name, if this one only calls it."""
        self.called_with: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The arguments that the subject will have; None if this function has the same."""
        self.label = ""
        """The name of its runs; empty for the subject's name."""
        self.choose_pool: Callable[[], str] | None = None
        """Returns the pool of a call; None for the pool that the options name."""
        self.names: dict[str, str] = {}
        """The names that the caller writes for options where they differ from the keywords: for advice."""
        self.tracked_by: tuple[str, ...] = ()
        """The trackers that record its runs if they are installed, even if its code does not use them."""
        self.gives_list = False
        """Whether `distributed` returns the values as a list, as another product's decorator does."""
        _follow_reloads()

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in this process."""
        try:
            return self.function(*args, **kwargs)
        except NameError as error:
            if error.name in PROVIDED and not identity.is_rank():
                error.add_note(
                    f"{self._name}(...) runs in this process; {self._name}.distributed(...) runs on the ranks, which "
                    f"have `{error.name}`."
                )
            raise

    def __get__(self, instance: object, owner: type | None = None) -> DistributedFunction[..., R]:
        """Return the method of an object or a class, if the function is defined in a class."""
        bind = getattr(type(self.function), "__get__", None)
        function = self.function if bind is None else bind(self.function, instance, owner)
        if function is self.function:
            return self
        bound = DistributedFunction(function, self.options)
        bound.label, bound.choose_pool = self.label, self.choose_pool
        bound.names, bound.tracked_by, bound.gives_list = self.names, self.tracked_by, self.gives_list
        return bound

    def distributed(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function with these arguments on every rank. Return the `Results`: the value of each rank; with
        `dry_run=True`, play it without GPUs instead, and return the answer.

        Raises:
            TypeError: The arguments do not fit the function; nothing was started.
            BaseException: The exception of the first rank that failed.
        """
        __tracebackhide__ = True
        self._check("distributed", args, kwargs)
        try:
            run = self._begun(args, kwargs)
            if not isinstance(run, Run):
                return run
            results = session.current().wait(run, _view(run), self.options)
        except KeyboardInterrupt as interrupt:
            stopped = early_interrupt(interrupt)
        else:
            return results.values() if self.gives_list else results
        raise stopped

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Run:
        """Run the function with these arguments on every rank without waiting for it. Return the `Run` at once.

        Raises:
            TypeError: The arguments do not fit the function; nothing was started.
        """
        __tracebackhide__ = True
        self._check("submit", args, kwargs)
        if self.options.dry_run and self.options.dry_run != "first":
            raise OptionsError(
                f"dry_run has its answer at once: call {self._name}.distributed(), or give dry_run='first'"
            )
        try:
            run = self.start(args, kwargs, submitted=True)
            if not process_environment.in_ipython():
                _watch_the_end(os.getpid())
            _show_submitted(run, _plain_arguments(self.function, args, kwargs))
            return run
        except KeyboardInterrupt as interrupt:
            stopped = early_interrupt(interrupt)
        raise stopped

    def _check(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error for a call on a rank, and for arguments that do not fit the function."""
        name = self._name
        if identity.is_rank():
            raise DistributedError(f"{name}.{method}() starts ranks, and this is a rank: call {name}() here.")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # some functions in C have none
            return
        problem = ""
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            problem = str(error)
        if problem:
            raise TypeError(f"{name}.{method}(): {problem}; the function is {name}{signature}")

    def _check_ends(self) -> None:
        """Raise an error for a generator function, whose call runs none of its lines."""
        function = self.function
        while isinstance(function, functools.partial | DistributedFunction):
            function = function.func if isinstance(function, functools.partial) else function.function
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{self._name}() is a generator function: a call runs none of its lines, and the generator cannot "
                f"leave its rank. Return a value, or call list({self._name}(...)) in another function."
            )

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, submitted: bool = False) -> Run:
        """Start the function on every rank, without a view. Return the `Run`."""
        run = self._begun(args, kwargs, submitted=submitted)
        if not isinstance(run, Run):
            raise OptionsError("dry_run has its answer at once, and here a run is to be started: leave it out")
        return run

    def _begun(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, submitted: bool = False
    ) -> Run | DryRun | DryRuns:
        """Start the function, or make the dry run that is asked for, and return its answer."""
        self._check_ends()
        name = self.label or _path(self.subject).rpartition(".")[2]
        function = self if self._is_importable() else self.function
        parts = {call_parts.FUNCTION: function, call_parts.ARGUMENTS: args, call_parts.KEYWORDS: kwargs}
        inputs = tuple(
            Input(name=key, value=value, line=0, certain=True, reason="the call") for key, value in parts.items()
        )
        current, namespace = session.current(), _namespace()
        given = self.options if self.choose_pool is None else replace(self.options, pool=self.choose_pool())
        options = self._completed(current.settings, given)
        pack = functools.partial(
            _packed,
            namespace=namespace,
            most_bytes=options.filled.max_capture,
            shared=functools.partial(current.setups.shared, namespace),
            reads_files=functools.partial(current.reads_files, options),
        )
        packed_inputs = pack(inputs)
        handles = [value for value in (*args, *kwargs.values()) if isinstance(value, RankValue)]
        cure = "pass it as an argument, or read it outside the string"
        unseen = inputs_module.unseen("", packed_inputs, namespace, what="the function", cure=cure)
        cell = m.Cell(
            source=_awaited(self.function) + _CALL,
            filename=f"{file_owner.CALL}{name}",
            shown=self.label
            or (_call(self.function, name, args, kwargs) if self.subject is self.function else f"{name}()"),
            absent={**unseen, **inputs_module.absent(_CALL, packed_inputs, namespace, current.dropped)},
            sources=packed_inputs.sources(),
        )
        notes = list[str]()
        if options.needs_dry_run:
            from jupyter_distrib.kernel.notebook import dry_choice

            packed = pack(dry_choice.with_shapes(current, inputs)).packed if handles else packed_inputs.packed
            decided = dry_choice.decided(dry_choice.Asked(current=current, cell=cell, packed=packed, options=options))
            if not isinstance(decided, tuple):
                return decided
            options, notes = decided
        request = CellRequest(
            cell=cell,
            inputs=packed_inputs.packed,
            options=options,
            label=self.label or (_call(self.function, name, args, kwargs) if submitted else f"{name}()"),
            handles=handles,
            cell_id=_running_cell(),
            notes=[*notes, *current.module_changes.sentences(_CALL, inputs, namespace, current.setups.sources)],
            shown=_source_of(self.subject) or _call(self.function, name, args, kwargs),
            arguments=self._arguments_shown(args, kwargs),
            uses={**dict.fromkeys(self.tracked_by), **packed_inputs.uses("")},
            in_words=functools.partial(in_call, names=self.names),
        )
        run = current.submit(request) if submitted else current.start(request)
        run.of_function = True
        run.program = current.setups.before(_program(self._name, cell, inputs, options, namespace))
        return run

    def _completed(self, settings: Settings, given: Options) -> CellOptions:
        try:
            return settings.completed(given)
        except OptionsError as error:
            raise OptionsError(in_call(str(error), self.names)) from None

    def _arguments_shown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers and strings among the arguments that the subject will have, by parameter."""
        if self.called_with is None:
            return _plain_arguments(self.function, args, kwargs)
        return _plain_arguments(self.subject, *self.called_with)

    def _is_importable(self) -> bool:
        """Return whether the ranks can import the function from a module and find that module's globals."""
        is_here = self.__module__ == "__main__" or importable.is_only_here(self.__module__)
        home: object = None if is_here else sys.modules.get(self.__module__)
        for part in self._path.split("."):
            home = getattr(home, part, None)
        return home is self

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._path if self._is_importable() else (DistributedFunction, (self.function, self.options))


def _program(
    name: str,
    cell: m.Cell,
    inputs: tuple[Input, ...],
    options: CellOptions,
    namespace: dict[str, Any],
) -> Program:
    """Return the program of a call as one would write it, for an export: with names that the notebook does not have."""
    wanted = {call_parts.FUNCTION: "function", call_parts.ARGUMENTS: "arguments", call_parts.KEYWORDS: "keywords"}
    names = {part: word + "_" * (word in namespace) for part, word in wanted.items()}
    function = inputs[0].value
    own = namespace.get(name)
    if own is function or getattr(own, "function", None) is function:
        names[call_parts.FUNCTION] = name
    source = _awaited(function) + "{}(*{}, **{})".format(*names.values())
    renamed = tuple(dataclasses.replace(each, name=names[each.name]) for each in inputs)
    return Program.of(dataclasses.replace(cell, source=source), renamed, options)


def _packed(inputs: tuple[Input, ...], **how: Any) -> inputs_module.PackedInputs:
    with interrupts.WholeImports():
        return inputs_module.pack(inputs, **how)


def _awaited(function: Any) -> str:
    """Return `await ` for a coroutine function, whose call on a rank is awaited there; else an empty string."""
    function = getattr(function, "function", function) if isinstance(function, DistributedFunction) else function
    called = undecorated(function) if callable(function) else function
    is_coroutine = inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004
    return "await " if is_coroutine else ""


def _path(function: Any) -> str:
    """Return the qualified name of a callable: for a partial, of its function; for an object, of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    found: str = getattr(function, "__qualname__", None) or type(function).__qualname__
    return found


def _call(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a call as one would write it, to tell the runs of several calls apart:
    `train(lr=0.1)`."""
    named = {key: without_secret(key, value) for key, value in kwargs.items()}
    shown = [
        *(_brief(without_secret(*each)) for each in zip(_names(function, len(args)), args, strict=True)),
        *(f"{key}={_brief(value)}" for key, value in named.items()),
    ]
    return formatting.short(without_secrets(f"{name}({', '.join(shown)})"), LABEL_CHARACTERS)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first parameters, empty where it has none."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        names = []
    return [*names, *[""] * count][:count]


def _running_cell() -> str:
    """Return the front end's id of the cell that makes the call; empty outside of a notebook."""
    if "IPython" not in sys.modules:
        return ""
    from IPython.core.getipython import get_ipython

    from jupyter_distrib.kernel.sidebar import cell_outputs

    return "" if (shell := get_ipython()) is None else cell_outputs.cell_id(shell)


def _source_of(function: Callable[..., Any]) -> str:
    """Return the source of a function; empty if there is none to be read."""
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError, ValueError):
        return ""


def _plain_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
    """Return the numbers and strings among the arguments of a call, defaults included, by parameter; no secrets."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    given = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name)
    return {name: without_secret(name, value) for name, value in given.items() if _is_plain(value)}


def _brief(value: object) -> str:
    """Return a value as one would write it in code, if that is short; a dataclass with only the fields that differ
    from their defaults."""
    if isinstance(value, (list, tuple, dict)):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return formatting.short(repr(value)) if all(map(_is_plain, parts)) else f"<{type(value).__name__}>"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = [(field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr]
        shown = [f"{field.name}={each!r}" for field, each in given if _is_plain(each) and each != field.default]
        return formatting.short(f"{type(value).__name__}({', '.join(shown)})")
    return formatting.short(repr(value)) if _is_plain(value) else f"<{type(value).__name__}>"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _namespace() -> dict[str, Any]:
    """Return the names of the notebook or of the script."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is not None:
            return shell.user_ns  # type: ignore[no-any-return]
    return vars(sys.modules["__main__"])


def _show_submitted(run: Run, given: dict[str, object]) -> None:
    from jupyter_distrib.kernel.notebook import runs_view

    shown = {name: without_secrets(text) for name, text in runs_view.texts(given).items()}
    runs_view.show([run], [shown])


def _follow_reloads() -> None:
    """Have `%autoreload` bring decorated functions up to date wherever the notebook has them, as it does functions."""
    autoreload = sys.modules.get("IPython.extensions.autoreload")
    rules = getattr(autoreload, "UPDATE_RULES", None)
    if isinstance(rules, list) and _RELOAD not in rules:
        rules.append(_RELOAD)


_RELOAD = (
    lambda old, new: isinstance(old, DistributedFunction) and isinstance(new, DistributedFunction),
    lambda old, new: old.__dict__.update(vars(new)),
)
"""A rule of `%autoreload`: which pairs of an old and a new object it is for, and how it updates the old one."""


@functools.cache
def _watch_the_end(pid: int) -> None:
    """Have a script report the submitted runs that it does not wait for when it ends."""
    atexit.register(_warn_of_dropped, pid)


def _warn_of_dropped(pid: int) -> None:
    if pid != os.getpid():
        return
    left = [run.record.label for run in session.runs(active=True) if not run.detached or run.state == "queued"]
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if left[3:] else "")
        print(
            f"{shown}: stopped because the program ended first. Wait for a run with its result(), or let it go on with "
            "detach=True.",
            file=sys.stderr,
        )


def _view(run: Run) -> Any:
    from jupyter_distrib.kernel.notebook.live_view import LiveView

    return LiveView(run)
