"""A cell with all that it needs to be run, and the state of the kernel's process that goes with it: for ranks under
another interpreter or on another machine, what is valid there. Kernel side; a run that is queued has both as they were
when it was submitted."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cache

from jupyter_distrib.kernel import trackers
from jupyter_distrib.kernel.session.pools.connection import Connection, WorkerGroup
from jupyter_distrib.kernel.session.runs import prompts
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.cell_options import OPTIONS, Options
from jupyter_distrib.kernel.settings.settings import CellOptions
from jupyter_distrib.libraries import known, mlflow, tracking
from jupyter_distrib.libraries import settings as library_settings
from jupyter_distrib.serialization import payload, shared_memory
from jupyter_distrib.serialization.value_cache import Layout, ValueCache
from jupyter_distrib.system import process_environment
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

GROW_AFTER_S = 600.0
"""Seconds between two changes of a run to more ranks."""
CHECKED = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
"""Variable that makes torch compare the ranks' calls before each collective."""
FALLBACK = {"JUPYTER_DISTRIB_BACKEND_FALLBACK": "1"}
_EVERYWHERE = ("NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG_LEVEL")
"""Prefixes of variables on communication between ranks, which are sent even if the notebook has not set them."""
_NOWHERE = ("RAY_AUTH_",)
"""Prefixes of variables that are never sent: the key to the cluster, which a cell that runs on it does not need."""


