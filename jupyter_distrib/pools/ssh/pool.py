"""Ranks on hosts that ssh reaches, with the user's own configuration, keys, agent and known hosts.

OpenSSH 9.2: its messages are those of `sshconnect.c` and `clientloop.c`; status 255 is its own failure.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from typing import ClassVar

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import Option, not_an_option, shown
from jupyter_distrib.pools.command import command
from jupyter_distrib.pools.command.hosts_pool import HOSTS, MACHINES, SHARED, HostsPool

CONNECT_S = 10
"""Seconds to wait for a host to answer."""
_OPTIONS = (
    "-T",  # no terminal
    "-oBatchMode=yes",  # never prompts
    f"-oConnectTimeout={CONNECT_S}",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oControlMaster=no",
    "-oLogLevel=INFO",  # QUIET would hide why it fails
)
_SSH_FAILED = 255
_CLOSED = re.compile(r"^(kex|ssh)_exchange_identification: |^Connection (closed|reset) by \S+ port", re.MULTILINE)
"""The words of ssh on a server that closes a new connection, as one does that many others ask (`sshd_config(5)`,
MaxStartups)."""
_WAY_CLOSED = re.compile(r"^Connection (closed|reset) by UNKNOWN port", re.MULTILINE)
"""The words of ssh on a connection through another host or command (ProxyJump, ProxyCommand) that has ended."""
_ON_THE_WAY = re.compile(
    r"^(ssh: (?:Could not resolve hostname|connect to host) .*|channel \d+: open failed: .*"
    r"|\S+: Permission denied \(.*|No \S+ host key is known for .*|Host key for \S+ has changed .*"
    # Of the user's shell, which starts a ProxyCommand; each shell has words and an order of its own.
    r"|.*(?:[Nn]o such file or directory|not found|: [Pp]ermission denied|Unknown command).*)$",
    re.MULTILINE,
)
"""The words of such a host or command on why it has ended."""
_BAD_LINE = re.compile(r"^(?!debug)\S.* line \d+: .*$", re.MULTILINE)
"""The words of ssh on a line of its configuration."""
_NO_KEY = re.compile(r"^(?:\S+: )?Permission denied \(", re.MULTILINE)
_NOT_KNOWN = re.compile("^Host key verification failed", re.MULTILINE)


def words(name: str, text: str) -> str:
    """Read a command line; the reader of the option."""
    not_an_option(name, text)
    try:
        shlex.split(text)
    except ValueError as error:
        raise OptionsError(
            f"{name} must be a command such as 'ssh -F FILE'; {shown(text)} cannot be read ({error})"
        ) from None
    return text


class SshPool(HostsPool):
    """The pool of hosts that ssh reaches."""

    kind = "ssh"
    engine = "SSH"
    shows_its_end = True
    options: ClassVar = (
        HOSTS,
        Option(
            flag="--ssh",
            metavar="COMMAND",
            meaning="the command for ssh, with options if needed: 'ssh -F FILE'",
            read=words,
            default="ssh",
        ),
        *SHARED,
        *MACHINES,
    )

    def __init__(self, **given: str) -> None:
        super().__init__(**{"ssh": "ssh", **given})

    def check(self) -> dict[str, str]:
        if shutil.which(program := shlex.split(self.given["ssh"])[0]) is None:
            raise PoolError(f"the ssh pool needs {program}, which is not installed here: install OpenSSH's client.")
        # A new login has another agent, which the coordinator of an earlier one does not know.
        return self.given | {"agent": os.environ.get("SSH_AUTH_SOCK", "")}

    def command(self, host: str, python: Sequence[str]) -> list[str]:
        return command_line(self.given["ssh"], host, python)

    def is_turned_away(self, said: str) -> bool:
        return bool(_CLOSED.search(said)) and not _meaning("", "", said)

    def explain(self, host: str, status: int | None, said: str) -> str:
        return meaning(self.given["ssh"], self.given["python"], host, status, said)


def command_line(ssh: str, host: str, python: Sequence[str]) -> list[str]:
    """Return the command for a host; a shell there executes the words `python`, which begin with an interpreter."""
    own = [os.path.expanduser(word) for word in shlex.split(ssh)]
    return [*own, *_OPTIONS, "--", host, " ".join((quoted(python[0]), *python[1:]))]


def meaning(ssh: str, python: str, host: str, status: int | None, said: str) -> str:
    """Return a sentence on a command that did not start a Python."""
    at_hand = f"{ssh} {host}"
    if found := _meaning(host, at_hand, said) if status in (_SSH_FAILED, None) else "":
        return found
    if status == _SSH_FAILED and _CLOSED.search(said):
        return (
            f"host {host}, or one on the way to it, closes new connections{command.quoted(command.last_line(said))}: "
            "if that is because many connect at the same time, raise MaxStartups in sshd_config there; "
            f"try `{at_hand} true`."
        )
    if status == _SSH_FAILED and (bad := _BAD_LINE.findall(said)):
        return f"ssh cannot read its configuration{command.quoted(bad[-1].strip())}: correct it; try `{at_hand} true`."
    if status == _SSH_FAILED:
        return f"ssh did not reach host {host}{command.quoted(command.last_line(said))}: try `{at_hand} true`."
    return command.sentence(host, python, status, said, tried=f"{at_hand} {quoted(python)} --version", shown=at_hand)


def quoted(python: str) -> str:
    """Quote the interpreter for the remote shell, which still expands a leading `~`."""
    home, slash, rest = python.partition("/")
    return f"{home}/{shlex.quote(rest)}" if slash and re.fullmatch(r"~[\w.-]*", home) else shlex.quote(python)


def _meaning(host: str, ssh: str, said: str) -> str:
    """Return the meaning of ssh's own messages; empty for others."""
    last = command.last_line(said)
    try_it = f"try `{ssh} true`."
    if _WAY_CLOSED.search(said) and (why := _ON_THE_WAY.findall(said.replace("\r", ""))):
        return (
            f"{host} is reached through another host or command (ProxyJump, ProxyCommand), and that fails"
            f"{command.quoted(why[-1].rstrip('.'))}: correct it there, or in ~/.ssh/config; {try_it}"
        )
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        return (
            f"the host key of {host} has changed: if its owner did that, run "
            f"`ssh-keygen -R {_key_name(said) or host}` and then `{ssh} true` to accept the new one."
        )
    if _NOT_KNOWN.search(said):
        return f"the host key of {host} is not known here: run `{ssh} true` once by hand, and accept it."
    if _NO_KEY.search(said):
        return (
            f"{host} accepts none of your keys, and a pool cannot type passwords ({last}): load a key with `ssh-add`, "
            f"or install one with `ssh-copy-id {host}`; then {try_it}"
        )
    if "Could not resolve hostname" in said:
        return f"there is no host {host} ({last}): correct hosts, or add an entry for it to ~/.ssh/config; {try_it}"
    if "Connection refused" in said:
        return (
            f"no SSH server answers on {host} ({last}): start one there, or correct its port in ~/.ssh/config; {try_it}"
        )
    if any(word in said for word in ("timed out", "No route to host", "Network is unreachable")):
        return f"host {host} does not answer ({last}): start it, or correct its address; {try_it}"
    return ""


def _key_name(said: str) -> str:
    """Return the name of the known host that ssh suggests removing."""
    match = re.search(r'ssh-keygen -f "[^"]*" -R "([^"]+)"', said)
    return match[1] if match else ""
