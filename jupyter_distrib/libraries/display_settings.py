"""The settings of pandas and matplotlib, as rows of the table in `libraries/settings.py`: differences from what their
import sets. Standard library only: the libraries come as arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jupyter_distrib.libraries.setting import LibrarySetting, is_plain

_CHOOSE_BACKEND = (
    "backend",
    "backend_fallback",
    "interactive",
    "toolbar",
    "webagg.",
    "tk.",
    "keymap.",
    "savefig.directory",
)
_MISSING = object()


def options_of_pandas() -> dict[str, Any]:
    """Return pandas' options that differ from a program's defaults, by name, if pandas is loaded."""
    config = getattr(getattr(sys.modules.get("pandas"), "_config", None), "config", None)
    if config is None:
        return {}
    # pandas has no public way to read them all with their defaults
    registered, found = config._registered_options, {}  # noqa: SLF001
    for name, value in _flat("", config._global_config):  # noqa: SLF001
        # 20 in a notebook, 0 in programs, which ranks are
        default = 0 if name == "display.max_columns" else getattr(registered.get(name), "defval", value)
        if value is not default and value != default:
            found[name] = value
    return found


def _flat(prefix: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(f"{name}.", value)
        else:
            yield name, value


def as_json(value: Any) -> Any:
    """Return a JSON value; `"{:.2f}".format` becomes a dict, and other objects None."""
    if getattr(value, "__name__", "") == "format" and isinstance(text := getattr(value, "__self__", None), str):
        return {"format": text}
    return value if is_plain(value) else None


def _read_pandas(_: Any) -> dict[str, Any] | None:
    options = options_of_pandas()
    return {
        name: as_json(value) for name, value in options.items() if value is None or as_json(value) is not None
    } or None


def functions_of_pandas(_: Any) -> Iterator[str]:
    """Yield a sentence on each option of this process that ranks will not have."""
    for name, value in options_of_pandas().items():
        if callable(value) and as_json(value) is None:
            yield f"the function in pandas.options.{name} of the notebook is not set on the ranks: set it in the cell"


def _write_pandas(pandas: Any, value: dict[str, Any] | None) -> None:
    value = value or {}
    for name in _pandas_before.keys() - value.keys():
        pandas.set_option(name, _pandas_before.pop(name))
    for name, option in value.items():
        _pandas_before.setdefault(name, pandas.get_option(name))
        pandas.set_option(name, option["format"].format if isinstance(option, dict) else option)


_pandas_before: dict[str, Any] = {}
"""The options of this process before those of another process were set."""


_parameters_seen: list[dict[str, Any]] = [{}, {}]
"""All parameters as they were last read, and the changed parameters: comparing takes less time than reading."""


def changed_parameters() -> dict[str, Any]:
    """Return matplotlib's parameters that differ from those after its import, if it is loaded."""
    matplotlib: Any = sys.modules.get("matplotlib")
    now, at_import = (getattr(matplotlib, name, None) for name in ("rcParams", "rcParamsOrig"))
    if now is None or at_import is None or dict.__eq__(now, at_import):
        return {}
    before, changed = _parameters_seen
    if not dict.__eq__(now, before):
        changed = {
            name: value
            for name, value in dict.items(now)  # the method of the class itself checks each value again
            if not name.startswith(_CHOOSE_BACKEND) and value != dict.get(at_import, name, _MISSING)
        }
        copies = {name: list(value) if type(value) is list else value for name, value in dict.items(now)}
        _parameters_seen[:] = copies, changed
    return changed


def parameter_as_json(value: Any) -> Any:
    """Return a parameter of matplotlib as JSON can represent it: a cycle as a dict; None for other objects."""
    if isinstance(value, (list, tuple)):
        parts = [parameter_as_json(each) for each in value]
        return (
            None if any(part is None and each is not None for part, each in zip(parts, value, strict=True)) else parts
        )
    if callable(by_key := getattr(value, "by_key", None)):  # a `cycler.Cycler`
        return {"cycler": {key: parameter_as_json(each) for key, each in by_key().items()}}
    if is_plain(value):
        return value
    return value.item() if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0 else None


def _read_parameters(_: Any) -> dict[str, Any] | None:
    changed = {name: (value, parameter_as_json(value)) for name, value in changed_parameters().items()}
    return {name: own for name, (value, own) in changed.items() if value is None or own is not None} or None


def parameters_that_stay(_: Any) -> Iterator[str]:
    """Yield a sentence on each parameter of this process that ranks will not have."""
    for name, value in changed_parameters().items():
        if value is not None and parameter_as_json(value) is None:
            yield f"matplotlib's {name} of the notebook is not set on the ranks: set it in the cell"


def _write_parameters(matplotlib: Any, value: dict[str, Any] | None) -> None:
    value = value or {}
    for name in _parameters_set - value.keys():
        matplotlib.rcParams[name] = matplotlib.rcParamsOrig[name]
    _parameters_set.clear()
    for name, parameter in value.items():
        if name in matplotlib.rcParams:  # another version does not have this parameter
            is_cycle = isinstance(parameter, dict)
            matplotlib.rcParams[name] = matplotlib.cycler(**parameter["cycler"]) if is_cycle else parameter
            _parameters_set.add(name)


_parameters_set: set[str] = set()

DISPLAY_SETTINGS = (
    LibrarySetting(name="pandas", library="pandas", read=_read_pandas, write=_write_pandas),
    LibrarySetting(name="matplotlib", library="matplotlib", read=_read_parameters, write=_write_parameters),
)
