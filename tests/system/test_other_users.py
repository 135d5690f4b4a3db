"""Who else may write to a file."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from jupyter_distrib.system import other_users

OWNER, USER, GROUP, MASK, OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20


def give(path: Path, uid: int) -> None:
    """Let one more user write to a file, as `setfacl -m u:UID:rw` does (linux/posix_acl_xattr.h)."""
    nobody = 0xFFFFFFFF
    entries = ((OWNER, 6, nobody), (USER, 6, uid), (GROUP, 4, nobody), (MASK, 6, nobody), (OTHERS, 4, nobody))
    try:
        os.setxattr(
            path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries)
        )
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no access lists")


@pytest.mark.parametrize(("mode", "who"), [(0o600, ""), (0o644, ""), (0o666, "every user")])
def test_the_mode_tells(tmp_path: Path, mode: int, who: str) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    assert other_users.writers(str(path)) == who


def test_an_access_list_in_a_private_group_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_users, "is_private_group", lambda gid: True)
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    assert other_users.writers(str(path)) == ""
    give(path, 12345)
    with path.open() as file:
        assert other_users.writers(str(path)) == other_users.writers(file.fileno()) == "users of its access list"
    path.chmod(0o644)  # takes the right to write from the list as well
    assert other_users.writers(str(path)) == ""