class Outgoing:
    """Inputs that are sent once. `close` frees what was not sent.

    Args:
        packed: The pickled inputs.
        cache: The large values that were sent before; takes the new ones.
        limit_bytes: The most memory that the cache may use, see `ValueCache.lay_out`.

    Raises:
        PayloadError: There is not enough memory.
    """

    def __init__(self, packed: payload.Packed, cache: ValueCache, limit_bytes: int | None) -> None:
        self._cache = cache
        parcel, views = payload.laid_out(packed)
        self._layout = cache.lay_out(parcel, views, limit_bytes) if views else Layout(parcel=parcel, new=())
        self.parcel = self._layout.parcel
        self.in_parcel = not views
        """Whether the parcel itself holds everything."""
        self._memory = -1
        """The descriptor of the new memory when it is complete."""
        self._content: shared_memory.Content | None = None
        """The new memory until then."""
        if self._layout.new:
            try:
                self._content = shared_memory.Content(self._layout.new)
            except BaseException:
                self._layout.reused.close()
                raise

    def fill(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Copy the values into shared memory until `given_up` returns True; later changes of them have no effect."""
        content = self._content
        if content is None or not content.fill(given_up):
            return
        self._memory, self._content = content.finish(), None
        content.close()
        self._layout = replace(self._layout, new=())  # the values themselves are no longer needed
        if self._layout.pieces:
            with suppress(OSError):  # this process can open nothing more: the values are sent again
                self._cache.keep(self._layout, os.dup(self._memory))

    def descriptors(self) -> Descriptors:
        """Return the descriptors, to be sent once, before or after `fill`; the caller owns them."""
        reused = self._layout.reused.take()
        if self._content is not None:
            memory, telling = self._content.early().take()
            return Descriptors((memory, *reused, telling))
        new = () if self._memory < 0 else (self._memory,)
        self._memory = -1
        return Descriptors((*new, *reused))

    def close(self) -> None:
        self._layout.reused.close()
        if self._content is not None:
            self._content.close()
        Descriptors((self._memory,) if self._memory >= 0 else ()).close()
        self._memory = -1


@data_class
class WrittenInputs:
    """The inputs of a queued cell: a copy, unaffected by later changes in the notebook."""

    outgoing: Outgoing
    sent: tuple[object, ...]
    """The kernel's functions and classes among them; see `Packed.sent`."""


@data_class
class ProcessState:
    """The state of the kernel's process that is reproduced on the ranks."""

    variables: dict[str, str]
    """All environment variables."""
    chosen: dict[str, str | None]
    """The variables by which ranks find what the notebook has chosen in a library; None for one to leave out."""
    directory: str
    umask: int | None
    path: tuple[str, ...]
    argv: tuple[str, ...]
    package: str
    libraries: library_settings.State

    @classmethod
    def now(cls) -> ProcessState:
        directory = os.getcwd()
        entries: Sequence[object] = sys.path  # Python ignores those that are not strings
        path = [folder or directory for folder in entries if isinstance(folder, str)]
        return cls(
            variables=process_environment.variables(),
            directory=directory,
            umask=process_environment.umask(),
            path=tuple(path),
            argv=process_environment.argv(),
            package=process_environment.package(),
            chosen=mlflow.chosen(),
            libraries=library_settings.state(),
        )

    def env(self, *, remote: bool) -> dict[str, str]:
        """Return the variables for ranks on this machine, or on other machines (`remote`)."""
        env: dict[str, str | None] = {**(travelling(self.variables) if remote else self.variables), **self.chosen}
        return {name: value for name, value in env.items() if value is not None}


@data_class
class CellRequest:
    """A cell, function or script to run, as requested by the user."""

    cell: m.Cell
    inputs: payload.Packed | WrittenInputs
    """The notebook's values that the cell reads; copies of them if the cell is queued."""
    options: CellOptions
    label: str
    """The name of the run in views."""
    cell_id: str = ""
    """The front end's id of the cell."""
    handles: Sequence[RankValue] = ()
    """The kept values that the cell reads."""
    on_ended: Callable[[Run], object] | None = None
    """Called in the node's thread when the run has ended, before any waiting thread is woken."""
    observed: bool = True
    """Whether observers may follow the run."""
    notes: Sequence[str] = ()
    """Sentences for the head of the run."""
    shown: str = ""
    """The source of the function that the cell calls; empty for other cells, which show their own."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """The plain values of the function's call, or of the sweep, by name."""
    uses: Mapping[str, object] = field(default_factory=dict)
    """The trackers that the code itself uses, by name, with what it says about them."""
    in_words: Callable[[str], str] = str
    """Returns a sentence about options in the words of the caller that began the run."""

    def sources(self) -> tuple[str, ...]:
        """Return the sources of the cell, and of the cells and functions that it calls."""
        return (self.cell.source, self.shown, *self.cell.sources.values())


@data_class
class Order:
    """A requested cell with everything that it needs to be run."""

    request: CellRequest
    options: CellOptions
    """The options of the cell, with those of its strategy in the form that ranks get."""
    process_state: ProcessState
    setups: tuple[m.Setup, ...] = ()
    """The set-ups of the notebook."""
    reason_for_new: str = ""
    """The reason why it needs new ranks, if a library that it imports does."""
    context: Mapping[str, object] = field(default_factory=dict)
    """The trackers' state in the thread that submitted the run."""
    predicted: Mapping[int, int] = field(default_factory=dict)
    """The peak of tensors on each GPU by a dry run of the cell, by number of ranks."""

    @classmethod
    def of(cls, request: CellRequest, setups: tuple[m.Setup, ...]) -> Order:
        """Return the order for a request, with its strategy's answers.

        Raises:
            OptionsError, DistributedError: The strategy refuses the run.
        """
        from jupyter_distrib.kernel.settings.available import for_strategy

        sources, options = request.sources(), request.options
        process_state = ProcessState.now()
        takes_new = not (options.filled.warm or request.handles) and options.filled.on is None
        return cls(
            request=request,
            process_state=process_state,
            setups=setups,
            reason_for_new=known.first_imported(sources) if takes_new else "",
            options=replace(options, filled=for_strategy(options.filled, options.size)),
        )

    def as_it_is_now(self, cache: ValueCache) -> Order:
        """Return the order with copies of everything that may change before the run begins."""
        packed, outgoing = self.request.inputs, self.outgoing(cache)
        outgoing.fill()
        return replace(
            self,
            request=replace(self.request, inputs=WrittenInputs(outgoing=outgoing, sent=packed.sent)),
            context=trackers.context(self.options.filled.track, self.request.uses),
        )

    def outgoing(self, cache: ValueCache) -> Outgoing:
        """Return the inputs as they are sent; `cache` has the values that were sent before."""
        inputs = self.request.inputs
        if isinstance(inputs, WrittenInputs):
            return inputs.outgoing
        return Outgoing(inputs, cache, self.options.filled.cache)

    def drop(self) -> None:
        """Free the copies of an order that will not run."""
        inputs = self.request.inputs
        if isinstance(inputs, WrittenInputs):
            inputs.outgoing.close()


def command(order: Order, options: Options, inputs: m.Parcel, run: Run, group: WorkerGroup) -> m.Execute:
    """Return the command to execute an order on a worker group; `options` include the observers' variables."""
    is_tracked = trackers.NONE not in options.track and order.request.observed
    by_tracking = {tracking.RANK_VARIABLE: str(next(iter(run.record.ranks)))} if is_tracked else {}
    size, settings = order.options.size, order.options.settings
    return m.Execute(
        run=run.record.run,
        group=group.name,
        ranks=tuple(run.record.ranks),
        cell=order.request.cell,
        inputs=inputs,
        setting=setting(order, options, group.connection, by_tracking),
        setups=order.setups,
        detached=options.detach,
        notify=settings.notify if options.detach else "",
        notify_after_s=settings.notify_after,
        timeout_s=options.timeout_s,
        hang_timeout_s=options.hang_timeout_s,
        max_restarts=options.max_restarts or 0,
        min_ranks=options.min_ranks or size.least,
        most_ranks=max(size.several) if size.least else 0,
        rank_unit=size.step,
        grow_after_s=options.grow_after_s or GROW_AFTER_S,
        restart_on_error=options.restart_on == "error",
        profile=options.profile or 0,
        unanswered=_unanswered(run, order),
        label=run.record.label,
        measures_peak=run.record.world_size in order.predicted,
        trackers=run.observers.trackers,
    )


def _unanswered(run: Run, order: Order) -> str:
    """Return the reason why nobody can answer a rank's debugger during this run; empty if somebody can."""
    if order.options.filled.detach:
        return "the run is detached"
    if run.concurrent or not order.request.observed:
        return "the notebook does not wait for this run"
    return prompts.missing()


def setting(order: Order, options: Options, connection: Connection, more: Mapping[str, str]) -> m.Setting:
    """Return the setting of each rank for the cell; `options` include the observers' variables, and override `more`."""
    facts = connection.facts
    process_state = order.process_state
    path = process_state.path
    if script := order.request.cell.script:
        folder = os.path.dirname(os.path.join(process_state.directory, script))
        path = (folder, *(each for each in path if each != folder))
    if facts.elsewhere:
        folders = connection.source_folders()
        path = _user_folders((*path, *(each for each in folders if each not in path)))
    return m.Setting(
        env={
            **process_state.env(remote=facts.remote),
            **(CHECKED if options.check else {}),
            **(FALLBACK if options.backend_fallback else {}),
            **more,
            **options.env,
        },
        own_environment=facts.remote,
        directory=process_state.directory,
        umask=process_state.umask,
        path=path,
        argv=process_state.argv,
        package=process_state.package,
        own_libraries=facts.elsewhere,
        libraries=process_state.libraries.values,
        strategy=options.strategy or "none",
        strategy_options=options.strategy_options,
        numa_binding=options.numa_binding or "",
        keep=options.keep,
        by_value=options.detach,
    )


def with_variables(options: Options, given: Mapping[str, str]) -> Options:
    """Return the options with these environment variables; `--env` overrides them."""
    return replace(options, env={**given, **options.env}) if given else options


def without_effect(options: Options, connection: Connection) -> Iterator[str]:
    """Yield a sentence for each option of the cell that has no effect on its pool."""
    ignored = connection.facts.capabilities.ignored_options
    for option in OPTIONS if ignored else ():
        if option.name in ignored and getattr(options, option.name):
            yield f"{option.flag} has no meaning on the {connection.facts.kind} pool: {ignored[option.name]}"


def travelling(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of all variables that are for ranks on other machines: that the notebook has set or changed itself.

    The variables with which the kernel was started are about its own machine, or are secrets that nobody asked to send.
    """
    at_start = _at_start()
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_NOWHERE)
        if name.startswith(_EVERYWHERE) or at_start.get(name, value if not at_start else None) != value
    }


@cache
def _at_start() -> dict[str, str]:
    """Return the environment with which this process was started; empty if the system does not give it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _user_folders(path: Iterable[str]) -> tuple[str, ...]:
    """Return the user's own entries of a path: the notebook's folder, source folders, packages installed in place."""
    return tuple(folder for folder in path if not _is_own(folder))


@cache
def _is_own(folder: str) -> bool:
    real = os.path.realpath(folder)
    return real.endswith(".zip") or any(real == own or real.startswith(own + os.sep) for own in _own_folders())


@cache
def _own_folders() -> frozenset[str]:
    """Return the folders of the standard library and of installed packages; without `sysconfig`'s `data`, which may be
    all of `/usr`."""
    paths = sysconfig.get_paths()
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    bases = [os.path.join(base, "lib", library) for base in (sys.base_prefix, sys.prefix)]
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(map(os.path.realpath, (*installed, *bases, site.getusersitepackages())))
