"""Writes the options of a cell as a magic line. Kernel side; standard library only, no state."""

from __future__ import annotations

import shlex

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings.cell_options import MAGIC, OPTIONS, Options


def to_line(options: Options) -> str:
    """Return the magic line that `parse_line` reads as these options.

    Raises:
        OptionsError: A value holds a line break.
    """
    words = [MAGIC]
    for option in OPTIONS:
        words += [_word(option.flag, text) for text in _written(getattr(options, option.name))]
    for name, text in {**options.pool_options, **options.strategy_options}.items():
        words.append(_word("--" + name.replace("_", "-"), text))
    line = " ".join(words)
    if len(line.splitlines()) > 1:
        raise OptionsError("a magic line cannot hold a value with a line break: set it in the cell instead")
    return line


def _written(value: object) -> list[str]:
    match value:
        case None | False | ():
            return []
        case True:
            return [""]
        case float():
            return [repr(value).removesuffix(".0")]
        case tuple():
            return [",".join(map(str, value))]
        case dict():
            return [f"{key}={text}" for key, text in value.items()]
        case _:
            return [str(value)]


def _word(flag: str, text: str) -> str:
    if not text:
        return flag
    return f"{flag}{'=' if text.startswith('-') else ' '}{shlex.quote(text)}"
