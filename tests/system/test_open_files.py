"""What a process that may open no more files says, and that it can still say and do it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from jupyter_distrib.checkpoints.folder import refused_by_system
from jupyter_distrib.pools.inline.cell_interrupts import _with_contexts
from jupyter_distrib.system import open_files
from jupyter_distrib.wire.descriptors import Descriptors
from tests.notebook import ROOT


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def raised_during(error: BaseException, other: BaseException) -> BaseException:
    error.__context__ = other
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "/dev/null"),
        OSError(errno.ENFILE, "Too many open files in system"),
        RuntimeError("unable to open shared memory object </torch_1>: Too many open files (24)"),
        RuntimeError("Failed to init uv loop"),
        RuntimeError("uv_accept failed: EMFILE"),
        raised_during(ImportError("no such module"), OSError(errno.EMFILE, "")),
        caused(ImportError("no such module"), OSError(errno.EMFILE, "")),
    ],
)
def test_an_error_by_the_limit_is_reported_with_what_to_do(error: BaseException) -> None:
    assert "the limit is " in open_files.advice_on(error)
    assert "(ulimit -n). Raise it with `ulimit -n 4096`" in open_files.reason(error)


def test_errors_that_caused_one_another_come_to_an_end() -> None:
    error, other = ValueError("one"), ValueError("other")
    assert open_files.advice_on(caused(error, caused(other, error))) == ""


def test_without_a_limit_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert open_files.has_room(1_000_000)


def test_what_has_not_arrived_is_not_closed() -> None:
    read_fd, write_fd = os.pipe()
    descriptors = Descriptors([open_files.LOST, write_fd])
    assert not descriptors.complete
    descriptors.close()
    with os.fdopen(read_fd, "rb") as file:
        assert file.read() == b"", "the other one is closed"


class Undecided(ImportError):
    def __bool__(self) -> bool:
        raise ValueError


def test_an_error_whose_truth_cannot_be_asked_is_a_cause_like_others() -> None:
    limit = OSError(errno.EMFILE, "")
    for error in (
        caused(ValueError(), caused(Undecided(), limit)),
        raised_during(ValueError(), caused(Undecided(), limit)),
    ):
        assert "the limit is " in open_files.advice_on(error)
        assert refused_by_system(error) is limit
    assert list(_with_contexts(caused(ValueError(), raised_during(Undecided(), limit))))[-1] is limit


class Strange(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "Too many open files"), ValueError("24"), Strange()])
def test_other_errors_are_not(error: BaseException) -> None:
    assert open_files.advice_on(error) == ""
    if not isinstance(error, Strange):
        assert open_files.reason(error) == str(error)
        assert open_files.typed_reason(error) == f"{type(error).__name__}: {error}"


FULL = """
import os, resource, socket
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.errors import PayloadError
from jupyter_distrib.system import open_files, process
from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import Forget
open_files.advice()
ours, theirs = (Link(each) for each in socket.socketpair())
waiting, peer = socket.socketpair()
inodes = frozenset([os.fstat(waiting.fileno()).st_ino])
null = os.open(os.devnull, os.O_RDONLY)
assert open_files.has_room(10)
for number in range(3):
    ours.send(Forget(group=str(number), keys=()), [null] * number)
free = os.dup(null)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
found = []
while len(found) < 3:
    found += [(message.group, fds) for message, fds in [theirs.receive()]]
assert found == [("0", []), ("1", [free]), ("2", [-1, -1])], found
assert not open_files.has_room(1)
try:
    shared_memory.read(found[2][1][0], [10])
except PayloadError as error:
    assert f"Too many open files: the limit is {free + 1} for each process" in str(error), error
else:
    raise SystemExit("no error")
ours.post(b"".join([__import__("jupyter_distrib.wire.link").wire.link.encode(Forget(group="3", keys=()), 1)]), [null])
os.close(free)
assert theirs.receive()[1] == [free]
process.shut_sockets(inodes)
assert peer.recv(1) == b"", "still connected"
theirs.close()
"""


def test_a_process_that_is_full_notices_lost_descriptors_sends_its_own_and_shuts_sockets() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
