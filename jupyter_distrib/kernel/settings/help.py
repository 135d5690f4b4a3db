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
_REST = "How it runs"
_GROUPS = {
    "Ranks and devices": ("gpus", "ranks", "gpu_type", "numa_binding", "pool", "strategy", "on"),
    "Names and values": ("out", "keep", "with_", "max_capture", "cache", "explain"),
    "Time limits": ("timeout_s", "wait_s", "hang_timeout_s"),
    "Restarts": ("max_restarts", "min_ranks", "grow_after_s", "restart_on"),
    "Looking at a run": ("check", "debug", "profile", "track"),
    _REST: (),
}
"""The names of the options that every cell accepts, by their headings; the last heading has all that no other heading
names."""


def help_text(*, strategies: Declared, pools: Declared) -> str:
    """Return the text of `%%distributed?`."""
    common = [(f"{heading}:", options) for heading, options in _groups(base(strategies, pools))]
    own = [
        (f"With --{kind} {_either(names)}:", options)
        for kind, declared in (("strategy", strategies), ("pool", pools))
        for names, options in _shared(declared)
    ]
    sections = [*common, *own]
    width = max(len(_usage(option)) for _, options in sections for option in options)
    lines = [f"usage: {MAGIC} [OPTION]... [# comment]"]
    for title, options in sections:
        lines += ["", title]
        for option in options:
            default = f" (default: {option.default})" if option.default else ""
            lines.append(f"  {_usage(option):{width}}  {_meaning(option)}{default}")
    lines += ["", f"More: {page('options')}"]
    return "\n".join(lines)


def markdown_tables(*, strategies: Declared, pools: Declared) -> str:
    """Return the tables of docs/options.md, with a heading for each and an anchor for each option."""
    tables = [(heading, [("", each) for each in options]) for heading, options in _groups(base(strategies, pools))]
    for heading, declared in (("Options of strategies", strategies), ("Options of kinds of pools", pools)):
        tables.append((heading, [(_either(names), each) for names, options in _shared(declared) for each in options]))
    taken: set[str] = set()
    return "\n\n".join(f"## {heading}\n\n{_table(rows, taken)}" for heading, rows in tables)


def _table(rows: Sequence[tuple[str, Option]], taken: set[str]) -> str:
    owned = any(owners for owners, _ in rows)
    head = ("option", *(("with",) if owned else ()), "meaning", "default", "keyword")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for owners, option in rows:
        anchor = option.flag if option.flag not in taken else f"{option.flag}-{owners.split(',')[0]}"
        taken.add(anchor)
        usage = f'<a id="{anchor}"></a>`{_usage(option)}`'
        cells = [usage, *((owners,) if owned else ()), _meaning(option), option.default, f"`{option.name}`"]
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


def _groups(options: Sequence[Option]) -> list[tuple[str, list[Option]]]:
    """Return the options that every cell accepts, in groups with a heading."""
    by_name = {option.name: option for option in options}
    groups = [(heading, [by_name.pop(name) for name in names]) for heading, names in _GROUPS.items()]
    groups[-1][1].extend(by_name.values())
    return groups


def _shared(declared: Declared) -> Iterator[tuple[tuple[str, ...], list[Option]]]:
    """Yield the names of the strategies or pools that share options, and these options."""
    owners: dict[Option, list[str]] = {}
    for owner, options in declared.items():
        for option in options:
            owners.setdefault(option, []).append(owner)
    for together_in in dict.fromkeys(map(tuple, owners.values())):
        yield together_in, [option for option, theirs in owners.items() if tuple(theirs) == together_in]


def _either(names: Sequence[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _usage(option: Option) -> str:
    return as_flag(option, option.metavar)


def _meaning(option: Option) -> str:
    return option.meaning + (f"; one of {', '.join(option.choices)}" if option.choices else "")
