"""The folders of this user's sockets and logs. Each directory that this module makes has mode 0700 and is checked to
belong to this user. One that the user has made and chosen keeps its mode."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import other_users, process_environment, record_file
from jupyter_distrib.system.record_file import DamagedFile

UNFINISHED_S = 60.0
"""Seconds after which an unfinished file counts as abandoned."""
_UNFINISHED = ".unfinished"
LOG_VARIABLE = "JUPYTER_DISTRIB_LOG_DIR"
VARIABLES = ("JUPYTER_DISTRIB_RUNTIME_DIR", LOG_VARIABLE)
"""The variables by which a user chooses these folders."""
SOCKET_PATH_LIMIT = 107
"""Maximum length of a socket's path: `sun_path` holds 108 bytes with its end (unix(7))."""


def runtime_directory() -> Path:
    """Return the folder for sockets, locks and leases; gone after a reboot. `JUPYTER_DISTRIB_RUNTIME_DIR` overrides it.

    Everybody knows the name of the usual folder, so anybody may have made it first. Then another folder beside it is
    returned, whose name is kept in the folder for state, so that all processes of this user find the same one.

    Raises:
        PoolError: There is none for this user alone.
    """
    if (chosen := _chosen("JUPYTER_DISTRIB_RUNTIME_DIR")) is not None:
        return private(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and len(os.fsencode(base)) < 60 and _is_ours(base):
        return private(Path(base) / "jupyter_distrib")
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) >= 40:
        folder = "/tmp"  # noqa: S108 - what is made in it is private
    usual = Path(folder) / f"jupyter_distrib-{os.getuid()}"
    if (alternative := _kept_alternative(usual)) is not None:
        return alternative
    try:
        return private(usual)
    except PoolError:
        return _new_alternative(usual)


def absolute(folder: str) -> str:
    """Return a folder that a variable names as a path that other processes understand: they have other working
    folders. A relative one stays where it is at its first use, although the notebook may change its own folder."""
    path = os.path.expanduser(folder)
    return os.path.abspath(path) if os.path.isabs(path) else _at_first_use(path)


@cache
def _at_first_use(relative: str) -> str:
    return os.path.abspath(relative)


def _chosen(variable: str) -> Path | None:
    """Return the folder that the user has chosen by a variable, or the one inside it that is used; None without one.
    Raises `PoolError` for one that other users write to, since they could replace what is in it."""
    if not (text := os.environ.get(variable)):
        return None
    folder = Path(absolute(text))
    try:
        info = folder.lstat()
    except OSError:
        return folder
    if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
        return folder  # which is refused
    inside = folder / f"jupyter_distrib-{os.getuid()}"
    if others := other_users.writers(str(folder)):
        raise PoolError(
            f"{folder} can be written by {others}: set {variable} to a folder of your own, such as {inside}."
        )
    is_open = stat.S_IMODE(info.st_mode) & 0o077
    return inside if is_open or inside.is_dir() else folder  # agents may be in it since the folder was open


def _is_ours(folder: str) -> bool:
    """Return whether a folder belongs to this user, who alone can write to it: environment variables may be left over
    from another user, or name a folder for all users."""
    try:
        own = os.stat(folder).st_uid == os.getuid() and os.access(folder, os.W_OK)
        return own and not other_users.writers(folder)
    except OSError:
        return False


def _kept_alternative(usual: Path) -> Path | None:
    """Return the folder that was made beside the usual one; None if there is none, as after a reboot."""
    with suppress(OSError, PoolError, DamagedFile):
        name = record_file.text_of(_name_file(usual), 100)
        if re.fullmatch(rf"{re.escape(usual.name)}-[0-9a-f]{{8}}", name):
            folder = usual.with_name(name)
            return private(folder) if folder.is_dir() else None
    return None


def _name_file(usual: Path) -> Path:
    """Return the file with the name of the folder beside this one; containers with other user ids, and jobs with a
    TMPDIR of their own, may have the same folder for state."""
    return state_directory() / f"runtime_folder-{zlib.crc32(str(usual).encode()):08x}"


