"""Pools by name, and what cells get unless they say otherwise: from TOML files, the environment and this notebook.

    pool = "lab"                  # of cells that name none; `strategy` likewise

    [pools.lab]
    kind = "local"                # and the options of that kind, spelt as their keywords
    python = "~/envs/train/bin/python"
    gpus = 4

Later ones win: the user's file, the project's file, JUPYTER_DISTRIB_POOL and JUPYTER_DISTRIB_STRATEGY,
`%distributed_pool add` and `use`, the cell's own line. Kernel side; files are read again when they have changed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, DEFAULT_STRATEGY, OPTIONS, Options, parse_line
from jupyter_distrib.kernel.settings.group_size import GroupSize
from jupyter_distrib.options import Declared, Option, any_of, check_choice, gather, unknown_option
from jupyter_distrib.pools.base import capabilities_of

LOOK_ROUND_S = 5.0
"""A repository, or another owner, may be seen this much later; a new file with pools is seen at once."""
REMEMBERED = 64
"""Magic lines."""
PROJECT_FILE = "jupyter_distrib.toml"
BUILT_IN = "built in"
NOTEBOOK = "this notebook"
SIDEBAR = "the sidebar"
_OF_SIZE = ("gpus", "ranks", "gpu_type")
_DEFAULTS = ("strategy", "wait_s")
_OF_A_POOL = (*_OF_SIZE, *_DEFAULTS)
"""Options of a cell that a pool may give a default for."""
_TOP = ("pool", "strategy", "pools")
_VARIABLES = ("JUPYTER_DISTRIB_POOL", "JUPYTER_DISTRIB_STRATEGY")


class _File(NamedTuple):
    """One state of one file."""

    path: str
    mtime_ns: int
    size: int


class FilesState(NamedTuple):
    folder: str
    files: tuple[_File, ...]
    environment: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPool:
    """One pool that cells can name."""

    name: str
    kind: str
    options: dict[str, str] = field(default_factory=dict)
    """The options of its kind, by `Option.name`, as texts."""
    size: GroupSize = field(default_factory=GroupSize)
    """The size of its worker groups for cells that name none."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Other fields of `Options` for cells that leave them out: `strategy`, `wait_s`."""
    origin: str = BUILT_IN
    sized_by: str = ""
    """Where the number of ranks comes from, if not from the same place."""

    def resized(self, size: GroupSize, by: str) -> NamedPool:
        """Return the pool with a size that was chosen in this notebook or its sidebar."""
        return replace(self, size=size, sized_by=by if by == SIDEBAR else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of this notebook now."""

    pools: dict[str, NamedPool]
    kinds: Declared
    strategies: Declared
    pool: str = DEFAULT_POOL
    pool_origin: str = ""
    """Where the choice comes from; empty if nobody made one."""
    strategy: str = ""
    strategy_origin: str = ""
    _read: dict[str, Options] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def declared(self) -> Declared:
        """By the name of each pool, what can be given with it."""
        return {pool.name: self.kinds[pool.kind] for pool in self.pools.values()}

    @property
    def possible(self) -> dict[str, Any]:
        """Return what a cell can ask for here, as the readers of `kernel/settings/cell_options.py` take it."""
        return {
            "strategies": self.strategies,
            "pools": self.declared,
            "strategy": self.strategy_for(),
            "pool": self.pool,
        }

    def options(self, line: str) -> Options:
        """Parse what this line asks for here, once: cells are run again and again. Raises `OptionsError`."""
        if line not in self._read:
            if len(self._read) == REMEMBERED:
                self._read.clear()
            self._read[line] = parse_line(line, **self.possible)
        return self._read[line]

    def strategy_for(self, pool: str | None = None) -> str:
        """Return the strategy of cells on this pool that name none."""
        own = self.pools[pool or self.pool].defaults.get("strategy")
        here = self.strategy_origin in (NOTEBOOK, SIDEBAR)
        return self.strategy if here else own or self.strategy or DEFAULT_STRATEGY

    def filled(self, options: Options) -> Options:
        """The options with every default in its place."""
        pool = self.pools[options.pool or self.pool]
        missing = {name: value for name, value in pool.defaults.items() if not getattr(options, name)}
        missing["strategy"] = options.strategy or self.strategy_for(pool.name)
        if not options.sized:
            gpu_type = options.gpu_type or pool.size.gpu_type
            options = options.resized(replace(pool.size, gpu_type=gpu_type))
        return replace(options, **missing, pool=pool.name, pool_options={**pool.options, **options.pool_options})

    def size_of(self, pool: str) -> GroupSize:
        """Return the size of the worker group that a cell gets on this pool which does not name one."""
        return self.pools[pool].size

    def origins(self, options: Options) -> str:
        """Where pool and strategy of a cell come from that does not name them itself: `pool lab from ~/pools.toml`."""
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


def built_in(kinds: Declared) -> dict[str, NamedPool]:
    """Every kind is a pool of that name."""
    return {kind: NamedPool(name=kind, kind=kind) for kind in kinds}


def load(kinds: Declared, strategies: Declared, *, directory: str | None = None) -> Settings:
    """Read the files and the environment.

    Raises:
        OptionsError: One sentence with the file and the line.
    """
    settings = without_files(kinds, strategies)
    for file in state(directory=directory).files:
        settings = _over(settings, file)
    return _from_environment(settings)


def state(*, directory: str | None = None) -> FilesState:
    """Return a key for `load`: while this is equal, so is what `load` gives. Every cell asks. Raises `OptionsError`."""
    try:
        folder = directory or os.getcwd()
        files = tuple(_files(folder))
    except OSError as error:  # a folder that is gone, a file that is being replaced
        raise OptionsError(f"the files with pools cannot be looked for: {error}") from None
    return FilesState(folder=folder, files=files, environment=tuple(map(os.environ.get, _VARIABLES)))


def without_files(kinds: Declared, strategies: Declared) -> Settings:
    """Return the settings where nobody has said anything."""
    return Settings(pools=built_in(kinds), kinds=kinds, strategies=strategies)


def add(settings: Settings, name: str, kind: str, values: Mapping[str, Any]) -> NamedPool:
    """A pool of this notebook's own, from the options of `%distributed_pool add`. Raises `OptionsError`."""
    _check_name(name, kind, settings.kinds)
    own = {option.name for option in settings.kinds[kind]}
    return NamedPool(
        name=name,
        kind=kind,
        options={key: value for key, value in values.items() if key in own},
        **_for_cells({"wait_s" if key == "wait" else key: value for key, value in values.items() if key not in own}),
        origin=NOTEBOOK,
    )


def of_kinds(kinds: Declared, strategies: Declared) -> Declared:
    """By every kind that can have names, what can be set for a pool of it."""
    return {kind: options_of(kind, kinds, strategies) for kind in _named(kinds)}


def options_of(kind: str, kinds: Declared, strategies: Declared) -> tuple[Option, ...]:
    """Return the options that can be set for a pool of this kind."""
    common = [replace(option, keyword="") if option.name == "wait_s" else option for option in OPTIONS]
    chosen = [option for option in common if _field(option) in _OF_A_POOL]
    choices = {"strategy": tuple(strategies)}
    return (*(replace(option, choices=choices.get(option.name, ())) for option in chosen), *kinds[kind])


def _field(option: Option) -> str:
    """The field of `Options`: files say `wait`, as the flag does."""
    return "wait_s" if option.name == "wait" else option.name


# ------------------------------------------------------------------------------------------------ files


def _files(directory: str) -> Iterator[_File]:
    """The user's file and the project's, if they are there."""
    chosen = os.environ.get("JUPYTER_DISTRIB_CONFIG")
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    user = os.path.expanduser(chosen) if chosen else os.path.join(base, "jupyter_distrib", "pools.toml")
    if chosen and not os.path.isfile(user):
        raise OptionsError(f"JUPYTER_DISTRIB_CONFIG names {user}, and there is no such file")
    yield from filter(None, (_found(user),))
    candidates = _project_files(directory, os.path.expanduser("~"), int(time.monotonic() / LOOK_ROUND_S))
    yield from islice(filter(None, map(_found, candidates)), 1)


def _found(path: str) -> _File | None:
    try:
        info = os.stat(path)
    except OSError:  # nor is one that cannot be reached
        return None
    return _File(path=path, mtime_ns=info.st_mtime_ns, size=info.st_size) if stat.S_ISREG(info.st_mode) else None


@lru_cache(maxsize=2)
def _project_files(directory: str, home: str, when: int) -> tuple[str, ...]:
    """Where the project's file may be: in the notebook's folder, or in one above it: up to the top of the repository or
    the home folder, and never to one that others own or may write to, such as /tmp. `when` is there for the cache."""
    found, folder = [os.path.join(directory, PROJECT_FILE)], directory
    while True:
        is_top = folder == home or os.path.exists(os.path.join(folder, ".git"))
        if is_top or os.path.dirname(folder) == folder or not _is_ours(folder := os.path.dirname(folder)):
            return tuple(found)
        found.append(os.path.join(folder, PROJECT_FILE))


def _is_ours(folder: str) -> bool:
    info = os.stat(folder)
    return info.st_uid == os.getuid() and not info.st_mode & stat.S_IWOTH


def _over(settings: Settings, file: _File) -> Settings:
    """The settings with what this file says on top."""
    text, content = _read(file)
    shown = _shown(Path(file.path))
    for key in content:
        if key not in _TOP:
            raise _wrong(shown, text, "", key, unknown_option(key, _as_options(_TOP), dict, _as_key))
    pools = dict(settings.pools)
    tables = content.get("pools", {})
    if not isinstance(tables, dict):
        raise _wrong(shown, text, "", "pools", "write a table [pools.NAME] for each pool")
    for name, table in tables.items():
        pools[name] = _pool(name, table, settings, shown, text)
    settings = replace(settings, pools=pools)
    for key, choices in (("pool", pools), ("strategy", settings.strategies)):
        if key in content:
            try:
                check_choice(str(content[key]), choices, f"{key} = {content[key]!r}")
            except OptionsError as error:
                raise _wrong(shown, text, "", key, error) from None
            settings = _with_default(settings, key, str(content[key]), shown)
    return settings


def _with_default(settings: Settings, key: str, value: str, origin: str) -> Settings:
    if key == "pool":
        return replace(settings, pool=value, pool_origin=origin)
    return replace(settings, strategy=value, strategy_origin=origin)


@lru_cache(maxsize=8)
def _read(file: _File) -> tuple[str, dict[str, Any]]:
    """Text and content."""
    path = Path(file.path)
    try:
        text = path.read_text("utf-8")
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"^(.*) \(at line (\d+), column \d+\)$", str(error))
        what, line = (match[1], f", line {match[2]}") if match else (str(error), "")
        raise OptionsError(f"{_shown(path)}{line}: not valid TOML: {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{_shown(path)} cannot be read: {error}") from None


