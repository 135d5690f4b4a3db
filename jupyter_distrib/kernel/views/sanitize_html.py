"""The harmless part of HTML that a rank displayed. Kernel side; pure functions.

The result is written anew from the parsed HTML: only tags and attributes of the lists below, every text escaped, every
tag closed. So it can be put in the middle of other markup, in a trusted notebook or in an untrusted one. The colours
of style sheets stay, as styles of the elements (`kernel/views/inline_styles.py`).
"""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser

from jupyter_distrib.kernel.views.inline_styles import Element, Sheet

_TEXT = {"a", "abbr", "b", "blockquote", "caption", "cite", "code", "dd", "del", "details", "div", "dl", "dt", "em",
         "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "i", "ins", "kbd", "li", "mark", "ol", "p", "pre",
         "s", "samp", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th",
         "thead", "tr", "u", "ul", "var"}  # fmt: skip
_VOID = {"br", "hr", "img"}  # not wbr: within a formula front ends read over it, also in the name of a command
_DROPPED = {"applet", "audio", "button", "canvas", "embed", "form", "frame", "frameset", "head", "iframe", "input",
            "link", "math", "meta", "noembed", "noframes", "noscript", "object", "option", "param", "plaintext",
            "script", "select", "style", "svg", "template", "textarea", "title", "video", "xmp"}  # fmt: skip
"""Tags that are removed with their content; of any other unknown tag only the content stays."""
_NO_END = {"embed", "input", "link", "meta", "param", "frame", "option"}
_DEPTH = 200
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]*")
_IMAGE = re.compile(rf"data:(?:{'|'.join(IMAGES)});base64,{_BASE64.pattern}")


def is_base64(content: str) -> bool:
    return _BASE64.fullmatch(content) is not None


def safe(html: str) -> str:
    """Return the harmless part of `html`: structure, text and embedded images."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    return "".join([*parser.parts, *(f"</{tag}>" for tag in reversed(parser.open))])


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[str] = []
        self._elements: list[Element] = []
        """The elements of `open`, with the ids and classes that rules of style sheets may name."""
        self._sheet = Sheet()
        self._dropping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED:
            if tag not in _NO_END:
                self._dropping.append(tag)
        elif not self._dropping and (tag in _VOID or (tag in _TEXT and len(self.open) < _DEPTH)):
            element = Element.of(tag, attrs)
            style = self._sheet.style([*self._elements, element])
            attributes = [*_attributes(tag, attrs), *([("style", style)] if style else [])]
            kept = "".join(f' {name}="{escape(value)}"' for name, value in attributes)
            self.parts.append(f"<{tag}{kept}>")
            if tag in _TEXT:
                self.open.append(tag)
                self._elements.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            if tag in self._dropping:
                del self._dropping[self._dropping.index(tag) :]
        elif tag in self.open:
            while (last := self.open.pop()) != tag:
                self.parts.append(f"</{last}>")
            self.parts.append(f"</{tag}>")
            del self._elements[len(self.open) :]

    def handle_data(self, data: str) -> None:
        if not self._dropping:
            self.parts.append(escape(data))
        elif self._dropping == ["style"]:
            self._sheet.add(data)


def _attributes(tag: str, attrs: list[tuple[str, str | None]]) -> list[tuple[str, str]]:
    kept = {}
    for name, value in attrs:
        allowed = value is not None and (
            name in {"alt", "title"}
            or (name in {"colspan", "rowspan", "width", "height"} and value.isascii() and value.isdigit())
            or (tag == "a" and name == "href" and value.lower().startswith(("http://", "https://")))
            or (tag == "img" and name == "src" and _IMAGE.fullmatch(value) is not None)
        )
        if allowed and value is not None:
            kept[name] = value
    return list(kept.items())
