"""Writes the files that are made from the options: `.venv/bin/python -m tests.generated`.

They are the tables of docs/options.md, and `jupyter_distrib/kernel/settings/option_keywords.py`, whose types editors
and type checkers show for `@distributed(...)`. Tests compare both with the options.
"""

from __future__ import annotations

import re
from pathlib import Path

from jupyter_distrib import options as readers
from jupyter_distrib.kernel.settings import cell_options
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.help import markdown_tables
from jupyter_distrib.options import Option

TOP = Path(__file__).parent.parent
OPTIONS_PAGE = TOP / "docs" / "options.md"
KEYWORDS = TOP / "jupyter_distrib" / "kernel" / "settings" / "option_keywords.py"
_TYPES = {
    readers.count: "int",
    readers.count_or_range: "int | str",
    readers.seconds: "float",
    readers.at_least_zero: "float",
    readers.size_bytes: "int | str",
    readers.size_or_none: "int | str",
    readers.names: "str | Sequence[str]",
    readers.rank_list: "int | str | Sequence[int]",
    readers.variable: "Mapping[str, str]",
}
_BY_NAME = {
    "gpu_type": "str | Enum",
    "track": "str | Sequence[str]",
    "hosts": "str | Sequence[str]",
    "zero": "int | str",
}
_HEAD = '''"""The types of the keywords of `@distributed` and `run_script`. Standard library only, no state.

Made from the options: `python -m tests.generated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypedDict


class OptionKeywords(TypedDict, total=False):
    """The options of `%%distributed`, as keywords; docs/options.md says what each means."""

'''


def keywords_source() -> str:
    """Return the source of the module with the types."""
    declared = [*cell_options.OPTIONS, *(each for all_ in (STRATEGIES, POOLS) for name in all_ for each in all_[name])]
    types: dict[str, str] = {}
    for option in declared:
        if option.name not in cell_options.OF_CELLS:
            types.setdefault(option.name, type_of(option))
    return _HEAD + "".join(f"    {name}: {type_} | None\n" for name, type_ in types.items())


def type_of(option: Option) -> str:
    if not option.metavar:
        return "bool"
    if option.bare:
        return "str | bool" if option.choices else "int | bool"
    return _BY_NAME.get(option.name) or _TYPES.get(option.read, "str")


def options_page() -> str:
    """Return docs/options.md with the tables of now."""
    tables = markdown_tables(strategies=STRATEGIES, pools=POOLS)
    text = OPTIONS_PAGE.read_text("utf-8")
    return re.sub(r"(?<=<!-- options -->\n).*(?=\n<!-- /options -->)", lambda _: tables, text, flags=re.DOTALL)


if __name__ == "__main__":
    KEYWORDS.write_text(keywords_source(), "utf-8")
    OPTIONS_PAGE.write_text(options_page(), "utf-8")
