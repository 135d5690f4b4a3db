"""Reads the options of a cell from the keywords of the Python API. In the kernel; no state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, DEFAULT_STRATEGY, Options, possible
from jupyter_distrib.options import Declared, Option, as_keyword, expression, gather, shown, unknown_option, variable


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
                raise OptionsError(f"{option.name} must have a text for each name; got {shown(f'{key}: {text}')}")
        return [f"{key}={text}" for key, text in value.items()]
    if not isinstance(value, list | tuple | set | frozenset | range):
        return [str(value)]
    texts = [str(_plain(item)) for item in value]
    return texts if option.repeatable else [",".join(texts)]


def _plain(value: object) -> object:
    """Return the value of an enumeration's member, which other libraries pass; any other value unchanged."""
    return value.value if isinstance(value, Enum) else value
