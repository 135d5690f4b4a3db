"""The Python of notebook cells, for the colours of code on the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from IPython.lib.lexers import IPython3Lexer
from pygments.token import Comment

_FIRST_LINE = re.compile(r"%%distrib\w*\b.*\n?")


class CellLexer(IPython3Lexer):
    """Python below `%%distributed`, too: IPython's own lexer takes what stands below a cell magic as text."""

    name = "Notebook cell"
    aliases = ["ipython"]  # noqa: RUF012 - as pygments declares it

    def get_tokens_unprocessed(self, text: str, stack: Any = ("root",)) -> Iterator[tuple[int, Any, str]]:
        """Yield each token with its place in the text."""
        magic = _FIRST_LINE.match(text)
        begin = magic.end() if magic else 0
        if magic:
            yield 0, Comment.Preproc, magic[0]
        yield from ((begin + at, kind, word) for at, kind, word in super().get_tokens_unprocessed(text[begin:], stack))
