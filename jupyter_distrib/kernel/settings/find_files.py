"""The search for the files with settings, the user's and the project's, and the files of projects that the user trusts.
Kernel side; the search is repeated for every cell.

Trusted files are remembered by path and content in the user's own folder, so that the user is asked once about each
content.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.system import paths, record_file
from jupyter_distrib.system.formatting import printable
from jupyter_distrib.system.other_users import writers
from jupyter_distrib.system.record_file import DamagedFile

LARGEST_BYTES = 1_000_000
"""The size of the largest file that is read."""
LOOK_ROUND_S = 5.0
"""Seconds until a new repository or owner is noticed; a new file with pools is noticed at once."""
PROJECT_FILE = "jupyter_distrib.toml"
VARIABLES = ("JUPYTER_DISTRIB_POOL", "JUPYTER_DISTRIB_STRATEGY")


class File(NamedTuple):
    """The state of one file."""

    path: str
    changed: tuple[int, int]
    """Its number and the time of its last change, which nobody sets, other than that of its content."""
    size: int
    of_project: bool
    """Whether the file belongs to the notebook's project rather than to the user's home."""


class FilesState(NamedTuple):
    """The present state of the files and of the environment."""

    folder: str
    files: tuple[File, ...]
    ignored: tuple[str, ...]
    """A sentence on each file that exists but is not read."""
    environment: tuple[str | None, ...]
    trusted: tuple[int, int, int] | None
    """A key for the user's trust; None if it does not matter here."""


def state(home: str, variables: Mapping[str, str], *, directory: str | None = None) -> FilesState:
    """Return a key for `config_files.load`, whose result is the same for equal keys. Raises `OptionsError`.

    Args:
        home: The user's home folder.
        variables: The environment.
        directory: The folder of the notebook; None for the present one.
    """
    try:
        folder = directory or present_folder()
        path = user_file(home, variables)
        user = _file(path, of_project=False)
        reason = "" if user is None else reason_against_users(path, variables)
        project, ignored = _project_file(folder, home)
        if variables.get(paths.LOG_VARIABLE) and (text := paths.reason_against_logs()):
            ignored = (*ignored, printable(text))
    except OSError as error:  # the folder is gone, or a file is being replaced
        raise OptionsError(f"the settings files cannot be searched for: {error}") from None
    return FilesState(
        folder=folder,
        files=tuple(filter(None, (None if reason else user, project))),
        ignored=(*((printable(f"{path} is not read, since {reason}."),) if reason else ()), *ignored),
        environment=tuple(map(variables.get, VARIABLES)),
        trusted=None if project is None else trust_state(),
    )


