"""One owner of file descriptors, which closes those that nobody took."""

from __future__ import annotations

import os

import pytest

from jupyter_distrib.system import open_files
from jupyter_distrib.wire.descriptors import Descriptors


def opened() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_what_nobody_took_is_closed_once() -> None:
    fd = opened()
    with Descriptors([fd]) as owned:
        assert list(owned) == [fd]
    assert not is_open(fd)
    again = opened()  # the same number, of somebody else
    assert again == fd
    owned.close()
    assert is_open(again)
    os.close(again)


def test_what_was_taken_is_the_takers() -> None:
    fd = opened()
    with Descriptors([fd]) as owned:
        assert owned.take() == (fd,)
        assert not owned
    assert is_open(fd)
    os.close(fd)


def test_the_only_one_may_be_taken_if_there_is_one() -> None:
    fd = opened()
    with Descriptors([fd]) as owned:
        assert owned.take_one() == fd
        assert owned.take_one() is None
    assert is_open(fd)
    os.close(fd)


def test_duplicates_are_its_own() -> None:
    fd = opened()
    with Descriptors.duplicates([fd, fd]) as owned:
        assert len({fd, *owned}) == 3
    assert is_open(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("other", "says"), [(1 << 20, "Bad file descriptor"), (open_files.LOST, "Too many open files")]
)
def test_duplicates_of_which_one_cannot_be_made_are_all_closed(other: int, says: str) -> None:
    fd = opened()
    probe = opened()
    os.close(probe)
    with pytest.raises(OSError, match=says):
        Descriptors.duplicates([fd, other])
    assert not is_open(probe), "the first duplicate is closed"
    os.close(fd)


def test_they_are_closed_when_an_exception_passes() -> None:
    fd = opened()
    with pytest.raises(ValueError, match="no"), Descriptors([fd]):
        raise ValueError("no")
    assert not is_open(fd)
