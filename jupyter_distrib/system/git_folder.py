"""Asks git about the folder of a notebook, and runs no program that this folder names.

The folder may have been downloaded, with its `.git`; and a repository may hold another one in a subfolder. Their
configuration names programs that git runs while it only looks: a monitor of files, hooks, filters, transports.
Kernel side, in an observer's thread; in the coordinator, when it scans the notebook's files.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

GIT_S = 2.0
"""Timeout for git in seconds: the folder may be large."""
_HARMLESS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "safe.bareRepository": "explicit",
}
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_TERMINAL_PROMPT": "0",
}
"""Variables that keep git from fetching missing objects and from writing; either could run a hook."""
_FILTER = "filter."
_STARTING = r"^(filter\.|lfs\.extension\.|annex\..*command$)"
"""The settings by which a filter starts a program."""
_OF_FILTERS = {"clean": "", "process": "", "required": "false"}


def state(folder: str) -> dict[str, str]:
    """Return commit and branch of the git repository around this folder, and whether its files have changed; empty
    outside a repository, or if git takes too long."""
    try:
        commit = _git(folder, _HARMLESS, "rev-parse", "HEAD")
        branch = _git(folder, _HARMLESS, "rev-parse", "--abbrev-ref", "HEAD")
        # Files of submodules are not looked at: for these git starts another git, which does not have the settings.
        changed = _git(folder, _HARMLESS | _no_filters(folder), "status", "--porcelain", "--ignore-submodules=dirty")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "branch": branch, "changed": str(bool(changed)).lower()}


def ignored_folders(folder: str) -> frozenset[str]:
    """Return the paths of the folders in this one that git ignores as a whole; none outside a repository, or if git
    takes too long."""
    try:
        listed = _git(folder, _HARMLESS, "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    names = (name[:-1] for name in listed.split("\0") if name.endswith("/"))
    return frozenset(
        os.path.join(folder, name) for name in names if name != "."
    )  # as it names an ignored folder itself


def _no_filters(folder: str) -> dict[str, str]:
    """Return settings that disable the filters of the repository's own configuration; git pipes changed files through
    them. Those of this user as well, if that configuration names programs that Git LFS or git-annex start there."""
    try:
        listed = _git(folder, _HARMLESS, "config", "--show-scope", "--null", "--name-only", "--get-regexp", _STARTING)
    except subprocess.CalledProcessError:  # there are none
        return {}
    words = listed.split("\0")
    keys = [*zip(words[::2], words[1::2], strict=False)]
    own = {key for scope, key in keys if scope not in ("system", "global")}
    if not all(key.startswith(_FILTER) for key in own):
        own = {key for _, key in keys}
    names = {key.rpartition(".")[0] for key in own if key.startswith(_FILTER)}
    return {f"{each}.{name}": value for each in names for name, value in _OF_FILTERS.items()}


def _git(folder: str, settings: Mapping[str, str], *arguments: str) -> str:
    """Return git's output. Settings in the environment override those in files."""
    given = {"GIT_CONFIG_COUNT": str(len(settings))}
    for place, (key, value) in enumerate(settings.items()):
        given |= {f"GIT_CONFIG_KEY_{place}": key, f"GIT_CONFIG_VALUE_{place}": value}
    done = subprocess.run(
        ["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=GIT_S,
        errors="surrogateescape", stdin=subprocess.DEVNULL, env={**os.environ, **_ENVIRONMENT, **given},
    )  # fmt: skip
    return done.stdout.strip()
