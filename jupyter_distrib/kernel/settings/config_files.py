"""The pools by name, and the defaults of cells, from TOML files and the environment.

    pool = "lab"                  # for cells that name none; `strategy` likewise
    remote = "cluster"            # for functions with `remote=True`
    reserved = "ours"             # the same for Databricks' decorator, unless its variable says otherwise
    track = ["mlflow"]            # the experiment trackers of cells that name none
    compat = ["spark"]            # the platforms whose import names are served
    notify = "notify-send"        # a command or webhook to notify when a run ends
    history = 500                 # the saved runs that are kept; `history_days = 90` for how long

    [pools.lab]
    kind = "local"                # and the options of that kind, spelt as their keywords
    python = "~/envs/train/bin/python"
    gpus = 4

Later ones win: the user's file, the project's file as far as `project_files` lets it, JUPYTER_DISTRIB_POOL and
JUPYTER_DISTRIB_STRATEGY, `%distributed_pool add` and `use`, the cell's own line. Kernel side; files are read again when
they have changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings import find_files, project_files
from jupyter_distrib.kernel.settings.cell_options import COMPAT, HISTORY, HISTORY_DAYS, NOTIFY, NOTIFY_AFTER, OPTIONS
from jupyter_distrib.kernel.settings.find_files import LARGEST_BYTES, VARIABLES, File
from jupyter_distrib.kernel.settings.node_range import check_pool
from jupyter_distrib.kernel.settings.pool_definitions import check_name, field_of, for_cells, nameable, options_of
from jupyter_distrib.kernel.settings.settings import NamedPool, ProjectFile, Settings, without_files
from jupyter_distrib.options import (
    Declared,
    Option,
    any_of,
    check_choice,
    gather,
    shown,
    unknown_option,
)
from jupyter_distrib.pools.base import capabilities_of
from jupyter_distrib.system import paths, record_file
from jupyter_distrib.system.formatting import printable
from jupyter_distrib.system.record_file import DamagedFile

KEYS = tuple(key.name for key in project_files.KEYS)
_TRACK = next(option for option in OPTIONS if option.name == "track")
_MOST_DOTS = 300
_MOST_LEVELS = 50
_MOST_BITS = 64
_NAMING_POOLS = ("pool", "remote", "reserved")
_ONE_TEXT = ("COMMAND", "OPTIONS", "PATH")
"""Names of the values that are one string, in which commas do not separate."""
KEYS_OF_A_POOL = ("kind", "fallback", "id")
"""Keys of a pool that are not options."""


def load(kinds: Declared, strategies: Declared, *, directory: str | None = None) -> Settings:
    """Return the settings from the files and the environment.

    Raises:
        OptionsError: It says in one sentence what is wrong, with the file and the line.
    """
    state = find_files.state(paths.home(), os.environ, directory=directory)
    settings = replace(without_files(kinds, strategies), ignored=state.ignored)
    for file in state.files:
        settings = _over(settings, file)
    return _from_environment(settings)


def _over(settings: Settings, file: File) -> Settings:
    """Return the settings, overridden by this file's content."""
    text, content = _read(file)
    shown = shown_path(Path(file.path))
    for key in content:
        if key not in KEYS:
            raise wrong(shown, text, "", key, unknown_option(key, _as_options(KEYS), dict, as_key))
    tables = content.get("pools", {})
    if not isinstance(tables, dict):
        raise wrong(shown, text, "", "pools", "write a table [pools.NAME] for each pool")
    defined = {
        name: _with_absolute_paths(_pool(name, table, settings, shown, text), settings.kinds, file)
        for name, table in tables.items()
    }
    every = {**settings.pools, **defined}
    for name in tables:
        if fallback := defined[name].fallback:
            _check_fallback(name, fallback, every, shown, text)
    for key, choices in (*((key, every) for key in _NAMING_POOLS), ("strategy", settings.strategies)):
        if isinstance(table := content.get(key), dict):
            defines = ": write [pools.NAME] for each pool" if key == "pool" else ""
            error = OptionsError(f"{key} must be one name; got a table{defines}")
            raise wrong(shown, text, ".".join([key, *list(table)[:1]]), key, error)
        if key in content:
            try:
                check_choice(str(content[key]), choices, f"{key} = {content[key]!r}")
            except OptionsError as error:
                raise wrong(shown, text, "", key, error) from None
    values = _values(content, file, text)
    if file.of_project:
        settings, content = _without_own(settings, content, shown)
        settings, content = _of_project(settings, file, text, content, defined)
    else:
        settings = replace(settings, pools=every)
    for key in (*_NAMING_POOLS, "strategy"):
        if key in content:
            settings = _with_default(settings, key, str(content[key]), shown)
    return replace(settings, **{field: value for field, (key, value) in values.items() if key in content})


