"""The Markdown and LaTeX displayed by ranks, in forms that every front end shows, and formulas in any text. Kernel
side; pure functions.

Markdown becomes HTML by mistune, which JupyterLab brings along; without it the source is shown. LaTeX stays as it is:
front ends typeset the formulas in a page's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_NO_TEXT = re.compile(r"<IPython\.core\.display\.\w+ object>")
"""The plain text of IPython's own display objects, which does not describe their content."""
TEXTS = ("text/plain", "text/markdown", "text/latex")
MARKDOWN_CHARACTERS = 200_000
"""Length up to which Markdown is converted, which takes about 0.6 s; of a longer text the source is shown."""
_ACTIVE = re.compile(
    r"\\(href|url|includegraphics|html(?:@mathml|[A-Za-z]*)|data|style|class|cssId|require|unicode|bbox|mmlToken|tooltip"
    r"|[gex]?def|let|futurelet|(?:new|renew|provide)(?:command|environment)|Declare[A-Za-z]*|csname|catcode)"
    r"(?![A-Za-z])(?:\s*\{[^{}]*\}(?=\s*\{))?"
)
"""Commands of MathJax and KaTeX that make a link, load or style something, or define other names for such commands; a
first argument of several goes with its command: the address of a link."""
_FORMULA = re.compile(r"\$|\\[(\[]|\\begin")
_LEFT_ALONE = re.compile(r"(<pre\b[^>]*>.*?</pre>|<[^>]*>)", re.DOTALL)
"""Markup, and text in which no front end looks for formulas. What is taken out never reaches into a tag, since the rest
of that tag would become other markup."""


def with_html(data: Mapping[str, str]) -> dict[str, str]:
    """Return a MIME bundle in which Markdown without HTML has HTML, not sanitized yet."""
    source = data.get("text/markdown", "")
    is_converted = 0 < len(source) <= MARKDOWN_CHARACTERS and "text/html" not in data
    html = _rendered(source) if is_converted else None
    return dict(data) if html is None else {**data, "text/html": html}


@lru_cache(maxsize=100)
def _rendered(source: str) -> str | None:
    try:
        import mistune
    except ImportError:
        return None
    return str(mistune.html(source))


def inert(html: str) -> str:
    """Return HTML without the TeX commands that have side effects, since front ends typeset formulas in all text of a
    page, whoever has written it. A space replaces each command, so that nothing new can form.

    Args:
        html: Well-formed HTML, in whose texts and attributes `<` and `>` are escaped.
    """
    if _FORMULA.search(html) is None:
        return html
    parts = _LEFT_ALONE.split(html)
    return "".join(part if place % 2 else _ACTIVE.sub(" ", part) for place, part in enumerate(parts))


def text_of(data: Mapping[str, str]) -> str | None:
    """Return the most informative text of a bundle; None if it has none."""
    texts = [data[kind] for kind in TEXTS if kind in data]
    return next((text for text in texts if not _NO_TEXT.fullmatch(text)), texts[0] if texts else None)
