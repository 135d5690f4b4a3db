"""The program that brings this package to a Python on another machine, through the standard input of a command.

    here -- one line --> `python -I -m code` which prints a mark: everything before it is a banner
    here -- archive ---> ... writes it to a folder of its own, and becomes `piped_relay`

`-I -m code` makes Python read its program line by line from a pipe. It is the only way without a space, quote or
bracket on the command line, so that the words mean the same whether they are executed as they are (docker, srun) or
go through another shell (ssh); `-I` keeps Python from importing a `code.py` of the user. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

WORDS = ("-I", "-m", "code")
"""Arguments of the interpreter that runs `line`."""
OLDEST = (3, 11)
_SIZE_DIGITS = 16

# Runs on any Python from 3.4 on, so that a Python that is too old is recognized; leaves nothing behind if it fails.
_PROGRAM = r"""
import os, shutil, sys, tempfile

def read(count):
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

def put():
    size = int(read(@DIGITS@))
    package = read(size)
    os.umask(0o077)
    folder = tempfile.mkdtemp(prefix="jupyter_distrib-@KIND@-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
    try:
        with open(folder + "/source.zip", "wb") as file:
            file.write(package)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder

def become(folder):
    ends = os.dup(0), os.dup(1)
    for fd in ends:
        os.set_inheritable(fd, True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.chdir("/")
    os.environ.pop("PYTHONHOME", None)  # that of another Python: this one has started without it
    os.execv(sys.executable, [sys.executable, "-c", @RUN@, folder] + [str(fd) for fd in ends])

try:
    os.write(1, ("\0:@MARK@ %d.%d\n" % sys.version_info[:2]).encode())
    become(put())
except BaseException as error:
    os.write(2, ("\n%s\n" % error).encode())
    os._exit(1)
"""

_RUN = """
import os, shutil, sys

sys.path.insert(0, sys.argv[1] + "/source.zip")
try:
    import @MODULE@ as relay
except BaseException as error:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    path = os.environ.get("PYTHONPATH", "")
    said = "@DOES_NOT_RUN@%s: %s%s" % (type(error).__name__, error, path and "; PYTHONPATH is " + path)
    os.write(2, ("\\n%s\\n" % " ".join(said.split())).encode("utf-8", "replace"))
    os._exit(1)
relay.main(*sys.argv[1:])
"""
DOES_NOT_RUN = "jupyter_distrib cannot be imported: "
"""The beginning of the line with the reason why the Python that runs the program cannot go on."""


def line(mark: str, kind: str, module: str) -> bytes:
    """Return the line that starts the program.

    Args:
        mark: Random letters and digits, which `found` looks for.
        kind: The kind of pool, for the name of the folder.
        module: The module whose `main` goes on.
    """
    run = _filled(_RUN, {"MODULE": module, "DOES_NOT_RUN": DOES_NOT_RUN})
    return filled(_PROGRAM, {"MARK": mark, "KIND": kind, "RUN": repr(run), "DIGITS": str(_SIZE_DIGITS)})


def filled(program: str, values: Mapping[str, str]) -> bytes:
    """Return the line that runs a program, with values in place of their names between two `@`."""
    return f"exec({_filled(program, values)!r})\n".encode()


def _filled(program: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], program)


def found(mark: str, heard: bytes) -> tuple[int, int] | None:
    """Return the version of the Python that runs the program, once its mark has arrived; else None."""
    match = re.search(rb"\0:" + mark.encode() + rb" (\d+)\.(\d+)\n", heard)
    return (int(match[1]), int(match[2])) if match else None


def packed(archive: bytes) -> bytes:
    """Return the package as the program reads it."""
    return b"%0*d" % (_SIZE_DIGITS, len(archive)) + archive
