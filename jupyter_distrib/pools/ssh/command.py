"""The command line of ssh for a host, and what ssh's own messages mean. Pure.

OpenSSH 9.2: messages are those of `sshconnect.c` and `clientloop.c`; status 255 is ssh's own failure."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from jupyter_distrib.pools.command import bootstrap, command

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """ssh to each host; see `HostCommand`."""

    ssh: str
    python: str
    engine: str = "SSH"
    kind: str = "ssh"

    def words(self, host: str) -> list[str]:
        return [*self._ssh(), *_OPTIONS, "--", host, " ".join((quoted(self.python), *bootstrap.WORDS))]

    def _ssh(self) -> list[str]:
        return [os.path.expanduser(word) for word in shlex.split(self.ssh)]

    def failure(self, host: str, status: int | None, said: str) -> str:
        at_hand = f"{self.ssh} {host}"
        if found := _meaning(host, at_hand, said) if status in (_OWN_FAILURE, None) else "":
            return found
        if status == _OWN_FAILURE:
            return f"ssh did not reach host {host} ({command.last_line(said)}): try `{at_hand} true`."
        tried = f"{at_hand} {quoted(self.python)} --version"
        return command.sentence(host, self.python, status, said, tried=tried, shown=at_hand)


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
