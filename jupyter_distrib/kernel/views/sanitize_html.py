"""The harmless part of HTML displayed by a rank. Kernel side; pure functions.

The result is written anew from the parsed HTML: only tags and attributes of the lists below, every text escaped, every
tag closed. So it can be put in the middle of other markup, in a trusted notebook or in an untrusted one.

pandas styles tables by a style sheet, and a saved notebook can have none: the rules become the style of each element.
Colours, weights and alignment stay, by name, number or keyword; nothing that loads, moves or covers anything.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser

_SHEET_CHARACTERS = 500_000
"""Maximum length of all style sheets of a display together; rules beyond it are left out."""
_OPEN_CHARACTERS = 2000
"""Maximum length of a tag or comment at the end that is not closed, which Python's parser looks through repeatedly."""
_COLOUR = r"#[0-9a-fA-F]{3,8}|[a-zA-Z]{3,30}|(?:rgb|hsl)a?\([\d\s.,%/]{1,40}\)"
_ALLOWED = {
    "color": _COLOUR,
    "background-color": _COLOUR,
    "background": _COLOUR,
    "font-weight": r"bold|bolder|lighter|normal|[1-9]00",
    "font-style": "italic|oblique|normal",
    "text-align": "left|right|center|justify",
    "text-decoration": "underline|line-through|none",
}
_BRACE = re.compile(r"([{}])")
_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
_SIMPLE = re.compile(r"([a-zA-Z][\w-]*|\*)?((?:[#.][\w-]+)*)")
_PART = re.compile(r"([#.])([\w-]+)")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    """The properties of an element that rules can name."""

    tag: str
    names: frozenset[str]
    """Its id and classes: `#id`, `.class`."""
    own: str = ""
    """Its style attribute."""

    @classmethod
    def of(cls, tag: str, attrs: Sequence[tuple[str, str | None]]) -> _Element:
        given = {name: value or "" for name, value in attrs}
        names = {f".{name}" for name in given.get("class", "").split()}
        return cls(
            tag=tag,
            names=frozenset(names | {f"#{given['id']}"} if "id" in given else names),
            own=given.get("style", ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    ancestors: tuple[_Simple, ...]
    target: _Simple
    declarations: Mapping[str, str]
    weight: tuple[int, int]
    """The specificity of its selector: the numbers of ids and of classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simple:
    tag: str
    names: frozenset[str]

    def matches(self, element: _Element) -> bool:
        return self.names <= element.names and self.tag in ("", "*", element.tag)


class _Sheet:
    """The style sheets of one display so far."""

    def __init__(self) -> None:
        self._named: dict[str, list[_Rule]] = {}
        """The rules, by an id or class that their element must have, or by its tag, or by `*`."""
        self._left = _SHEET_CHARACTERS

    def add(self, css: str) -> None:
        self._left -= len(css)
        if self._left < 0:
            return
        for selectors, style in _rules(_COMMENT.sub("", css)):
            if declarations := _harmless(style):
                for selector in selectors.split(","):
                    self._add(selector.split(), declarations)

    def _add(self, selector: Sequence[str], declarations: Mapping[str, str]) -> None:
        parts = [_simple(part) for part in selector]
        if not parts or not all(parts):
            return  # a state such as :hover, or a relation other than descent
        *ancestors, target = [part for part in parts if part]
        names = [name for part in parts if part for name in part.names]
        ids = sum(name.startswith("#") for name in names)
        rule = _Rule(
            ancestors=tuple(ancestors), target=target, declarations=declarations, weight=(ids, len(names) - ids)
        )
        self._named.setdefault(min(target.names, default=target.tag or "*"), []).append(rule)

    def style(self, path: Sequence[_Element]) -> str:
        """Return the style of the last element of a path from the top, as the value of its attribute."""
        element = path[-1]
        if not self._named:
            return _text(_harmless(element.own))
        named = [rule for name in (*sorted(element.names), element.tag, "*") for rule in self._named.get(name, ())]
        rules = [rule for rule in named if rule.target.matches(element) and _descends(path[:-1], rule.ancestors)]
        declarations: dict[str, str] = {}
        for rule in sorted(rules, key=lambda rule: rule.weight):
            declarations |= rule.declarations
        return _text(declarations | _harmless(element.own))


def _rules(css: str) -> Iterator[tuple[str, str]]:
    """Yield the selectors and the style of each rule, in one pass; not those within `@media` and its like, which hold
    on some screens only, or on paper."""
    pieces = _BRACE.split(css)
    opened: list[str] = []
    for text, brace in zip(pieces[::2], pieces[1::2], strict=False):
        if brace == "{":
            opened.append(text.rpartition(";")[2].strip())
        elif opened:
            selectors = opened.pop()
            if not opened:
                yield selectors, text


def _harmless(style: str) -> dict[str, str]:
    """Return the permitted declarations of a style."""
    kept: dict[str, str] = {}
    for declaration in style.split(";"):
        name, _, value = declaration.partition(":")
        name, value = name.strip().lower(), value.replace("!important", "").strip()
        if name in _ALLOWED and re.fullmatch(_ALLOWED[name], value):
            kept["background-color" if name == "background" else name] = value
    return kept


def _text(declarations: Mapping[str, str]) -> str:
    return ";".join(f"{name}:{value}" for name, value in declarations.items())


def _simple(text: str) -> _Simple | None:
    found = _SIMPLE.fullmatch(text)
    if found is None:
        return None
    return _Simple(tag=(found[1] or "").lower(), names=frozenset("".join(part) for part in _PART.findall(found[2])))


def _descends(path: Sequence[_Element], ancestors: Sequence[_Simple]) -> bool:
    left = list(ancestors)
    for element in reversed(path):
        if left and left[-1].matches(element):
            left.pop()
    return not left


def is_base64(content: str) -> bool:
    return _BASE64.fullmatch(content) is not None


def safe(html: str, most_s: float) -> str:
    """Return the harmless part of `html`: structure, text and embedded images.

    Args:
        html: What a rank displays; it may be anything.
        most_s: Seconds of the processor after which the rest is left out, and a sentence says so.
    """
    parser = _Parser(time.thread_time() + most_s)
    why = ""
    try:
        parser.feed(html)
        if "<" in parser.rawdata and len(parser.rawdata) > _OPEN_CHARACTERS:
            why = "it has a tag or comment that is not closed"
        else:
            parser.close()
    except _TooSlow:
        why = "it takes too long to check"
    except (AssertionError, ValueError):  # of Python's parser: `<![x[`, or a character's number with 5,000 digits
        why = "it cannot be parsed"
    closing = "".join(f"</{tag}>" for tag in reversed(parser.open))
    return "".join([*parser.parts, closing, f"<p>The rest of this display is left out: {why}.</p>" if why else ""])


class _TooSlow(Exception):
    """Raised when the time is over."""


class _Parser(HTMLParser):
    def __init__(self, until_s: float) -> None:
        super().__init__(convert_charrefs=True)
        self._until_s = until_s
        self.parts: list[str] = []
        self.open: list[str] = []
        self._elements: list[_Element] = []
        """The elements of `open`, with the ids and classes that rules of style sheets may name."""
        self._sheet = _Sheet()
        self._dropping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._check_time()
        if tag in _DROPPED:
            if tag not in _NO_END:
                self._dropping.append(tag)
        elif not self._dropping and (tag in _VOID or (tag in _TEXT and len(self.open) < _DEPTH)):
            element = _Element.of(tag, attrs)
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
        self._check_time()
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
        elif self._dropping in (["style"], ["head", "style"]):
            self._sheet.add(data)

    def _check_time(self) -> None:
        if time.thread_time() > self._until_s:
            raise _TooSlow


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