def _pool(name: str, table: object, settings: Settings, shown: str, text: str) -> NamedPool:
    header = f"pools.{name}"
    if not isinstance(table, dict):
        raise _wrong(shown, text, "pools", name, f"write a table [{header}]")
    kinds = settings.kinds
    kind = str(table.get("kind", ""))
    try:
        _check_name(name, kind, kinds)
    except OptionsError as error:
        raise _wrong(shown, text, header, "", error) from None
    try:
        if not kind:
            raise OptionsError(f"[{header}] has no kind: write kind = {' or '.join(map(json.dumps, _named(kinds)))}")
        check_choice(kind, _named(kinds), f"kind = {kind!r}")
    except OptionsError as error:
        raise _wrong(shown, text, header, "kind" if kind else "", error) from None
    declared = options_of(kind, kinds, settings.strategies)
    known = {option.name: option for option in declared}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "kind":
            continue
        try:
            if key not in known:
                raise unknown_option(key, (*declared, *_as_options(("kind",))), partial(_owners, kinds), _as_key)
            read = gather([(known[key], _as_text(known[key], value))] if value is not False else [], _as_key)
        except OptionsError as error:
            raise _wrong(shown, text, header, key, error) from None
        values |= {_field(known[key]): each for each in read.values()}
    if values.get("gpus") and values.get("ranks"):
        raise _wrong(shown, text, header, "ranks", "gpus and ranks exclude each other: leave one out")
    own = {option.name for option in kinds[kind]}
    return NamedPool(
        name=name,
        kind=kind,
        options={key: _as_text(known[key], table[key]) for key in values if key in own},
        **_for_cells(values),
        origin=shown,
    )


