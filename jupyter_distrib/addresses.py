"""Removes the secrets in addresses before these are shown, logged or saved. On any side; standard library only.

An address is shown without user names, passwords, queries, fragments and parameters. If it breaks the rules of RFC
3986, as with an `@` or `/` in a password, too much rather than too little is left out: `...` takes its place.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LEFT_OUT = "..."
ADDRESS_CHARACTERS = 1000
TEXT_CHARACTERS = 20_000
# The patterns are compiled when the first one is needed: every import of the package loads this module.
_SCHEME = r"(?:[A-Za-z][\w+.-]{0,40}:){0,6}//"
_END = r"[/?#;\\]"
_REST = r"[?#;]"
_HOST = r"(?:\[[\w.:%]+\]|[\w.%-]*)(?::\d*)?"
_HOSTS = rf"{_HOST}(?:,{_HOST})*"
_ENCODED_AT = r"(?i)%(?:25)*40"
_IN_TEXT = (
    rf"{_SCHEME}[^\s<>\"`]*[^\s<>\"`'.,:!?)\]}}]"
    r"|[^\s:/@'\"<>`=(]{0,100}:(?!\d+,)[^\s@'\"<>`]{1,300}@[\w.\[-][^\s<>\"'`]{0,300}"
)
"""An address within a sentence, without the punctuation around it; or `user:password@host`."""
_NAMED = (
    r"(?i)([\w.-]{0,40}(?:passw|passphrase|pwd|secret|token|credential|signature|\bsig|(?:api|access|account|auth)[_-]?key)"
    r"[\w.-]{0,40}(?:[\"']?\s?=\s?|[\"']\s?:\s?|:(?![\s/])))(\"[^\"]*\"|'[^']*'|(?!\.\.\.)[^\s;&,\"'<>)}\]]+)"
)
"""`password=hunter2`, and its like."""
_NAME = (
    r"(?:.*_)?(?:password|passwd|passphrase|pwd|secret|token|credentials?|"
    r"(?:api|access|account|auth|private|secret)_?key)"
)
"""The name of a variable with a secret, in lower case with underscores: not `tokenizer` or `max_tokens`."""
_BEARER = r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"
_LEAST, _LEAST_ALONE = 6, 8
"""Minimum length of a secret that is searched for in a text, and of one that may be a mere user name: shorter ones
occur inside words."""


def shown(address: str) -> str:
    """Return an address without its secrets. Anything else, such as a path, a word or `host:port`, is returned
    unchanged."""
    text = "".join(each if each.isprintable() else " " for each in str(address)[:ADDRESS_CHARACTERS])
    if scheme := re.match(_SCHEME, text):
        return scheme.group() + _without_user(text[scheme.end() :])
    if text.startswith(("/", "./", "../", "~")):
        return _without_values(text)
    before, at, host = text.rpartition("@")
    if at and (re.search(_REST, before) or re.search(_NAMED, host)):
        return LEFT_OUT
    return _without_values(re.split(_REST, host)[0])


def without_secrets(text: str) -> str:
    """Return a text, such as a library's message, without the secrets of the addresses in it, and without the passwords
    of addresses in the environment, in any spelling."""
    if text.isalnum() and len(text) < _LEAST:
        return text  # most options are such words
    text = text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]}{LEFT_OUT}"
    for secret in _secrets_of(tuple([value for value in os.environ.values() if "://" in value])):
        text = text.replace(secret, LEFT_OUT)
    return _without_values(re.sub(_IN_TEXT, lambda found: shown(found.group()), text))


def without_secret(name: str, value: object) -> object:
    """Return the value of an argument, or a placeholder if it is a string whose name says that it is a secret."""
    words = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # as in dbToken
    return LEFT_OUT if isinstance(value, str) and value and re.fullmatch(_NAME, words) else value


def line_without_secrets(words: Sequence[str]) -> str:
    """Return a command line as a text without secrets: `--db-password ...` for `--db-password hunter2`."""
    shown = [*words[:1]]
    for option, word in pairwise(words):
        name = option.lstrip("-").replace("-", "_") if option.startswith("-") else ""
        shown.append(str(without_secret(name, word)))
    return without_secrets(" ".join(shown))


def _without_values(text: str) -> str:
    return re.sub(_BEARER, rf"\1 {LEFT_OUT}", re.sub(_NAMED, rf"\1{LEFT_OUT}", text))


def _without_user(rest: str) -> str:
    """Return the part after `scheme://`, without its secrets."""
    authority, path = _split(rest)
    if "@" in path and (":" in authority or "@" in authority or "." not in authority):
        # Either it belongs to the path, or authority and path are parts of a password.
        before, _, after = rest.rpartition("@")
        authority, path = _split(after)
        if re.search(_REST, before) or not _is_host(authority):
            return LEFT_OUT
        return f"{LEFT_OUT}@{authority}{re.split(_REST, path)[0]}"
    host = authority.rpartition("@")[2]
    return host + re.split(_REST, path)[0] if _is_host(host) else LEFT_OUT


def _is_host(text: str) -> bool:
    return re.fullmatch(_HOSTS, text) is not None and re.search(_ENCODED_AT, text) is None


def _split(rest: str) -> tuple[str, str]:
    """Return the host, with a user, and the rest."""
    found = re.search(_END, rest)
    return (rest, "") if found is None else (rest[: found.start()], rest[found.start() :])


@lru_cache(maxsize=1)
def _secrets_of(addresses: tuple[str, ...]) -> list[str]:
    """Return the secrets in these addresses, the longest first: one may be a part of another."""
    return sorted({secret for address in addresses for secret in _secrets(address)}, key=len, reverse=True)


def _secrets(address: str) -> set[str]:
    """Return the secrets in an address: its password in all spellings, and secret values of its query."""
    from urllib.parse import unquote

    scheme = re.match(_SCHEME, address)
    before, at, _ = address[scheme.end() if scheme else 0 :].rpartition("@")
    user, colon, password = before.partition(":")
    found = {password if colon else user if len(user) >= _LEAST_ALONE else ""} if at else set()
    found |= {value.strip("\"'") for _, value in re.findall(_NAMED, address)}
    return {each for text in found for each in (text, unquote(text)) if len(each) >= _LEAST}