def _new_alternative(usual: Path) -> Path:
    """Make a folder beside the usual one, with an unpredictable name; only one, however many processes ask."""
    try:
        with opened(state_directory() / "runtime_folder.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (kept := _kept_alternative(usual)) is not None:
                return kept
            folder = private(usual.with_name(f"{usual.name}-{os.urandom(4).hex()}"))
            write_whole(_name_file(usual), folder.name)
            return folder
    except OSError as error:
        raise PoolError(
            f"{usual} belongs to another user, and the name of another folder cannot be kept in {error.filename} "
            f"({error.strerror}): set JUPYTER_DISTRIB_RUNTIME_DIR to a folder of your own."
        ) from error


def log_directory(otherwise: Path | None = None) -> Path:
    """Return the folder for the ranks' logs: the usual one or, where that cannot be made, a folder in `otherwise`, by
    default the folder of sockets, since a run matters more than the place of its log."""
    try:
        return usual_log_directory()
    except PoolError:
        return private((otherwise or runtime_directory()) / "runs")


def usual_log_directory() -> Path:
    """Return the folder for logs that are kept from one kernel to the next; `JUPYTER_DISTRIB_LOG_DIR` overrides it.
    Raises `PoolError` if it cannot be made."""
    if (chosen := _chosen(LOG_VARIABLE)) is not None:
        return private(chosen, LOG_VARIABLE)
    return private(state_directory() / "runs")


def reason_against_logs() -> str:
    """Return a sentence on the folder for logs that the user has chosen and that cannot be used; else empty. Makes
    nothing, since the settings are looked at without a run, too."""
    try:
        if (folder := _chosen(LOG_VARIABLE)) is not None:
            _check_place(folder, LOG_VARIABLE)
    except PoolError as error:
        return f"Logs are not written to {LOG_VARIABLE}: {error}"
    return ""


def state_directory() -> Path:
    """Return the folder for state kept from one kernel to the next. Raises `PoolError` if it cannot be made."""
    return private(Path(state_base(), "jupyter_distrib"), "XDG_STATE_HOME")


def state_base() -> str:
    """Return the folder in which programs keep their state; it need not exist."""
    variables = process_environment.present()
    return variables.get("XDG_STATE_HOME") or os.path.join(home(variables), ".local", "state")


def home(variables: Mapping[str, str] | None = None) -> str:
    """Return this user's home folder; `/`, as in a container, if neither `HOME` nor an account names one."""
    folder = (os.environ if variables is None else variables).get("HOME", "").rstrip("/") or os.path.expanduser("~")
    return folder if os.path.isabs(folder) else "/"


def opened(path: Path, *, emptied: bool = True) -> BinaryIO:
    """Open a file in a private folder, for this user alone, and empty it. Anything else in its place that is not a
    file of this user is moved away. Raises `OSError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o600)
    except OSError:  # as for a link or a folder
        clear(path)
        file = os.open(path, flags, 0o600)
    info = os.fstat(file)
    if not _is_own(info, stat.S_IFREG):
        os.close(file)
        clear(path)
        file = os.open(path, flags, 0o600)
    elif emptied and info.st_size:
        os.ftruncate(file, 0)
    return os.fdopen(file, "wb")


def _is_own(info: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(info.st_mode) == kind and info.st_uid == os.getuid()


def clear(path: Path, kind: int = stat.S_IFREG) -> None:
    """Clear a path in a private folder unless it holds a file of this user and kind: other files are removed, and a
    folder is renamed, because it may not be empty. Raises `OSError`.

    Args:
        path: The place of the file.
        kind: The kind of file that stays, as of `stat.S_IFMT`.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if _is_own(info, kind):
        return
    if stat.S_ISDIR(info.st_mode):
        path.rename(path.with_name(f"{path.name}.in_the_way-{os.urandom(4).hex()}"))
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, tidy: bool = True) -> None:
    """Write a file in a private folder atomically: it is complete or absent even if the process is killed. With
    `tidy`, unfinished files of killed processes in that folder are removed."""
    if tidy:
        remove_unfinished(path.parent)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with opened(unfinished) as file:
            file.write(text.encode())
        try:
            unfinished.replace(path)
        except OSError:  # a folder is in its place
            clear(path)
            unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of `write_whole` that killed processes have left in this folder."""
    for left in folder.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > UNFINISHED_S:
                left.unlink()


def inode(path: Path) -> int:
    """Return the number of a file; 0 if there is none."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0


def make_private(directory: Path) -> None:
    """Make a folder and the missing ones above it, whatever the umask is: whoever could write into `~/.local` could put
    modules there. Raises `OSError`."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def private(directory: Path, variable: str = "JUPYTER_DISTRIB_RUNTIME_DIR") -> Path:
    """Make the directory for this user alone. Raises `PoolError` if that is impossible, or if it is a link or belongs
    to somebody else; `variable` is the one by which the user can choose another folder."""
    try:
        info = directory.lstat()
    except OSError:
        try:
            make_private(directory)
            info = directory.lstat()
        except OSError as error:
            raise _not_made(directory, str(error.strerror), variable) from error
    _check(directory, info, variable)
    if stat.S_IMODE(info.st_mode) & 0o077:
        directory.chmod(0o700)
    return directory


def _check_place(directory: Path, variable: str) -> None:
    """Raise `PoolError` if `private` would, as far as that can be known without making the directory."""
    try:
        _check(directory, directory.lstat(), variable)
    except FileNotFoundError:
        above = next(each for each in directory.parents if os.path.lexists(each))
        if not os.access(above, os.W_OK | os.X_OK):
            raise _not_made(directory, f"{above} cannot be written to", variable) from None
    except OSError as error:
        raise _not_made(directory, str(error.strerror), variable) from error


def _check(directory: Path, info: os.stat_result, variable: str) -> None:
    if stat.S_ISREG(info.st_mode):
        raise PoolError(f"the folder {directory} cannot be made: it is a file. Set {variable} to another folder.")
    if not _is_own(info, stat.S_IFDIR):
        raise PoolError(
            f"{directory} is a link or belongs to another user; remove it, or set {variable} to another folder."
        )


def _not_made(directory: Path, reason: str, variable: str) -> PoolError:
    return PoolError(f"the folder {directory} cannot be made: {reason}. Set {variable} to another one.")
