"""Formats ranks, times, sizes and long texts for users. Kernel side; pure functions, standard library only."""

from __future__ import annotations

from collections.abc import Iterable


def rank_list(ranks: Iterable[int], *, sentence: bool = False) -> str:
    """Format rank numbers: `rank 3`, `ranks 0-2, 5`; capitalized at the start of a `sentence`."""
    return numbered("Rank" if sentence else "rank", ranks)


def numbered(word: str, numbers: Iterable[int]) -> str:
    """Format numbers: `GPU 3`, `GPUs 0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return f"{word}{'' if single else 's'} {text}"


def duration(seconds: float) -> str:
    """Format a duration: `0.3 s`, `41 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")


def size(size_bytes: int) -> str:
    """Format a size: `30.8 GB`, in powers of 1000."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"


def short(name: str, characters: int = 40) -> str:
    """Shorten an overlong name by leaving out its end."""
    return name if len(name) <= characters else f"{name[: characters - 1]}…"


def printable(text: str) -> str:
    """Return a text in one line that does nothing to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def clipped(text: str, characters: int) -> str:
    """Cut an overlong text, and state the length of the cut part."""
    return text if len(text) <= characters else f"{text[:characters]}... ({len(text) - characters:,} more characters)"
