"""Messages for a process that may open no more files, sockets or pipes. Any process, also one that can open none."""

from __future__ import annotations

import errno
import os
import resource

from jupyter_distrib.errors import PoolError

ERRORS = (errno.EMFILE, errno.ENFILE)
LOST = -1
"""Placeholder for a descriptor that came with a message when this process could open no more."""
_CAUSES = 10


def advice() -> str:
    """Return one sentence on the limit of this process and what to do about it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"Too many open files: the limit is {limit} for each process (ulimit -n). Raise it with `ulimit -n 4096` "
        "before the notebook server starts, or open fewer files at once."
    )


def has_room(count: int) -> bool:
    """Return whether this process may open this many more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return True
    try:
        return len(os.listdir("/dev/fd")) + count <= limit
    except OSError:  # there is not even room for one more
        return False


def advice_on(error: BaseException) -> str:
    """Return the sentence of `advice` if the limit caused an error, even inside C code or another error; else ""."""
    return advice() if any(_is_of_limit(each) for each in _chain(error)) else ""


def reason(error: BaseException) -> str:
    """Return why something failed, for use in a sentence: the limit, or the error's text."""
    return advice_on(error).rstrip(".") or str(error)


def typed_reason(error: BaseException) -> str:
    """Return the same with the type of any other error, for unexpected errors."""
    return advice_on(error).rstrip(".") or f"{type(error).__name__}: {error}"


def raise_if_full(error: OSError) -> None:
    """Raise a `PoolError` with the sentence in place of an error that the limit has caused."""
    if limit := advice_on(error):
        raise PoolError(limit) from error


def error() -> OSError:
    """Return the error that the system would raise, for descriptors that were lost on their way into this process."""
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and len(found) < _CAUSES:
        found.append(error)
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return found


def _is_of_limit(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in ERRORS
    try:  # torch, gloo and libuv raise what C's strerror or libuv's own names say
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's own __str__
        return False
    return os.strerror(errno.EMFILE).lower() in text.lower() or "EMFILE" in text or "Failed to init uv loop" in text
