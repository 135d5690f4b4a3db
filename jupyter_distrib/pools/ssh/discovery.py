"""Finds the hosts that the user's own configuration of ssh names (`ssh_config(5)`). Reads files only."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.pools.command.hosts import read_hosts
from jupyter_distrib.pools.discovery import Found, pool_name, text_of

DEEPEST = 16
"""The depth to which files may include one another; ssh has the same limit."""
MOST_FILES = 100
MOST_HOSTS = 500
_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*\S)")


def found() -> list[Found]:
    """Return each host of `~/.ssh/config` and the files that it includes, without patterns and servers of git."""
    hosts: dict[str, str] = {}
    of_git: set[str] = set()
    now: list[str] = []
    for path, key, words in _lines(os.path.expanduser("~/.ssh/config"), 0, [MOST_FILES]):
        if key in ("host", "match"):
            now = [word for word in words if key == "host" and _is_host(word)]
            hosts |= {host: path for host in now if host not in hosts and len(hosts) < MOST_HOSTS}
        elif key == "user" and words == ["git"]:
            of_git.update(now)
    return [
        Found(kind="ssh", name=pool_name(host, "ssh"), text=f"ssh: {host} ({_short(path)})", options={"hosts": host})
        for host, path in hosts.items()
        if host not in of_git
    ]


def _is_host(word: str) -> bool:
    if not re.fullmatch(r"[\w.:@+\[\]-]+", word):  # patterns, and names that only ssh understands
        return False
    try:
        (host,) = read_hosts("hosts", word)
    except (OptionsError, ValueError):
        return False
    return host.name == word


def _lines(path: str, depth: int, left: list[int]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield file, keyword and words of each line, those of included files in their places."""
    left[0] -= 1
    if depth > DEEPEST or left[0] < 0:
        return
    for line in text_of(path).splitlines():
        match = _LINE.match(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        key, words = match[1].lower(), _words(match[2])
        if key != "include":
            yield path, key, words
            continue
        for word in words:
            wanted = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(word))
            for each in sorted(glob.glob(wanted)):
                yield from _lines(each, depth + 1, left)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that is never closed
        return []


def _short(path: str) -> str:
    home = os.path.expanduser("~") + "/"
    return f"~/{path.removeprefix(home)}" if path.startswith(home) else path
