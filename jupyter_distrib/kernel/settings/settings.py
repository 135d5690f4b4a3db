"""The settings of one notebook at one moment: its pools by name, and the defaults of its cells. Kernel side; values
without state, except for a cache of magic lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from jupyter_distrib.kernel.settings.cell_options import (
    AUTO_STRATEGY,
    DEFAULT_POOL,
    DEFAULT_STRATEGY,
    GroupSize,
    Options,
    parse_command,
    parse_line,
)
from jupyter_distrib.kernel.settings.node_range import check, in_ranks
from jupyter_distrib.options import Declared, DeclaredOnDemand
from jupyter_distrib.system.data_class import data_class

REMEMBERED = 64
"""Number of magic lines in the cache."""
BUILT_IN = "built in"
NOTEBOOK = "this notebook"
SIDEBAR = "the sidebar"
REMOTE = "remote"
"""The name of the pool on which functions with `remote=True` run by default."""


@data_class
class ProjectFile:
    """The content of a project's file of which part waits for the user's trust."""

    path: str
    digest: str
    shown: str
    """The path in the form that a person would write."""
    sets: str = ""
    """The part that waits: `python = /home/me/evil`."""


@data_class
class NamedPool:
    """One pool that cells can name."""

    name: str
    kind: str
    options: dict[str, str] = field(default_factory=dict)
    """The options of its kind, by `Option.name`, as texts."""
    size: GroupSize = field(default_factory=GroupSize)
    """Size of its worker groups for cells that give none."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of other fields of `Options` for cells that omit them: `strategy`, `wait_s`, `max_capture`,
    `cache`."""
    fallback: str = ""
    """The pool that its cells run on when it refuses their ranks; empty for none."""
    id: str = ""
    """The id by which another platform's variable names it; empty for none."""
    origin: str = BUILT_IN
    project_file: ProjectFile | None = None
    """The project's file that defines the pool, until the user has trusted it."""
    sized_by: str = ""
    """The place where the number of ranks was chosen, if not the pool's definition."""

    def resized(self, size: GroupSize, by: str) -> NamedPool:
        """Return the pool with a size that was chosen in this notebook or its sidebar."""
        return replace(self, size=size, sized_by=by if by == SIDEBAR else "")