def _for_cells(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `NamedPool` that say what a cell gets which leaves these options out."""
    size = Options(**{key: values[key] for key in _OF_SIZE if key in values}).size
    return {"size": size, "defaults": {key: values[key] for key in _DEFAULTS if key in values}}


def _named(kinds: Declared) -> list[str]:
    return [kind for kind in kinds if capabilities_of(kind).nameable]


def _check_name(name: str, kind: str, kinds: Declared) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
        raise OptionsError(f"{name!r} cannot name a pool: use letters, digits, _, . and -, a letter first")
    if name in kinds and not capabilities_of(name).nameable:
        raise OptionsError(f"{name} has nothing to set: choose another name for this pool")
    if name in kinds and kind and name != kind:
        raise OptionsError(f"{name} is a kind of pool itself: choose another name for one of the kind {kind}")


def _owners(kinds: Declared) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for kind, options in kinds.items():
        for option in options:
            owners.setdefault(option.name, []).append(f'kind = "{kind}"')
    return owners


def _as_key(option: Option, value: str = "") -> str:
    return f"{option.name} = {value!r}" if value else option.name


def _as_options(names: tuple[str, ...]) -> tuple[Option, ...]:
    return tuple(Option(flag=f"--{name}", meaning="", metavar="V") for name in names)


def _as_text(option: Option, value: object) -> str:
    """Return the text of a value on a line; a table, such as a runtime environment, as JSON."""
    match value:
        case True:
            return "" if not option.metavar else "true"
        case dict():
            return json.dumps(value)
        case list():
            return ",".join(map(str, value))
        case _:
            return str(value)


def _wrong(shown: str, text: str, header: str, key: str, why: object) -> OptionsError:
    line = _line_of(text, header, key)
    return OptionsError(f"{shown}{f', line {line}' if line else ''}: {why}")


def _line_of(text: str, header: str, key: str) -> int:
    """Where a key of a table stands, else where the table begins; 0 if it is written in a way not looked for."""
    table, found = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = re.sub(r"\s*\.\s*", ".", re.sub("[\"']", "", match[1]))
            if table == header:
                found = number
            if table == f"{header}.{key}".lstrip("."):
                return number
        elif table == header and key and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*[=.]""", line):
            return number
    return found


def _shown(path: Path) -> str:
    """As a person would name it: with `~`, or relative to the notebook's folder."""
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.is_relative_to(base):
            return f"{prefix}{path.relative_to(base)}"
    return str(path)


# ------------------------------------------------------------------------------------------------ the environment


def _from_environment(settings: Settings) -> Settings:
    for key, name, choices in zip(("pool", "strategy"), _VARIABLES, (settings.pools, settings.strategies), strict=True):
        if value := os.environ.get(name):
            if value not in choices:
                raise OptionsError(f"{name} is {value!r}, which is not known: choose {any_of(list(choices))}")
            settings = _with_default(settings, key, value, name)
    return settings
