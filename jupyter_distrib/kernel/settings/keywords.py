"""Reads the options of a cell from the keywords of the Python API. In the kernel; no state."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import (
    DEFAULT_POOL,
    DEFAULT_STRATEGY,
    OF_CELLS,
    OPTIONS,
    Options,
    possible,
)
from jupyter_distrib.kernel.settings.option_keywords import OptionKeywords
from jupyter_distrib.options import Declared, Option, as_keyword, expression, gather, shown, unknown_option, variable

_STRATEGIES = ("none", "ddp", "fsdp", "tp", "deepspeed", "tensorflow")


def from_keywords(
    keywords: Mapping[str, object],
    *,
    strategies: Declared,
    pools: Declared,
    strategy: str = DEFAULT_STRATEGY,
    pool: str = DEFAULT_POOL,
) -> Options:
    """Read keywords: a list, tuple or set where the line has commas, a mapping for `env`; None for an option not given.

    Raises:
        OptionsError: It says the same as that of `parse_line`, with the keyword's name.
    """
    given = {name: _plain(value) for name, value in keywords.items() if value is not None}
    chosen = str(given.get("strategy", strategy)), str(given.get("pool", pool))
    table = possible(strategies, pools, *chosen, as_keyword)
    known = {option.name: option for option in table.options}
    pairs: list[tuple[Option, str]] = []
    for name, value in given.items():
        if name not in known:
            raise unknown_option(name, table.options, table.owners, as_keyword)
        pairs += [(known[name], text) for text in _texts(known[name], value)]
    return table.chosen(gather(pairs, as_keyword))


def with_options(function: Callable[..., Any]) -> None:
    """Let help and completion show each option as a keyword of the function, which takes them as `**options`."""
    signature = inspect.signature(function)
    *others, _ = signature.parameters.values()
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=getattr(type_, "__forward_arg__", type_)
        )
        for name, type_ in OptionKeywords.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]


def _texts(option: Option, value: object) -> list[str]:
    """Return a keyword's value as the texts of a line; one text for each item of a repeatable option."""
    if option.bare and isinstance(value, bool):
        return [option.bare] * value
    if not option.metavar:
        if not isinstance(value, bool):
            raise OptionsError(f"{option.name} must be True or False; got {shown(str(value))}")
        return [""] * value
    if option.read is expression and isinstance(value, Mapping):
        return [f"{key}={text if isinstance(text, str) else list(text)!r}" for key, text in value.items()]
    if option.read is variable and isinstance(value, Mapping):
        for key, text in value.items():
            if "=" in str(key) or text is None:
                raise OptionsError(f"{option.name} must have a string for each name; got {shown(f'{key}: {text}')}")
        return [f"{key}={text}" for key, text in value.items()]
    if not isinstance(value, list | tuple | set | frozenset | range):
        return [str(value)]
    texts = [str(_plain(item)) for item in value]
    return texts if option.repeatable else [",".join(texts)]


def _plain(value: object) -> object:
    """Return the value of an enumeration's member, which other libraries pass; any other value unchanged."""
    return value.value if isinstance(value, Enum) else value


def in_call(text: str, names: Mapping[str, str]) -> str:
    """Return a sentence about options with the keywords of a call in place of the flags of a magic line:
    `gpu_type='A10'` for `--gpu-type A10`.

    Args:
        text: The sentence.
        names: What the caller writes for a keyword, if not the keyword itself: a name, or all of `name = value`.
    """
    text = _VARIABLES.sub(lambda found: _mapping_of(found[1], names), text)
    return _flags().sub(lambda found: _call_of(found[1], found[2] or "", names), text)


_VARIABLE = r"\w+=(?:'[^']*'|[\w./:+-]*[\w/:+-])"
_VARIABLES = re.compile(rf"--env ({_VARIABLE}(?: and {_VARIABLE})*)")


def _mapping_of(variables: str, names: Mapping[str, str]) -> str:
    """Return `env={'A': '1', 'B': '2'}` for `A=1 and B=2`."""
    pairs = (each.partition("=") for each in shlex.split(variables) if each != "and")
    given = {variable: value for variable, _, value in pairs}
    name = names.get("env", "env")
    return name if "=" in name else f"{name}={given!r}"


@cache
def _flags() -> re.Pattern[str]:
    written = [re.escape(option.flag) for option in OPTIONS if option.name not in OF_CELLS]
    flags = "|".join(sorted(written, key=len, reverse=True))
    # A value is a number, a placeholder or a name in capitals, or stands before ", but"; else the text goes on.
    return re.compile(rf"({flags})(?![\w-])(?: (\d+|[A-Z][\w.-]*|[\w.-]+(?=, but)|{'|'.join(_STRATEGIES)})\b)?")


def _call_of(flag: str, value: str, names: Mapping[str, str]) -> str:
    option = next(each for each in OPTIONS if each.flag == flag)
    keyword = option.keyword or option.name
    name = names.get(keyword, keyword)
    if "=" in name or (option.metavar and not value):
        return name
    if not option.metavar:
        return f"{name}=True" + (f" {value}" if value else "")
    return f"{name}={value}" if value.isdecimal() or len(value) == 1 else f"{name}={value!r}"