@data_class
class Settings:
    """The present settings of this notebook."""

    pools: dict[str, NamedPool]
    kinds: Declared
    strategies: Declared
    pool: str = DEFAULT_POOL
    pool_origin: str = ""
    """The place where the pool was chosen; empty without a choice."""
    remote: str = ""
    """The pool of functions with `remote=True`; empty if only a pool named `remote` is possible."""
    reserved: str = ""
    """The reserved pool of Databricks' functions with `remote=True`; empty for none."""
    strategy: str = ""
    strategy_origin: str = ""
    compat: tuple[str, ...] = ()
    """The platforms whose import names are served: `spark`."""
    track: tuple[str, ...] = ()
    """The trackers of cells that name none."""
    notify: str = ""
    """The command or webhook for news of runs that have ended; empty for none."""
    notify_after: float = 0.0
    """Minimum duration in seconds of such a run."""
    history: float = 500
    """Number of saved runs to keep; 0 to save none."""
    history_days: float = 90.0
    """Age in days after which a saved run is removed."""
    project: str = ""
    """The folder of the project's file; empty without one."""
    project_history: float | None = None
    """Number of the project's own runs to keep; 0 to save none; None if the project's file does not set it."""
    project_history_days: float | None = None
    """Age in days after which a saved run of the project is removed."""
    declared_options: Options = field(default_factory=Options)
    """The options of the declared run that this process executes, for cells and calls that do not set them."""
    waiting: ProjectFile | None = None
    """The project's file, if something of it waits for trust."""
    ignored: tuple[str, ...] = ()
    """A sentence on each file that was not read, and on the parts of files that were not accepted."""
    _read: dict[str, CellOptions] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def declared(self) -> Declared:
        """The options that can be given with each pool, by its name."""
        return DeclaredOnDemand(self.pools, lambda name: self.kinds[self.pools[name].kind])

    @property
    def possible(self) -> dict[str, Any]:
        """The declared options, as keyword arguments for the functions of `kernel/settings/cell_options.py`."""
        return {
            "strategies": self.strategies,
            "pools": self.declared,
            "strategy": self.strategy_for(),
            "pool": self.pool,
        }

    def options(self, line: str) -> CellOptions:
        """Return the options of a magic line, read only once, since cells are run repeatedly. Raises
        `OptionsError`."""
        if line not in self._read:
            if len(self._read) == REMEMBERED:
                self._read.clear()
            self._read[line] = self.completed(parse_line(line, **self.possible))
        return self._read[line]

    def completed(self, given: Options) -> CellOptions:
        """Return the options of a cell, completed with all defaults. Raises `OptionsError` for a number of ranks that
        does not suit its nodes."""
        filled = self.filled(given)
        check(given, filled)
        return CellOptions(
            given=given,
            filled=filled,
            size=filled.size,
            settings=self,
            origins=self.origins(given),
            needs_dry_run=bool(given.dry_run) or filled.strategy == AUTO_STRATEGY,
        )

    @property
    def saves_runs(self) -> bool:
        """Return whether runs are saved in the history."""
        return bool(self.history if self.project_history is None else self.project_history)

    def pool_of_kind(self, kind: str) -> NamedPool:
        """Return the pool in use if it is of this kind, else the first one defined, else the built-in one."""
        usable = [each for each in self.pools.values() if each.project_file is None]
        fitting = [each for each in (self.pools[self.pool], *usable) if each.kind == kind]
        return next((each for each in fitting if each.origin != BUILT_IN or each.name == self.pool), fitting[0])

    def remote_pool(self) -> str | None:
        """Return the pool of functions with `remote=True`; None if there is none."""
        return self.remote or (REMOTE if REMOTE in self.pools else None)

    def command(self, words: Sequence[str]) -> tuple[Options, list[str]]:
        """Return the options of a command, and its words from the script on. Raises `OptionsError`."""
        return parse_command(words, **self.possible)

    def strategy_for(self, pool: str | None = None) -> str:
        """Return the strategy of cells on this pool that name no strategy."""
        own = self.pools[pool or self.pool].defaults.get("strategy")
        here = self.strategy_origin in (NOTEBOOK, SIDEBAR)
        return self.strategy if here else own or self.strategy or DEFAULT_STRATEGY

    def filled(self, options: Options) -> Options:
        """Return the options, completed with all defaults."""
        options = options.over(self.declared_options)
        sized, spread = options.sized, "nodes" in options.pool_options
        pool = self.pools[options.pool or self.pool]
        missing = {name: value for name, value in pool.defaults.items() if getattr(options, name) is None}
        missing["track"] = options.track or self.track
        missing["strategy"] = options.strategy or self.strategy_for(pool.name)
        if not options.sized:
            size = replace(pool.size, gpus=True, gpu_type=options.gpu_type) if options.gpu_type else pool.size
            options = options.resized(size)
        given = {**pool.options, **options.pool_options}
        filled = replace(options, **missing, pool=pool.name, pool_options=given)
        return in_ranks(filled, of_pool=sized and not spread)

    def size_of(self, pool: str) -> GroupSize:
        """Return the size of the worker group for a cell on this pool that gives none."""
        return self.pools[pool].size

    def origins(self, options: Options) -> str:
        """Return the origins of the pool, strategy and size that a cell does not give: `pool lab from ~/pools.toml`."""
        parts: dict[str, list[str]] = {}
        pool = self.pools[options.pool or self.pool]
        if not options.pool and self.pool_origin:
            parts.setdefault(self.pool_origin, []).append(f"pool {self.pool}")
        if not options.strategy and self.strategy_for(pool.name) != DEFAULT_STRATEGY:
            own = "strategy" in pool.defaults and self.strategy_origin not in (NOTEBOOK, SIDEBAR)
            origin = pool.origin if own else self.strategy_origin
            parts.setdefault(origin, []).append(f"strategy {self.strategy_for(pool.name)}")
        if pool.sized_by and not options.sized:
            parts.setdefault(pool.sized_by, []).append("number of ranks")
        return ", ".join(f"{' and '.join(what)} from {origin}" for origin, what in parts.items())


@data_class
class CellOptions:
    """The options of a cell, with the settings that complete them."""

    given: Options
    """The options that the cell gives."""
    filled: Options
    """The same, completed with all defaults."""
    size: GroupSize
    """The size of the worker group that these ask for."""
    settings: Settings
    origins: str
    """The origins of pool, strategy and size that the cell does not name."""
    needs_dry_run: bool
    """Whether a dry run is asked for, or is to choose the strategy."""


def built_in(kinds: Declared) -> dict[str, NamedPool]:
    """Return the built-in pools: one for each kind, under its name."""
    return {kind: NamedPool(name=kind, kind=kind) for kind in kinds}


def without_files(kinds: Declared, strategies: Declared) -> Settings:
    """Return the settings without files, choices or environment."""
    return Settings(pools=built_in(kinds), kinds=kinds, strategies=strategies)