def present_folder() -> str:
    """Return the folder of the notebook. Raises `OptionsError` if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise OptionsError(
            "the notebook's working folder was deleted or moved: change to one that exists (%cd)"
        ) from None


def user_file(home: str = "", variables: Mapping[str, str] | None = None) -> str:
    """Return the path of the user's file with pools, which need not exist; `home` is looked up if it is empty. Raises
    `OptionsError`."""
    variables = os.environ if variables is None else variables
    chosen = variables.get("JUPYTER_DISTRIB_CONFIG")
    if not chosen:
        base = variables.get("XDG_CONFIG_HOME") or os.path.join(home or paths.home(), ".config")
        return os.path.join(base, "jupyter_distrib", "pools.toml")
    path = os.path.expanduser(chosen)
    if not os.path.isfile(path):
        raise OptionsError(f"JUPYTER_DISTRIB_CONFIG names {path}, and there is no such file")
    return path


def reason_against_users(path: str, variables: Mapping[str, str] | None = None) -> str:
    """Return the reason why the user's file is not read; empty without one. Its pools run commands as this user, and
    XDG_CONFIG_HOME may be left over from another user, as after `su`. JUPYTER_DISTRIB_CONFIG is a choice."""
    if (os.environ if variables is None else variables).get("JUPYTER_DISTRIB_CONFIG"):
        return ""
    try:
        info, others = os.stat(path), writers(path)
    except OSError:  # there is none
        return ""
    if info.st_uid not in (0, os.getuid()):
        return "it belongs to another user: if you want its pools, set JUPYTER_DISTRIB_CONFIG to it"
    return f"it can be written by {others}: chmod go-w it" if others else ""


def _project_file(directory: str, home: str) -> tuple[File | None, tuple[str, ...]]:
    """Return the nearest file of the project; or None, with a sentence, if others may have written that file."""
    for path in _project_files(directory, home, int(time.monotonic() / LOOK_ROUND_S)):
        if not os.path.lexists(path):
            continue
        if reason := _reason_against(path):
            return None, (printable(f"{path} is not read, since {reason}."),)
        return _file(path, of_project=True), ()
    return None, ()


def project_file() -> tuple[str, str]:
    """Return the path of the project's file, which need not exist, and the reason why it is not, or would not be, read;
    an empty reason without one. Raises `OptionsError`, `OSError`."""
    folder = present_folder()
    for path in _project_files(folder, paths.home(), int(time.monotonic() / LOOK_ROUND_S)):
        if os.path.lexists(path):
            return path, _reason_against(path)
    reason = _writable_by_others(folder)
    return os.path.join(folder, PROJECT_FILE), f"its folder {reason}" if reason else ""


def _reason_against(path: str) -> str:
    """Return the reason why a project's file is not read; empty without one."""
    kind = os.lstat(path)
    if stat.S_ISLNK(kind.st_mode):
        return "it is a link: put the file itself there"
    if not stat.S_ISREG(kind.st_mode):
        return "it is not a regular file"
    for each in (path, os.path.dirname(path)):
        if reason := _writable_by_others(each):
            return f"{'it' if each == path else 'its folder'} {reason}"
    return f"it is larger than {LARGEST_BYTES / 1e6:.0f} MB" if kind.st_size > LARGEST_BYTES else ""


def _file(path: str, *, of_project: bool) -> File | None:
    try:
        info = os.stat(path)
    except OSError:  # also for a file that cannot be reached
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    return File(path=path, changed=(info.st_ino, info.st_ctime_ns), size=info.st_size, of_project=of_project)


@lru_cache(maxsize=2)
def _project_files(directory: str, home: str, when: int) -> tuple[str, ...]:
    """Return the possible paths of the project's file: in the notebook's folder and its parents, up to the top of the
    repository or the home folder. The search ends with a folder that others may write to, such as /tmp. `when` only
    makes cached results expire."""
    paths, folder = [os.path.join(directory, PROJECT_FILE)], directory
    while True:
        is_top = folder == home or os.path.exists(os.path.join(folder, ".git"))
        parent = os.path.dirname(folder)
        if is_top or parent == folder:
            return tuple(paths)
        folder = parent
        paths.append(os.path.join(folder, PROJECT_FILE))
        if _writable_by_others(folder):  # the search ends here: a file in it is reported, not read
            return tuple(paths)


def _writable_by_others(path: str) -> str:
    """Return the reason why other users may write a file or folder; empty if they may not."""
    info = os.stat(path)
    if info.st_uid != os.getuid():
        return "belongs to another user"
    is_own = not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"can be written by {who}" if not is_own and (who := writers(path)) else ""


def is_trusted(path: str, digest: str) -> bool:
    """Return whether the user has trusted this content of the file."""
    return _read().get(path) == digest


def trust(path: str, digest: str) -> None:
    """Remember this content of the file as trusted, in place of an earlier content. Raises `OSError`, `PoolError`."""
    paths.write_whole(_path(), json.dumps({**_read(), path: digest}, indent=1))


def trust_state() -> tuple[int, int, int] | None:
    """Return a key for the present trust, which differs after a change."""
    with suppress(OSError, PoolError):
        info = os.lstat(_path())
        return info.st_ino, info.st_mtime_ns, info.st_size
    return None


def _path() -> Path:
    return paths.state_directory() / "trusted_files.json"


def _read() -> dict[str, str]:
    """Return the digests by path; empty if the file is damaged, so that the user is asked again."""
    with suppress(OSError, PoolError, DamagedFile):
        content = record_file.json_of(record_file.text_of(_path()))
        if isinstance(content, dict):
            return {path: digest for path, digest in content.items() if isinstance(digest, str)}
    return {}
