"""Determines which other users may write to a file or folder, and their names. On any side."""

from __future__ import annotations

import os
import stat
from functools import lru_cache

_ACCESS_LIST = "system.posix_acl_access"


def login(uid: int) -> str:
    """Return the login name of a user, or `user 12345` if there is no name for it."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def writers(file: int | str) -> str:
    """Describe which users other than the owner may write to a file or folder (open, or at a path); empty if none.
    Raises `OSError`."""
    info = os.stat(file)
    if info.st_mode & stat.S_IWOTH:
        return "every user"
    if info.st_mode & stat.S_IWGRP and not is_private_group(info.st_gid):
        return "other users of its group"
    # The bits of the group are the most that a list of single users gives (acl(5)).
    if info.st_mode & stat.S_IWGRP and _has_access_list(file):
        return "users of its access list"
    return ""


def _has_access_list(file: int | str) -> bool:
    try:
        return _ACCESS_LIST in os.listxattr(file)
    except (AttributeError, OSError):  # not Linux, or a file system without attributes
        return False


@lru_cache(maxsize=8)
def is_private_group(gid: int) -> bool:
    """Return whether a group has no other member: many systems give each user a group with the user's name. Root's
    group has no other member if this user is not in it; containers put all their users into it."""
    import grp
    import pwd

    try:
        if gid == 0:
            is_in_it = os.getuid() != 0 and gid in (os.getegid(), *os.getgroups())
            return not is_in_it and set(grp.getgrgid(gid).gr_mem) <= {"root"}
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
