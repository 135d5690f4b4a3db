"""Copies library settings that affect what a program computes and prints from the kernel to a rank. Only loaded
libraries are inspected, and none is loaded for it. Standard library only.

Each setting is a JSON value. Settings with their default are left out.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from jupyter_distrib.system import private_torch
from jupyter_distrib.system.data_class import data_class

_TORCH_PRINTING = {"precision": 4, "threshold": 1000.0, "edgeitems": 3, "linewidth": 80, "sci_mode": None}
_NUMPY_PRINTING = {
    "edgeitems": 3,
    "threshold": 1000,
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "floatmode": "maxprec",
}


@data_class
class LibrarySetting:
    """One setting of a library."""

    name: str
    library: str
    read: Callable[[Any], Any]
    """Function that returns the value, given the library; None for the default."""
    write: Callable[[Any, Any], None]
    """Function that sets a value, given the library."""


def read() -> dict[str, Any]:
    """Return all settings that differ from the libraries' defaults."""
    return {
        each.name: value
        for each in SETTINGS
        if (library := sys.modules.get(each.library)) is not None and (value := each.read(library)) is not None
    }


def that_stay() -> Iterator[str]:
    """Yield a message for each setting of this process that is not copied to ranks."""
    torch: Any = sys.modules.get("torch")
    ask = getattr(torch, "get_default_device", None)
    if ask is not None and (device := str(ask())) != "cpu":
        yield f"torch's default device of the notebook, {device}, is not set on the ranks: use `device`"
    for name, value in _pandas_display().items():
        if callable(value) and _as_json(value) is None:
            yield f"the function in pandas.options.{name} of the notebook is not set on the ranks: set it in the cell"


class Applied:
    """Settings of this process that were copied from another one."""

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}

    def apply(self, wanted: dict[str, Any]) -> None:
        """Apply these settings, and reset settings that only the previous call had set; all others stay."""
        if wanted == self._now:
            return
        for each in SETTINGS:
            value = wanted.get(each.name)
            if value != self._now.get(each.name):
                _write(each, value)
        self._now = dict(wanted)


def _write(setting: LibrarySetting, value: Any) -> None:
    if setting.library in sys.modules or setting.library not in AT_IMPORT:
        setting.write(importlib.import_module(setting.library), value)
    else:
        _waiting[setting.library] = lambda library: setting.write(library, value)


def set_at_import(library: Any) -> None:
    """Apply the settings that were waiting for the import of this library. Called in a rank after the import."""
    _waiting.pop(library.__name__, lambda _: None)(library)


AT_IMPORT = ("pandas",)
"""Libraries that a rank imports late or never; their settings wait for the import."""
_waiting: dict[str, Callable[[Any], None]] = {}
"""The functions that apply settings to libraries that are not imported yet."""


def _read_dtype(torch: Any) -> str | None:
    name = str(torch.get_default_dtype()).removeprefix("torch.")
    return None if name == "float32" else name


def _write_dtype(torch: Any, value: str | None) -> None:
    torch.set_default_dtype(getattr(torch, value or "float32"))


def _read_torch_printing(torch: Any) -> dict[str, Any] | None:
    options = private_torch.print_options(torch)
    return _unlike(_TORCH_PRINTING, {name: getattr(options, name, None) for name in _TORCH_PRINTING})


def _write_torch_printing(torch: Any, value: dict[str, Any] | None) -> None:
    torch.set_printoptions(**{**_TORCH_PRINTING, **(value or {})})


def _read_numpy_printing(numpy: Any) -> dict[str, Any] | None:
    return _unlike(_NUMPY_PRINTING, numpy.get_printoptions())


def _write_numpy_printing(numpy: Any, value: dict[str, Any] | None) -> None:
    numpy.set_printoptions(**{**_NUMPY_PRINTING, **(value or {})})


def _pandas_display() -> dict[str, Any]:
    """Return pandas' display options that differ from a program's defaults, by name, if pandas is loaded."""
    config = getattr(getattr(sys.modules.get("pandas"), "_config", None), "config", None)
    if config is None:
        return {}
    # pandas has no public way to read them all with their defaults
    registered, found = config._registered_options, {}  # noqa: SLF001
    for name, value in _flat("display", config._global_config.get("display", {})):  # noqa: SLF001
        # 20 in a notebook, 0 in programs, which ranks are
        default = 0 if name == "display.max_columns" else getattr(registered.get(name), "defval", value)
        if value is not default and value != default:
            found[name] = value
    return found


