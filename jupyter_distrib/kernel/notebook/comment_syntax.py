"""The comment `# distributed: --gpus 8` as the first line of a cell, in place of `%%distributed --gpus 8`; and comments
above `%%distributed`, below which IPython would not find it. Kernel side.

Linters, formatters and type checkers see a plain Python cell. The comment becomes the magic before IPython looks for
magics, and the number of lines stays the same, so that all line numbers remain those of the front end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from IPython.core.interactiveshell import InteractiveShell

from jupyter_distrib.kernel.settings.cell_options import MAGIC

MAGICS = (MAGIC, "%%distrib")
_LINE = re.compile(r"#\s*distributed:\s*(?P<options>(?:--.*)?)$")
"""The comment that stands for the magic; other words after the colon make it an ordinary comment."""
_suspended = False


def magic_line(line: str) -> str | None:
    """Return the magic that a first line stands for, or None."""
    match = _LINE.match(line.strip())
    return f"{MAGIC} {match['options']}".rstrip() if match else None


def transform(lines: list[str]) -> list[str]:
    """Replace the comment by the magic, and move the magic above empty lines and comments."""
    first = next((index for index, line in enumerate(lines) if line.strip()), None)
    if first is None or _suspended:
        return lines
    if (magic := magic_line(lines[first])) is None:
        first = next((index for index, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
        if first == 0 or lines[first].split(None, 1)[0] not in MAGICS:
            return lines
        magic = lines[first].strip()
    return [f"{magic}\n", *lines[:first], *lines[first + 1 :]]


def body_transformer(shell: InteractiveShell) -> Callable[[str], str]:
    """Return IPython's translation of cells without this transformer, for the body of a cell that is distributed
    already."""

    def transform_body(source: str) -> str:
        with _suspension():
            return str(shell.transform_cell(source))  # type: ignore[no-untyped-call]  # IPython's has no types

    return transform_body


@contextmanager
def _suspension() -> Iterator[None]:
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before


def install(shell: InteractiveShell) -> None:
    if transform not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.insert(0, transform)


def remove(shell: InteractiveShell) -> None:
    if transform in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(transform)
