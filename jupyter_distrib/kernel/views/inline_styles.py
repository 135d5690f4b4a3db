"""The harmless part of the style sheets and styles in HTML that a rank displayed, as the style of each element: pandas
styles tables by a sheet, and a saved notebook can have none. Kernel side; pure functions.

Colours, weights and alignment stay, by name, number or keyword; nothing that loads, moves or covers anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHEET_CHARACTERS = 500_000
"""The length of all sheets of a display together; beyond it rules are left out."""
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
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_SIMPLE = re.compile(r"([a-zA-Z][\w-]*|\*)?((?:[#.][\w-]+)*)")
_PART = re.compile(r"([#.])([\w-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """The properties of an element that rules can name."""

    tag: str
    names: frozenset[str]
    """Its id and classes: `#id`, `.class`."""
    own: str = ""
    """Its style attribute."""

    @classmethod
    def of(cls, tag: str, attrs: Sequence[tuple[str, str | None]]) -> Element:
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

    def matches(self, element: Element) -> bool:
        return self.names <= element.names and self.tag in ("", "*", element.tag)


class Sheet:
    """The style sheets of one display so far."""

    def __init__(self) -> None:
        self._named: dict[str, list[_Rule]] = {}
        """The rules by a name that their element must have, or by its tag, or by `*`."""
        self._left = SHEET_CHARACTERS

    def add(self, css: str) -> None:
        self._left -= len(css)
        if self._left < 0:
            return
        for found in _RULE.finditer(_COMMENT.sub("", css)):
            if declarations := harmless(found[2]):
                for selector in found[1].split(","):
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

    def style(self, path: Sequence[Element]) -> str:
        """Return the style of the last element of a path from the top, as the value of its attribute."""
        element = path[-1]
        if not self._named:
            return _text(harmless(element.own))
        named = [rule for name in (*sorted(element.names), element.tag, "*") for rule in self._named.get(name, ())]
        rules = [rule for rule in named if rule.target.matches(element) and _descends(path[:-1], rule.ancestors)]
        declarations: dict[str, str] = {}
        for rule in sorted(rules, key=lambda rule: rule.weight):
            declarations |= rule.declarations
        return _text(declarations | harmless(element.own))


def harmless(style: str) -> dict[str, str]:
    """Return the declarations of a style that may stay."""
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


def _descends(path: Sequence[Element], ancestors: Sequence[_Simple]) -> bool:
    left = list(ancestors)
    for element in reversed(path):
        if left and left[-1].matches(element):
            left.pop()
    return not left
