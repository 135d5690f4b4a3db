"""One row of the table of settings (`libraries/settings.py`), and the usual kinds of rows. Standard library only.

A row reads a setting in the kernel and writes it on a rank. Its value is JSON; None stands for the default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from jupyter_distrib.system.data_class import data_class


@data_class
class LibrarySetting:
    """One setting of a library."""

    name: str
    library: str
    """The module that has it: read where this is loaded, written when it is imported."""
    read: Callable[[Any], Any]
    """Function that returns the value, given the module; None for the default."""
    write: Callable[[Any, Any], None]
    """Function that sets a value, given the module; the default for None."""


waiting: dict[str, dict[str, Callable[[Any], None]]] = {}
"""The functions that set something in modules that are not imported yet, by module and by the name of the setting."""


def when_imported(module: str, name: str, write: Callable[[Any], None]) -> None:
    """Call `write` with a module: now, or after its import in this process, in place of an earlier function of this
    name."""
    if (loaded := sys.modules.get(module)) is not None:
        write(loaded)
    else:
        waiting.setdefault(module, {})[name] = write


def imported(module: Any) -> None:
    """Apply the settings that were waiting for the import of this module. Called in a rank after the import."""
    for name, write in waiting.pop(module.__name__, {}).items():
        try:
            write(module)
        except Exception as error:  # noqa: BLE001 - foreign code, of another version than the notebook's
            print(not_set(name, error), file=sys.stderr)


def not_set(name: str, error: Exception) -> str:
    return f"the notebook's setting of {name} cannot be set on this rank: {type(error).__name__}: {error}"


def attribute(name: str, library: str, path: str, default: Any) -> LibrarySetting:
    """Return the row of a variable of a module, or of something in it: `path` is `LOAD_TRUNCATED_IMAGES`."""
    get = attrgetter(path)
    owner, _, own = path.rpartition(".")

    def write(module: Any, value: Any) -> None:
        setattr(attrgetter(owner)(module) if owner else module, own, value[0] if value else default)

    return LibrarySetting(name=name, library=library, read=lambda module: _unless(get(module), default), write=write)


def function(name: str, library: str, getter: str, setter: str, default: Any) -> LibrarySetting:
    """Return the row of a value with two functions of the module: one returns the value, the other sets it."""
    get, put = attrgetter(getter), attrgetter(setter)
    return LibrarySetting(
        name=name,
        library=library,
        read=lambda module: _unless(get(module)(), default),
        write=lambda module, value: put(module)(value[0] if value else default),
    )


def switch(name: str, library: str, getter: str, on: str, off: str, *, default: bool) -> LibrarySetting:
    """Return the row of a switch, which has three functions: one returns its state, two switch it on and off."""
    get, functions = attrgetter(getter), {True: attrgetter(on), False: attrgetter(off)}
    return LibrarySetting(
        name=name,
        library=library,
        read=lambda module: _unless(bool(get(module)()), default),
        write=lambda module, value: functions[value[0] if value else default](module)(),
    )


def keywords(
    name: str, library: str, get: Callable[[Any], Mapping[str, Any]], setter: str, defaults: Mapping[str, Any]
) -> LibrarySetting:
    """Return the row of several values that the module takes as keywords of one function."""
    put = attrgetter(setter)

    def write(module: Any, value: Any) -> None:
        known = get(module)
        put(module)(**{key: each for key, each in {**defaults, **(value or {})}.items() if key in known})

    return LibrarySetting(name=name, library=library, read=lambda module: unlike(defaults, get(module)), write=write)


def unlike(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values that differ from the defaults, as far as JSON can represent them."""
    differing = {
        name: value
        for name, default in defaults.items()
        if (value := values.get(name, default)) != default and is_plain(value)
    }
    return differing or None


def is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _unless(value: Any, default: Any) -> list[Any] | None:
    return None if value == default or not is_plain(value) else [value]
