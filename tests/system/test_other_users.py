"""Who else may write to a file."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_distrib.system import other_users
from tests.notebook import ROOT

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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(
    ("gid", "groups", "who"), [(0, [], "other users of its group"), (1, [0], "other users of its group"), (1, [], "")]
)
def test_roots_group_is_private_unless_a_user_is_in_it(tmp_path: Path, gid: int, groups: list[int], who: str) -> None:
    """Containers of OpenShift and `docker run --user 1000` put other users into it."""
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    assert other_users.writers(str(path)) == ""
    program = (
        "import grp, os, pwd, sys; from jupyter_distrib.system import other_users\n"
        f"file = os.open(sys.argv[1], 0); os.setgroups({groups}); os.setgid({gid}); os.setuid(12345)\n"
        "print(other_users.writers(file))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == who


def test_roots_group_with_a_member_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("root", "x", 0, ["root", "somebody"])))
    other_users.is_private_group.cache_clear()
    try:
        assert not other_users.is_private_group(0)
    finally:
        other_users.is_private_group.cache_clear()