def _without_own(settings: Settings, content: dict[str, Any], shown: str) -> tuple[Settings, dict[str, Any]]:
    """Return the content of a project's file without the keys of the user's own file, and the settings with a sentence
    on those: the file came with the folder, and its author would hear of the user's runs."""
    found = [key for key in project_files.OF_USER if key in content]
    if not found:
        return settings, content
    sentence = (
        f"{' and '.join(found)} in {shown} is not followed: only your own file, {find_files.user_file()}, sets it."
    )
    left = {key: value for key, value in content.items() if key not in found}
    return replace(settings, ignored=(*settings.ignored, sentence)), left


def _of_project(
    settings: Settings, file: File, text: str, content: dict[str, Any], defined: dict[str, NamedPool]
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings with the pools of a project's file, and the accepted part of its content."""
    settings = replace(settings, project=os.path.dirname(file.path))
    digest = hashlib.sha256(text.encode()).hexdigest()
    source = ProjectFile(path=file.path, digest=digest, shown=shown_path(Path(file.path)))
    taken = project_files.without_trust(
        content,
        defined,
        known=settings.pools,
        present={key: getattr(settings, key) for key in (*_NAMING_POOLS, "track", "compat")},
        options_of=lambda kind: options_of(kind, settings.kinds, settings.strategies),
        source=source,
    )
    if taken.waiting is not None and find_files.is_trusted(file.path, digest):
        return replace(settings, pools={**settings.pools, **defined}), content
    ignored = (*settings.ignored, taken.sentence) if taken.sentence else settings.ignored
    return replace(settings, pools=taken.pools, waiting=taken.waiting, ignored=ignored), taken.content


def _values(content: dict[str, Any], file: File, text: str) -> dict[str, tuple[str, Any]]:
    """Return the keys other than pools and strategies, with their values, by the fields of `Settings`."""
    found: dict[str, tuple[str, Any]] = {}
    for option in (_TRACK, COMPAT, HISTORY, HISTORY_DAYS, NOTIFY, NOTIFY_AFTER):
        if (key := option.name) in content:
            try:
                (value,) = gather([(option, _checked_text(option, content[key]))], as_key).values()
            except OptionsError as error:
                raise wrong(shown_path(Path(file.path)), text, "", key, error) from None
            of_own_runs = file.of_project and option in (HISTORY, HISTORY_DAYS)
            found[f"project_{key}" if of_own_runs else key] = key, value
    return found


def _check_fallback(name: str, fallback: str, pools: dict[str, NamedPool], shown: str, text: str) -> None:
    try:
        if fallback == name:
            raise OptionsError(f"fallback = {fallback!r} is the pool itself: name another one")
        check_choice(fallback, pools, f"fallback = {fallback!r}")
    except OptionsError as error:
        raise wrong(shown, text, f"pools.{name}", "fallback", error) from None


def _with_default(settings: Settings, key: str, value: str, origin: str) -> Settings:
    if key == "pool":
        return replace(settings, pool=value, pool_origin=origin)
    if key == "remote":
        return replace(settings, remote=value)
    if key == "reserved":
        return replace(settings, reserved=value)
    return replace(settings, strategy=value, strategy_origin=origin)


@lru_cache(maxsize=8)
def _read(file: File) -> tuple[str, dict[str, Any]]:
    return read_toml(Path(file.path))


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and its parsed content. Raises `OptionsError`."""
    import tomllib  # most notebooks have no file

    try:
        text = record_file.text_of(path, LARGEST_BYTES, through_links=True).removeprefix("\ufeff")
        _check_keys(text, shown_path(path))
        content = tomllib.loads(text)
        _check_values(content, shown_path(path))
        return text, content
    except OptionsError:
        raise
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"^(.*) \(at line (\d+), column \d+\)$", str(error))
        what, line = (match[1], f", line {match[2]}") if match else (str(error), "")
        raise OptionsError(f"{shown_path(path)}{line}: not valid TOML: {what}") from None
    except (OSError, DamagedFile) as error:
        raise OptionsError(f"{shown_path(path)} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # a number with too many digits, or brackets in brackets
        raise OptionsError(f"{shown_path(path)}: not valid TOML: {error}") from None


def _check_keys(text: str, shown: str) -> None:
    """Reject a line with very many dots, on which `tomllib` would spend hours: it checks each part of a key again for
    each part before it."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise OptionsError(f"{shown}, line {number}: there are more than {_MOST_DOTS} dots in it: split the line.")


def _check_values(content: dict[str, Any], shown: str) -> None:
    """Reject numbers and tables that Python can read but not print: those with thousands of digits or levels."""
    level: list[Any] = [content]
    for _ in range(_MOST_LEVELS):
        if not level:
            return
        level = [each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer)]
        if any(isinstance(each, int) and each.bit_length() >= _MOST_BITS for each in level):
            raise OptionsError(f"{shown}: a whole number in it is longer than {_MOST_BITS} bits: write a smaller one.")
        level = [each for each in level if isinstance(each, (dict, list))]
    raise OptionsError(f"{shown}: there are more than {_MOST_LEVELS} tables or lists within one another: write fewer.")


