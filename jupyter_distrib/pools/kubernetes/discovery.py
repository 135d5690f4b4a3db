"""Finds the contexts of the user's kubeconfig. Reads files only: neither kubectl nor a login program is started.

It is YAML, of which the standard library has no reader; only the lines of the list `contexts` are read, as kubectl
writes them, or the whole file as JSON."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.pools.discovery import Found, pool_name, text_of
from jupyter_distrib.pools.kubernetes import readers
from jupyter_distrib.system import record_file
from jupyter_distrib.system.record_file import DamagedFile

MOST = 200
_ITEM = re.compile(r"( *)- +(.*)")
_KEY = re.compile(r"""( *)(name|namespace): +("[^"]*"|'[^']*'|[^#\s][^#]*?)\s*(?:#.*)?""")


def found() -> list[Found]:
    """Return a pool for each context, if kubectl is installed."""
    if shutil.which("kubectl") is None:
        return []
    every: dict[str, Found] = {}
    for path in filter(None, (os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")).split(os.pathsep)):
        for name, namespace in contexts(text_of(path)):
            options = {"context": name} | ({"namespace": namespace} if namespace else {})
            with suppress(OptionsError):
                readers.context("context", name)
                text = f"Kubernetes: context {name}"
                one = Found(kind="kubernetes", name=pool_name(name, "kubernetes"), text=text, options=options)
                every.setdefault(name, one)
    return list(every.values())[:MOST]


def contexts(text: str) -> list[tuple[str, str]]:
    """Return the name and namespace of each context in a kubeconfig; an empty namespace if it has none."""
    if text.lstrip().startswith("{"):
        return [*_of_json(text)]
    items: list[dict[str, str]] = []
    level, inside = -1, False
    for line in text.splitlines():
        if re.match(r"[^\s#-]", line):
            inside, level = re.match(r"contexts: *(#.*)?$", line) is not None, -1
            continue
        if not inside:
            continue
        item = _ITEM.match(line)
        if item and level in (-1, len(item[1])):
            level = len(item[1])
            items.append({})
            line = " " * (level + 2) + item[2]
        match = _KEY.fullmatch(line)
        if match and items and (match[2] == "namespace" or len(match[1]) == level + 2):
            items[-1].setdefault(match[2], match[3].strip("\"'"))
    return [(item["name"], item.get("namespace", "")) for item in items if item.get("name")]


def _of_json(text: str) -> Iterator[tuple[str, str]]:
    with suppress(DamagedFile, AttributeError, TypeError, KeyError):
        for each in record_file.json_of(text)["contexts"]:
            yield str(each["name"]), str((each.get("context") or {}).get("namespace") or "")