def _flat(prefix: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            yield from _flat(name, value)
        else:
            yield name, value


def _as_json(value: Any) -> Any:
    """Return a JSON value; `"{:.2f}".format` becomes a dict, and other objects None."""
    if getattr(value, "__name__", "") == "format" and isinstance(text := getattr(value, "__self__", None), str):
        return {"format": text}
    return value if isinstance(value, (str, int, float, bool)) else None


def _read_pandas(_: Any) -> dict[str, Any] | None:
    options = _pandas_display()
    return {
        name: _as_json(value) for name, value in options.items() if value is None or _as_json(value) is not None
    } or None


def _write_pandas(pandas: Any, value: dict[str, Any] | None) -> None:
    value = value or {}
    for name in _pandas_before.keys() - value.keys():
        pandas.set_option(name, _pandas_before.pop(name))
    for name, option in value.items():
        _pandas_before.setdefault(name, pandas.get_option(name))
        pandas.set_option(name, option["format"].format if isinstance(option, dict) else option)


_pandas_before: dict[str, Any] = {}
"""The options of this process before another one's were set."""


def _unlike(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values that differ from the defaults, as far as JSON can represent them."""
    plain = (str, int, float, bool, type(None))
    unlike = {
        name: value
        for name, default in defaults.items()
        if (value := values.get(name, default)) != default and isinstance(value, plain)
    }
    return unlike or None


def _read_logging(_: Any) -> dict[str, Any] | None:
    """Return the level of the root logger, and the format that `logging.basicConfig` has set."""
    value: dict[str, Any] = {} if logging.root.level == logging.WARNING else {"level": logging.root.level}
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler and handler.formatter is not None:
            value |= {"format": handler.formatter._fmt, "dates": handler.formatter.datefmt}  # noqa: SLF001 - no public way
    return value or None


def _write_logging(_: Any, value: dict[str, Any] | None) -> None:
    value = value or {}
    if "format" in value:
        logging.basicConfig(format=value["format"], datefmt=value["dates"], force=True)
    logging.root.setLevel(value.get("level", logging.WARNING))


def _read_levels(_: Any) -> dict[str, int] | None:
    """Return the levels of loggers by name, except those of a kernel's own libraries and of torch."""
    levels = {
        name: level
        for name, logger in list(logging.root.manager.loggerDict.items())
        if (level := getattr(logger, "level", 0)) and name.partition(".")[0] not in _OWN_LOGGERS
    }
    return levels or None


def _write_levels(_: Any, value: dict[str, int] | None) -> None:
    value = value or {}
    for name in _levels_before.keys() - value.keys():
        logging.getLogger(name).setLevel(_levels_before.pop(name))
    for name, level in value.items():
        _levels_before.setdefault(name, logging.getLogger(name).level)
        logging.getLogger(name).setLevel(level)


_OWN_LOGGERS = frozenset(
    {
        *(
            "IPython",
            "IPKernelApp",
            "ipykernel",
            "traitlets",
            "tornado",
            "asyncio",
            "comm",
            "parso",
            "prompt_toolkit",
            "zmq",
        ),
        *("torch", "c10d-NullHandler-default", "strobelight_function_profiler", "strobelight_compile_time_profiler"),
        *("jupyter_distrib", "matplotlib"),
    }
)
"""Loggers whose levels are set by the libraries of a kernel, torch or this package."""
_levels_before: dict[str, int] = {}
"""The levels of this process before another one's were set."""


def _read_warnings(_: Any) -> list[list[str]] | None:
    """Return the filters that apply to all modules and a category of Python, as users set them."""
    found = []
    for action, message, category, module, line in warnings.filters:
        pythons = isinstance(category, type) and getattr(builtins, category.__name__, None) is category
        if pythons and module is None and not line and (action, category) not in _OF_PYTHON:
            text = str(getattr(message, "pattern", message) or "")
            if not text.startswith(_OF_LIBRARIES):
                found.append([action, text, category.__name__])  # type: ignore[union-attr]
    return found or None


def _write_warnings(_: Any, value: list[list[str]] | None) -> None:
    for action, text, category in reversed(value or []):
        warnings.filterwarnings(action, text, getattr(builtins, category))  # type: ignore[arg-type]


_OF_PYTHON = {
    ("ignore", each) for each in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
}
"""Python's default filters."""
_OF_LIBRARIES = ("numpy.", "torch::", ".*Trio's signal handling code")
"""Prefixes of the messages that numpy and torch filter at import, and ipykernel at its start."""


SETTINGS = (
    LibrarySetting(name="torch's default dtype", library="torch", read=_read_dtype, write=_write_dtype),
    LibrarySetting(name="torch printing", library="torch", read=_read_torch_printing, write=_write_torch_printing),
    LibrarySetting(name="numpy printing", library="numpy", read=_read_numpy_printing, write=_write_numpy_printing),
    LibrarySetting(name="pandas display", library="pandas", read=_read_pandas, write=_write_pandas),
    LibrarySetting(name="logging", library="logging", read=_read_logging, write=_write_logging),
    LibrarySetting(name="levels of loggers", library="logging", read=_read_levels, write=_write_levels),
    LibrarySetting(name="warnings", library="warnings", read=_read_warnings, write=_write_warnings),
)