def _pool(name: str, table: object, settings: Settings, shown: str, text: str) -> NamedPool:
    header = f"pools.{name}"
    if not isinstance(table, dict):
        raise wrong(shown, text, "pools", name, f"write a table [{header}]")
    kinds = settings.kinds
    kind = str(table.get("kind", ""))
    try:
        check_name(name, kind, kinds)
    except OptionsError as error:
        raise wrong(shown, text, header, "", error) from None
    try:
        if not kind:
            raise OptionsError(f"[{header}] has no kind: write kind = {' or '.join(map(json.dumps, nameable(kinds)))}")
        if kind not in kinds or not capabilities_of(kind).nameable:
            check_choice(kind, nameable(kinds), f"kind = {kind!r}")
    except OptionsError as error:
        raise wrong(shown, text, header, "kind" if kind else "", error) from None
    declared = options_of(kind, kinds, settings.strategies)
    known = {option.name: option for option in declared}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in KEYS_OF_A_POOL:
            continue
        try:
            if key not in known:
                raise unknown_option(key, (*declared, *_as_options(KEYS_OF_A_POOL)), partial(_owners, kinds), as_key)
            read = gather([(known[key], _checked_text(known[key], value))] if value is not False else [], as_key)
        except OptionsError as error:
            raise wrong(shown, text, header, key, error) from None
        values |= {field_of(known[key]): each for each in read.values()}
    if values.get("gpus") and values.get("ranks"):
        raise wrong(shown, text, header, "ranks", "gpus and ranks exclude each other: leave one out")
    try:
        check_pool(for_cells(values)["size"], values.get("nodes"))
    except OptionsError as error:
        raise wrong(shown, text, header, "nodes", error) from None
    own = {option.name for option in kinds[kind]}
    return NamedPool(
        name=name,
        kind=kind,
        options={key: _as_text(known[key], table[key]) for key in values if key in own},
        **for_cells(values),
        fallback=str(table.get("fallback", "")),
        id=str(table.get("id", "")),
        origin=shown,
    )


def defined(name: str, table: dict[str, Any], settings: Settings, path: str) -> NamedPool:
    """Return the pool that a table of the file at this path defines. Raises `OptionsError`."""
    file = File(path=path, changed=(0, 0), size=0, of_project=False)
    return _with_absolute_paths(_pool(name, table, settings, shown_path(Path(path)), ""), settings.kinds, file)


def texts_of(table: dict[str, Any], kinds: Declared, strategies: Declared) -> dict[str, str]:
    """Return the options in a pool's table, as the texts of fields in a form: `true` for a switch."""
    known = {option.name: option for option in options_of(str(table.get("kind", "")), kinds, strategies)}
    given = {key: value for key, value in table.items() if key in known and value is not False}
    return {key: _as_text(known[key], value) or "true" for key, value in given.items()}


