"""The settings of `logging`, as a row of the table in `libraries/settings.py`: levels, handlers, `propagate` and
`disabled` of the root and of named loggers. Standard library only.

Handlers for standard output, standard error and files are made anew on a rank; files are appended to. A library that is
loaded sets up its loggers by itself on each rank, so only their levels are copied, and no line comes twice.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.machinery import PathFinder
from typing import Any

from jupyter_distrib.libraries.setting import LibrarySetting, when_imported
from jupyter_distrib.system import file_owner

_OWN_LOGGERS = frozenset(
    {
        *(
            "IPython",
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
"""Loggers that are set up by the libraries of a kernel, torch or this package."""
_STYLES = {"PercentStyle": "%", "StrFormatStyle": "{", "StringTemplateStyle": "$"}
_LEVELS = logging.getLevelNamesMapping()
_before: dict[str, tuple[int, bool, bool, list[logging.Handler]]] = {}
"""Level, `propagate`, `disabled` and handlers of this process's loggers before those of another process were set."""
_wanted: dict[str, dict[str, Any]] = {}
"""The loggers of the notebook, on a rank."""


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    """Yield the root under the empty name, and the other loggers that a user or a library has set up."""
    yield "", logging.root
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or not (
            logger.level or logger.handlers or not logger.propagate or logger.disabled or logger.filters
        ):
            continue
        if name.partition(".")[0] not in _OWN_LOGGERS and not _is_of_application(name):
            yield name, logger


def _is_of_application(name: str) -> bool:
    """Return whether a logger is that of an application of traitlets, as kernels and shells of IPython are:
    `IPKernelApp`, `SpyderKernelApp`. It has the name of the application's class (`Application._log_default`)."""
    base = getattr(sys.modules.get("traitlets.config.application"), "Application", None)
    found = [] if base is None else [base]
    for each in found:
        found += each.__subclasses__()
    return any(each.__name__ == name for each in found)


def _is_of_library(name: str) -> bool:
    """Return whether a logger belongs to an installed library that is loaded."""
    module = sys.modules.get(name.partition(".")[0]) if name else None
    file = getattr(module, "__file__", None)
    if file is None and module is not None:  # a package in several folders, such as `opentelemetry`
        file = next(iter(getattr(module, "__path__", ())), None)
    return isinstance(file, str) and file_owner.is_library(file)


@cache
def _is_of_one_that_is_not_loaded(name: str) -> bool:
    """Return whether a logger belongs to a library that is not loaded, for which another library has set it up, as
    MLflow does."""
    top = name.partition(".")[0]
    found = None if top in sys.modules else PathFinder.find_spec(top)
    return found is not None and found.origin is not None and file_owner.is_library(found.origin)


def _read(_: Any) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for name, logger in _loggers():
        own: dict[str, Any] = {}
        if logger.level != (logging.NOTSET if name else logging.WARNING):
            own["level"] = logger.level
        if (logger.handlers or not logger.propagate) and not _is_of_library(name):
            handlers = [form for each in logger.handlers if (form := _form(each)) is not None]
            own |= {"handlers": handlers} if handlers else {}
            own |= {} if logger.propagate or (logger.handlers and not handlers) else {"propagate": False}
        if logger.disabled:  # as `logging.config.dictConfig` does with existing loggers
            own["disabled"] = True
        if own:
            found[name] = own | _maker(name, logger)
    value: dict[str, Any] = {"loggers": found} if found else {}
    if logging.root.manager.disable:
        value["disabled"] = logging.root.manager.disable
    if (levels := logging.getLevelNamesMapping()) != _LEVELS:
        value["names"] = {name: level for name, level in levels.items() if _LEVELS.get(name) != level}
    return value or None


def _maker(name: str, logger: logging.Logger) -> dict[str, str]:
    """Return the package that creates this logger, of a class of its own, at its import, as astropy does: a logger
    created before would be of the wrong class. The user's own loggers of such a class have other names."""
    package = type(logger).__module__.partition(".")[0]
    return {"maker": package} if package == name.partition(".")[0] else {}


