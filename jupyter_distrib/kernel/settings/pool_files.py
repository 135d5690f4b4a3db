"""Writes pools that are defined in a form into a settings file: the user's own, or that of the notebook's folder.
Kernel side; any thread.

Notebooks write one after the other, and a file is either replaced as a whole or left as it was. The new text must
mean what the old one meant, plus the pool."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import stat
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.settings import config_files, find_files, settings_text
from jupyter_distrib.kernel.settings.pool_definitions import check_name, options_of
from jupyter_distrib.kernel.settings.settings import BUILT_IN, NamedPool, Settings
from jupyter_distrib.options import gather
from jupyter_distrib.pools import base
from jupyter_distrib.system import paths
from jupyter_distrib.system.data_class import data_class

USER, PROJECT = "user", "project"
WAIT_S = 2.0
"""Seconds to wait for other notebooks that write."""
_LOOK_S = 0.02


@data_class
class SettingsFile:
    """A file into which a pool can be written."""

    key: str
    """`user` or `project`."""
    path: str
    shown: str
    """The path in the form that a person would write; with the reason, if it cannot be chosen."""
    problem: str
    """The reason why it cannot be chosen; empty if it can."""


@data_class
class Definition:
    """The pool that a form describes."""

    name: str
    kind: str
    values: Mapping[str, str]
    """The texts of the fields that are filled in, by `Option.name`."""
    before: Mapping[str, str] | None = None
    """The texts with which the form was opened to change a pool; None for a new pool."""


def files() -> list[SettingsFile]:
    """Return the files to choose from. Raises `OptionsError`."""
    user = find_files.user_file()
    try:
        project, reason = find_files.project_file()
    except OSError as error:
        raise OptionsError(f"the settings files cannot be searched for: {error}") from None
    shown, of_user = config_files.shown_path, find_files.reason_against_users(user)
    return [
        SettingsFile(
            key=USER,
            path=user,
            shown=shown(Path(user)),
            problem=f"it is not read, since {of_user}" if of_user else _obstacle(user),
        ),
        SettingsFile(
            key=PROJECT,
            path=project,
            shown=shown(Path(project)),
            problem=f"it is not read, since {reason}" if reason else _obstacle(project),
        ),
    ]


def file_of(pool: NamedPool) -> SettingsFile:
    """Return the file that defines a pool. Raises `PoolError`."""
    for file in files():
        if file.shown == pool.origin:
            return file
    raise PoolError(f"the pool {pool.name} is not in a settings file, but comes from: {pool.origin}.")


def present(file: SettingsFile, name: str) -> tuple[str, dict[str, str]]:
    """Return the kind of a pool in a file, and the texts of its options. Raises `OptionsError`, `PoolError`."""
    from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES

    table = _table(_read(file)[1], name)
    if table is None:
        raise PoolError(f"there is no pool {name} in {file.shown} any more.")
    return str(table.get("kind", "")), config_files.texts_of(table, POOLS, STRATEGIES)


def problems(definition: Definition, settings: Settings) -> dict[str, str]:
    """Return what is wrong, as a sentence for each field, by its name; `name` for the pool's own."""
    found: dict[str, str] = {}
    try:
        check_name(definition.name, definition.kind, settings.kinds)
    except OptionsError as error:
        found["name"] = str(error) if definition.name else "name is needed: write, for example, lab"
    known = {option.name: option for option in options_of(definition.kind, settings.kinds, settings.strategies)}
    for key, text in definition.values.items():
        if key not in known:
            found[key] = f"pools of the kind {definition.kind} have no option {key}"
        elif not text.isprintable():
            found[key] = f"{key} must be one line without control characters"
        else:
            try:
                gather([(known[key], text)], config_files.as_key)
            except OptionsError as error:
                found[key] = str(error)
    for key, example in base.needed_by(definition.kind).items():
        if key not in definition.values and not (key == "hosts" and "hosts_from" in definition.values):
            found[key] = f"{key} is needed: write, for example, {example.strip(chr(34))}"
    if {"gpus", "ranks"} <= definition.values.keys():
        found.setdefault("ranks", "gpus and ranks exclude each other: leave one out")
    return found


def pool_of(definition: Definition, settings: Settings, path: str) -> NamedPool:
    """Return the pool that a definition without problems describes in the file at this path. Raises `OptionsError`,
    `PoolError` for options that make no sense together."""
    known = {option.name: option for option in options_of(definition.kind, settings.kinds, settings.strategies)}
    values = {key: text if known[key].metavar else True for key, text in definition.values.items()}
    pool = config_files.defined(definition.name, {"kind": definition.kind, **values}, settings, path)
    base.check_complete(pool.kind, pool.options)
    return pool


def name_taken(definition: Definition, file: SettingsFile, settings: Settings) -> str:
    """Return a sentence on the other pool that has the name of a new one; empty if none has."""
    other = settings.pools.get(definition.name)
    if definition.before is not None or other is None or other.origin in (BUILT_IN, file.shown):
        return ""
    return f"there is a pool {other.name} already, from {other.origin}: choose another name"


