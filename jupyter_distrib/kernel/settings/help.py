"""The help, the tab completion and the docs' table of the options that `kernel/settings/cell_options.py`, strategies
and pools declare. No state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jupyter_distrib.errors import OptionsError, page
from jupyter_distrib.kernel.settings.cell_options import (
    DEFAULT_POOL,
    DEFAULT_STRATEGY,
    MAGIC,
    base,
    possible,
    value_after,
)
from jupyter_distrib.options import Declared, Option, as_flag, split_words

_CURSOR = "\0"


def help_text(*, strategies: Declared, pools: Declared) -> str:
    """Return the text of `%%distributed?`."""
    sections = [("Options:", base(strategies, pools)), *_sections(strategies, pools)]
    width = max(len(_usage(option)) for _, options in sections for option in options)
    lines = [f"usage: {MAGIC} [OPTION]... [# comment]"]
    for title, options in sections:
        lines += ["", title]
        for option in options:
            default = f" (default: {option.default})" if option.default else ""
            lines.append(f"  {_usage(option):{width}}  {_meaning(option)}{default}")
    lines += ["", f"More: {page('options')}"]
    return "\n".join(lines)


def markdown_table(*, strategies: Declared, pools: Declared) -> str:
    """Return the table of docs/options.md."""
    lines = ["| option | keyword | meaning | default |", "|---|---|---|---|"]
    for title, options in [("", base(strategies, pools)), *_sections(strategies, pools)]:
        for option in options:
            meaning = f"{title} {_meaning(option)}".strip()
            cells = [f"`{_usage(option)}`", f"`{option.name}`", meaning, option.default]
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def complete(
    line_before_cursor: str,
    *,
    strategies: Declared,
    pools: Declared,
    strategy: str = DEFAULT_STRATEGY,
    pool: str = DEFAULT_POOL,
) -> list[str]:
    """Return the completions of the word at the cursor; the line may begin with `%%distributed`."""
    try:
        # The mark shows whether the cursor is in a word, behind one, or in a comment.
        words = split_words(line_before_cursor.lstrip().removeprefix(MAGIC) + _CURSOR)
        if not words or not words[-1].endswith(_CURSOR):
            return []
        current = words.pop().removesuffix(_CURSOR)
        chosen = value_after(words, "--strategy") or strategy, value_after(words, "--pool") or pool
        table = possible(strategies, pools, *chosen, as_flag)
    except OptionsError:
        return []
    return [word for word in _candidates(words, current, table.options) if word.startswith(current)]


def _candidates(words: Sequence[str], current: str, options: Sequence[Option]) -> list[str]:
    known = {option.flag: option for option in options}
    flag, equals, _ = current.partition("=")
    if equals:
        return [f"{flag}={choice}" for choice in known[flag].choices] if flag in known else []
    before = known.get(words[-1]) if words else None
    if before and before.metavar:
        return list(before.choices)
    given = {word.partition("=")[0] for word in words}
    return [option.flag for option in options if option.repeatable or option.flag not in given]


def _sections(strategies: Declared, pools: Declared) -> Iterator[tuple[str, list[Option]]]:
    """Yield the options of strategies and pools, under a title with the names that share them."""
    for kind, declared in (("strategy", strategies), ("pool", pools)):
        owners: dict[Option, list[str]] = {}
        for owner, options in declared.items():
            for option in options:
                owners.setdefault(option, []).append(owner)
        for together_in in dict.fromkeys(map(tuple, owners.values())):
            together = [option for option, theirs in owners.items() if tuple(theirs) == together_in]
            yield f"With --{kind} {_either(together_in)}:", together


def _either(names: Sequence[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _usage(option: Option) -> str:
    return as_flag(option, option.metavar)


def _meaning(option: Option) -> str:
    return option.meaning + (f"; one of {', '.join(option.choices)}" if option.choices else "")