def _with_absolute_paths(pool: NamedPool, kinds: Declared, file: File) -> NamedPool:
    """Return the pool with absolute paths; in the file they are relative to its folder."""
    folder = os.path.dirname(file.path)
    names = [option.name for option in kinds[pool.kind] if option.metavar == "PATH" and option.name in pool.options]
    paths = {name: os.path.normpath(os.path.join(folder, os.path.expanduser(pool.options[name]))) for name in names}
    return replace(pool, options={**pool.options, **paths})


def _owners(kinds: Declared) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for kind, options in kinds.items():
        for option in options:
            owners.setdefault(option.name, []).append(f'kind = "{kind}"')
    return owners


def as_key(option: Option, value: str = "") -> str:
    """Return an option as it is spelt in a settings file."""
    return f"{option.name} = {value!r}" if value else option.name


def _as_options(names: tuple[str, ...]) -> tuple[Option, ...]:
    return tuple(Option(flag=f"--{name}", meaning="", metavar="V") for name in names)


def _checked_text(option: Option, value: object) -> str:
    """Return a value as text for a magic line. Raises `OptionsError` for a value of a kind that no option has."""
    name = as_key(option)
    if isinstance(value, bool) if option.metavar else not isinstance(value, bool):
        got = "true" if value is True else shown(str(value))
        wanted = f"a value such as {option.metavar}" if option.metavar else "true or false"
        raise OptionsError(f"{name} must be {wanted}; got {got}")
    if isinstance(value, dict) and option.metavar != "JSON":
        raise OptionsError(f"{name} must be a string or a number; got a table")
    if isinstance(value, list) and (option.metavar in _ONE_TEXT or not all(isinstance(each, str) for each in value)):
        wanted = "one string" if option.metavar in _ONE_TEXT else "a string or a list of strings"
        raise OptionsError(f"{name} must be {wanted}; got the list {shown(str(value))}")
    if not isinstance(value, (str, int, float, dict, list)) or (isinstance(value, float) and not math.isfinite(value)):
        raise OptionsError(f"{name} must be a string or a number; got {shown(str(value))}")
    return _as_text(option, value)


def _as_text(option: Option, value: object) -> str:
    """Return a value as text for a magic line; a table, such as a runtime environment, as JSON."""
    match value:
        case True:
            return "" if not option.metavar else "true"
        case dict():
            return json.dumps(value, default=str)
        case list():
            return ",".join(map(str, value))
        case _:
            return str(value)


def wrong(shown: str, text: str, header: str, key: str, why: object) -> OptionsError:
    """Return the error on a key in a table of a file with this text, with its line."""
    line = _line_of(text, header, key)
    return OptionsError(printable(f"{shown}{f', line {line}' if line else ''}: {why}"))


def _line_of(text: str, header: str, key: str) -> int:
    """Return the line of a key in a table, else the table's first line; 0 if its spelling is not found."""
    table, found = "", 0
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        name, closed, _ = line.lstrip("[").partition("]")
        bare = line.lstrip("\"'")
        if line.startswith("[") and closed:  # by hand: an expression would take hours over a line of spaces
            table = ".".join(part.strip(" \t\"'") for part in name.split("."))
            if table == header:
                found = number
            if table == f"{header}.{key}".lstrip("."):
                return number
        elif table == header and key and bare.startswith(key) and bare[len(key) :].lstrip(" \t\"'")[:1] in ("=", "."):
            return number
    return found


def shown_path(path: Path) -> str:
    """Return the path in the form that a person would write: with `~`, or relative to the notebook's folder. Others may
    have named its folders."""
    for base, prefix in ((Path.cwd(), ""), (Path(paths.home()), "~/")):
        if path.is_relative_to(base):
            return printable(f"{prefix}{path.relative_to(base)}")
    return printable(str(path))


# ------------------------------------------------------------------------------------------------ the environment


def _from_environment(settings: Settings) -> Settings:
    for key, name, choices in zip(("pool", "strategy"), VARIABLES, (settings.pools, settings.strategies), strict=True):
        if value := os.environ.get(name):
            if value not in choices:
                raise OptionsError(f"{name} is {value!r}, which is not known: choose {any_of(list(choices))}")
            settings = _with_default(settings, key, value, name)
    return settings