def write(definition: Definition, file: SettingsFile, settings: Settings) -> None:
    """Write a pool into a file. If nothing in the file waited for the user's trust, nothing does afterwards.

    Raises:
        OptionsError: The file is not valid.
        PoolError: A sentence on why it was not written: the file is as it was.
    """
    if file.problem:
        raise PoolError(f"{file.shown} cannot be written: {file.problem}.")
    with _alone():
        text, content = _read(file)
        table = _table(content, definition.name)
        changes = _changes(definition, table, file, settings)
        if not changes:
            return
        new = settings_text.with_pool(text, definition.name, changes)
        _check_meaning(new, content, definition.name, changes, file)
        try:
            _replace(file, new)
        except OSError as error:
            raise PoolError(f"{file.shown} cannot be written: {(error.strerror or str(error)).lower()}.") from None
        if file.key == PROJECT and settings.waiting is None:
            with suppress(OSError, PoolError):  # else the pool waits for trust, and says so
                find_files.trust(file.path, hashlib.sha256(new.encode()).hexdigest())


def _changes(
    definition: Definition, table: Mapping[str, Any] | None, file: SettingsFile, settings: Settings
) -> dict[str, str | None]:
    """Return the changes of a pool's table, for `settings_text.with_pool`; empty if it is as wanted. Raises
    `PoolError`."""
    name, values = definition.name, definition.values
    known = {option.name: option for option in options_of(definition.kind, settings.kinds, settings.strategies)}
    is_new = definition.before is None
    old: Mapping[str, str] = {}
    if table is not None:
        old = config_files.texts_of(dict(table), settings.kinds, settings.strategies)
        if is_new and (old != values or table.get("kind") != definition.kind):
            raise PoolError(f"there is a pool {name} already in {file.shown}: choose another name, or edit that one.")
        if not is_new and old not in (definition.before, values):
            raise PoolError(f"the pool {name} in {file.shown} was changed meanwhile: close this form, and look at it.")
    elif not is_new:
        raise PoolError(f"there is no pool {name} in {file.shown} any more.")
    changes: dict[str, str | None] = {} if table is not None else {"kind": settings_text.literal(None, definition.kind)}
    changes |= {key: None for key in old if key not in values}
    changes |= {key: settings_text.literal(known[key], text) for key, text in values.items() if old.get(key) != text}
    return changes


def _check_meaning(
    new: str, content: dict[str, Any], name: str, changes: Mapping[str, str | None], file: SettingsFile
) -> None:
    """Raise `PoolError` if a new text means anything but the old content and the changes."""
    wanted = copy.deepcopy(content)
    pools = wanted.setdefault("pools", {})
    table = pools.setdefault(name, {}) if isinstance(pools, dict) else {}
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = tomllib.loads(f"x = {value}")["x"]
    with suppress(ValueError, RecursionError):
        if tomllib.loads(new) == wanted:
            return
    raise PoolError(f"{file.shown} writes its pools in a way that cannot be changed from here: change it in an editor.")


def _read(file: SettingsFile) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and its content; both are empty if there is no file. Raises `OptionsError`."""
    return config_files.read_toml(Path(file.path)) if os.path.exists(file.path) else ("", {})


def _table(content: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    pools = content.get("pools")
    table = pools.get(name) if isinstance(pools, dict) else None
    return table if isinstance(table, dict) else None


def _obstacle(path: str) -> str:
    """Return why a file cannot be written; empty if it seems that it can."""
    real = os.path.realpath(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        info = os.stat(real)
        if not stat.S_ISREG(info.st_mode):
            return "it is not a regular file"
        if info.st_uid != os.getuid():
            return "it belongs to another user"
        if not info.st_mode & 0o200 or not os.access(real, os.W_OK):  # root may write everything
            return "it is read-only"
    folder = os.path.dirname(real)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"its folder {folder} is read-only"


def _replace(file: SettingsFile, text: str) -> None:
    """Write a file as a whole. A link stays, and what it leads to is replaced. Raises `OSError`."""
    real = os.path.realpath(file.path)
    try:
        mode = stat.S_IMODE(os.stat(real).st_mode)
    except FileNotFoundError:
        mode = 0o600 if file.key == USER else 0o644
    paths.make_private(Path(real).parent)
    fd, unfinished = tempfile.mkstemp(prefix=".jupyter_distrib-", dir=os.path.dirname(real))
    try:
        with os.fdopen(fd, "wb") as out:
            os.fchmod(fd, mode)
            out.write(text.encode())
            out.flush()
            os.fsync(fd)
        os.replace(unfinished, real)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


@contextmanager
def _alone() -> Iterator[None]:
    """Keep other notebooks of this user from writing settings meanwhile. Raises `PoolError`."""
    until_s, pause = time.monotonic() + WAIT_S, threading.Event()
    try:
        lock = paths.opened(paths.state_directory() / "settings_files.lock")
    except OSError as error:
        raise PoolError(f"the settings cannot be locked: {error}.") from None
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until_s:
                    raise PoolError("another notebook is writing the settings: try again in a moment.") from None
                pause.wait(_LOOK_S)
        yield
