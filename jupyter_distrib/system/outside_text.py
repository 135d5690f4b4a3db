"""Cleans texts chosen by other processes and users, such as the name of a process or job, so that they cannot add
lines, terminal codes or right-to-left text where they are shown. On any side; standard library only."""

from __future__ import annotations

import pwd
import threading
from contextlib import suppress

SHOWN_CHARACTERS = 200
NAME_S = 0.2
"""Seconds to wait for the name of a user, which may come from a server of the site."""
_names: dict[int, str] = {}
_asked: set[int] = set()
"""The users whose name is being looked up; it is not requested again before there is an answer."""


def shown(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """Return a text as part of one line: unprintable characters become spaces, and a long text is cut."""
    start = text[: 4 * characters]
    plain = "".join(each if each.isprintable() else " " for each in start)
    words = " ".join(plain.split())
    return words if len(words) <= characters and len(start) == len(text) else f"{words[: characters - 1]}…"


def user_name(uid: int) -> str:
    """Return the login name of a user, or the number if there is no name or it does not come soon."""
    if uid not in _names and uid not in _asked:
        _asked.add(uid)
        asking = threading.Thread(target=_ask, args=(uid,), name="jupyter_distrib-user", daemon=True)
        asking.start()
        asking.join(NAME_S)
    return _names.get(uid, str(uid))


def _ask(uid: int) -> None:
    try:
        with suppress(KeyError, OverflowError, OSError, ValueError):
            _names[uid] = shown(pwd.getpwuid(uid).pw_name, 40)
    finally:
        _asked.discard(uid)


def owner_of(pid: int) -> int | None:
    """Return the user of a process; None if it has ended. The owner of its folder in /proc is root for a process that
    has only asked not to be traced (proc_pid(5)), so it is not looked at."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"Uid:")), None)
    return None


def program_of(pid: int) -> str:
    """Return the name of a process's program; empty if it has ended. A process may choose any name."""
    with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
        return shown(file.read().decode(errors="replace"), 40)
    return ""