def _form(handler: logging.Handler) -> dict[str, Any] | None:
    """Return a handler as JSON; None for a handler that cannot be rebuilt from JSON."""
    if handler.filters:  # their filters may keep out secrets, such as a password, which must not be written
        return None
    form: dict[str, Any] = {}
    if isinstance(handler, logging.FileHandler):  # also a handler that begins a new file from time to time
        form = {"file": handler.baseFilename, "encoding": handler.encoding}
    elif type(handler) is logging.StreamHandler:
        if not (stream := _standard(handler.stream)):
            return None
        form = {"stream": stream}
    elif isinstance(handler, logging.NullHandler):
        return {"null": True}
    else:
        return None
    formatter = handler.formatter
    if formatter is not None:
        how: Any = formatter._style  # noqa: SLF001 - no public way
        style = _STYLES.get(type(how).__name__)
        if type(formatter) is not logging.Formatter or style is None or how._defaults:  # noqa: SLF001
            return None
        form |= {"format": formatter._fmt, "dates": formatter.datefmt, "style": style}  # noqa: SLF001
    return {**form, "level": handler.level} if handler.level else form


def _standard(stream: Any) -> str:
    """Return the name of a standard stream; empty for any other stream."""
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
            return name
    return ""


def handlers_that_stay(_: Any) -> Iterator[str]:
    """Yield a sentence on each handler of this process that ranks will not have."""
    for name, logger in _loggers():
        if (logger.handlers or logger.filters) and not _is_of_library(name):
            kinds = {type(each).__name__ for each in logger.handlers if _form(each) is None}
            kinds |= {"filter"} if logger.filters else set()
            for kind in sorted(kinds) if kinds and not _is_of_one_that_is_not_loaded(name) else ():
                whose = f"the logger {name!r}" if name else "the root logger"
                yield (
                    f"the {kind} of {whose} is not set on the ranks: add it in the cell, or in a cell with "
                    "%%distributed_setup"
                )
    for kind, function, now, default in (
        ("class of loggers", "setLoggerClass", logging.getLoggerClass(), logging.Logger),
        ("factory of log records", "setLogRecordFactory", logging.getLogRecordFactory(), logging.LogRecord),
    ):
        if now is not default and not _is_of_library(str(now.__module__)):
            yield f"the {kind} is not set on the ranks: call logging.{function} in a cell with %%distributed_setup"


def _write(_: Any, value: dict[str, Any] | None) -> None:
    global _wanted
    value = value or {}
    _wanted = value.get("loggers", {})
    for name, level in value.get("names", {}).items():
        logging.addLevelName(level, name)
    for name in _before.keys() - _wanted.keys():
        _put_back(name)
    for name, own in _wanted.items():
        if maker := own.get("maker"):
            when_imported(maker, f"the logger {name}", partial(_set, name))
        else:
            _set(name)
    logging.disable(value.get("disabled", logging.NOTSET))


def _set(name: str, _: object = None) -> None:
    """Set up a logger as the notebook now has it."""
    if (own := _wanted.get(name)) is None:
        return
    logger = logging.getLogger(name)
    if name not in _before:
        _before[name] = logger.level, logger.propagate, logger.disabled, list(logger.handlers)
    level, propagate, disabled, handlers = _before[name]
    logger.setLevel(own.get("level", level))
    logger.propagate = own.get("propagate", propagate)
    logger.disabled = own.get("disabled", disabled)
    present = [_form(each) for each in logger.handlers if each not in _made_here]
    forms = [form for form in own.get("handlers", ()) if form not in present]
    _replace_handlers(logger, [made for form in forms if (made := _made(form))] or handlers)


def _put_back(name: str) -> None:
    logger = logging.getLogger(name)
    level, logger.propagate, logger.disabled, handlers = _before.pop(name)
    logger.setLevel(level)
    _replace_handlers(logger, handlers)


def _replace_handlers(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Give a logger these handlers in place of those given earlier. Handlers that a cell has added stay."""
    for old in [each for each in logger.handlers if each in _made_here]:
        if old not in handlers:
            logger.removeHandler(old)
            old.close()
            _made_here.discard(old)
    for each in handlers:
        logger.addHandler(each)


_made_here: set[logging.Handler] = set()


def _made(form: dict[str, Any]) -> logging.Handler | None:
    handler: logging.Handler
    if "file" in form:
        if not os.path.isdir(os.path.dirname(form["file"])):
            print(
                f"the log file {form['file']} of the notebook cannot be written here: no such folder", file=sys.stderr
            )
            return None
        handler = logging.FileHandler(form["file"], "a", form["encoding"], delay=True)
    elif "null" in form:
        handler = logging.NullHandler()
    else:
        handler = logging.StreamHandler(getattr(sys, form["stream"]))
    if "style" in form:
        handler.setFormatter(logging.Formatter(form["format"], form["dates"], form["style"]))
    handler.setLevel(form.get("level", logging.NOTSET))
    _made_here.add(handler)
    return handler


LOGGING = LibrarySetting(name="logging", library="logging", read=_read, write=_write)
