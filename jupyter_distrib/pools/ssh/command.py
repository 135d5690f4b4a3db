"""The command line of ssh for a host, and what ssh's own messages mean. Pure.

OpenSSH 9.2: messages are those of `sshconnect.c` and `clientloop.c`; status 255 is ssh's own failure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from jupyter_distrib.pools.command import command

CONNECT_S = 10
"""Seconds in which a host has to answer."""
_OPTIONS = (
    "-T",  # no terminal
    "-oBatchMode=yes",  # asks nothing
    f"-oConnectTimeout={CONNECT_S}",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oControlMaster=no",
)
_OWN_FAILURE = 255


def words(ssh: str, host: str, python: Sequence[str]) -> list[str]:
    """Return the command for a host; `python` is what a shell executes there, an interpreter first."""
    own = [os.path.expanduser(word) for word in shlex.split(ssh)]
    return [*own, *_OPTIONS, "--", host, " ".join((quoted(python[0]), *python[1:]))]


def meaning(ssh: str, python: str, host: str, status: int | None, said: str) -> str:
    """Return a sentence on a command that gave no Python."""
    at_hand = f"{ssh} {host}"
    if found := _meaning(host, at_hand, said) if status in (_OWN_FAILURE, None) else "":
        return found
    if status == _OWN_FAILURE:
        return f"ssh did not reach host {host} ({command.last_line(said)}): try `{at_hand} true`."
    return command.sentence(host, python, status, said, tried=f"{at_hand} {quoted(python)} --version", shown=at_hand)


def quoted(python: str) -> str:
    """Quote the interpreter for the shell there, which still expands a `~` in front."""
    home, slash, rest = python.partition("/")
    return f"{home}/{shlex.quote(rest)}" if slash and re.fullmatch(r"~[\w.-]*", home) else shlex.quote(python)


def _meaning(host: str, ssh: str, said: str) -> str:
    """Return what ssh's messages mean; empty for others."""
    last = command.last_line(said)
    try_it = f"try `{ssh} true`."
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        return (
            f"the host key of {host} is not the one that was known: if its owner has changed it, run "
            f"`ssh-keygen -R {_key_name(said) or host}` and then `{ssh} true` to accept the new one."
        )
    if "Host key verification failed" in said:
        return f"the host key of {host} is not known here: run `{ssh} true` once by hand, and accept it."
    if "Permission denied" in said:
        return (
            f"{host} takes none of your keys, and a pool cannot type passwords ({last}): load a key with `ssh-add`, or "
            f"install one with `ssh-copy-id {host}`; then {try_it}"
        )
    if "Could not resolve hostname" in said:
        return f"there is no host {host} ({last}): correct hosts, or give it an entry in ~/.ssh/config; {try_it}"
    if "Connection refused" in said:
        return (
            f"no SSH server answers on {host} ({last}): start one there, or correct its port in ~/.ssh/config; {try_it}"
        )
    if any(word in said for word in ("timed out", "No route to host", "Network is unreachable")):
        return f"host {host} does not answer ({last}): start it, or correct its address; {try_it}"
    return ""


def _key_name(said: str) -> str:
    """Return the name of the known host that ssh suggests to remove."""
    match = re.search(r'ssh-keygen -f "[^"]*" -R "([^"]+)"', said)
    return match[1] if match else ""
