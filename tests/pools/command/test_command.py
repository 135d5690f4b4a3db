"""The command lines for hosts, and what is made of the words of commands that fail."""

from __future__ import annotations

import re

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.pools.command import bootstrap
from jupyter_distrib.pools.command.pool import CommandPool, template
from jupyter_distrib.pools.ssh.pool import SshPool
from tests.notebook import ROOT

PROGRAM = bootstrap.line("mark", "ssh", "module").decode()
DOCKER = CommandPool(start="docker exec -i {host} {python}", python="/env/bin/python")


def test_the_interpreter_and_its_words_take_the_place_of_python() -> None:
    assert DOCKER.words("box") == ["docker", "exec", "-i", "box", "/env/bin/python", "-I", "-m", "code"]


def test_within_a_longer_word_they_are_one_text() -> None:
    gcloud = CommandPool(start='gcloud compute ssh {host} --command="{python}"', python="python3")
    assert gcloud.words("vm") == ["gcloud", "compute", "ssh", "vm", "--command=python3 -I -m code"]


@pytest.mark.parametrize("start", ["docker exec -i box {python}", "ssh {host}"])
def test_a_template_without_its_places_is_refused(start: str) -> None:
    with pytest.raises(OptionsError, match="start must be a command with"):
        template("start", start)


def test_the_commands_that_the_page_shows_are_taken() -> None:
    page = (ROOT / "docs" / "ssh.md").read_text()
    shown = [
        text
        for text in re.findall(r'`([^`\n]+)`|^start = "(.+)"$', page, re.MULTILINE)
        for text in text
        if "{python}" in text
    ]
    commands = [text for text in shown if "{host}" in text]
    assert {text.split()[0] for text in commands} >= {"docker", "kubectl", "ssh", "gcloud"}
    for text in commands:
        words = CommandPool(start=template("start", text), python="/p/python").words("box")
        assert "box" in words
        assert words[-1].endswith(" -m code") or words[-4:] == ["/p/python", *bootstrap.WORDS]


def test_ssh_asks_nothing_and_the_shell_there_expands_the_home() -> None:
    words = SshPool(ssh="ssh -F 'my file'", python="~/my env/bin/python").words("me@a")
    assert words[:3] == ["ssh", "-F", "my file"]
    assert {"-T", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oRemoteCommand=none", "-oControlMaster=no"} < {
        *words
    }
    assert words[-3:] == ["--", "me@a", "~/'my env/bin/python' -I -m code"]


@pytest.mark.parametrize(
    ("said", "is_turned_away"),
    [
        ("kex_exchange_identification: Connection closed by remote host\r\n", True),
        ("kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.9 port 22\r\n", True),
        ("me@jump: Permission denied (publickey).\r\nConnection closed by UNKNOWN port 65535\r\n", False),
        ("bash: line 1: /x/py: No such file or directory\n", False),
    ],
)  # fmt: skip
def test_a_server_that_too_many_ask_is_told_apart_from_one_that_refuses(said: str, is_turned_away: bool) -> None:
    assert SshPool(ssh="ssh").is_turned_away(said) is is_turned_away


def test_the_c_shell_names_the_home_of_an_interpreter_that_it_does_not_find() -> None:
    said = SshPool(ssh="ssh", python="~/env/py").failure("a", 1, "/home/me/env/py: Command not found.\n")
    assert said.startswith("there is no Python at ~/env/py on host a: "), said


CHANGED = """
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Offending ED25519 key in /h/known_hosts:1
  remove with:
  ssh-keygen -f "/h/known_hosts" -R "[127.0.0.2]:2022"
Host key verification failed.
"""


CLOSED_ON_THE_WAY = (
    "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535\r\n"
)


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (255, CHANGED, r"host key of a has changed.*`ssh-keygen -R \[127.0.0.2\]:2022` and then `ssh a true`"),
        (255, "No ED25519 host key is known for a.\r\nHost key verification failed.\r\n", "not known here.*`ssh a true`"),
        (255, "me@a: Permission denied (publickey,password).\r\n", r"none of your keys.*\(me@a: Perm.*`ssh-copy-id a`"),
        (255, "ssh: Could not resolve hostname a: Name or service not known\r\n", "there is no host a .*correct hosts"),
        (255, "ssh: connect to host 10.0.0.9 port 22: Connection refused\r\n", "no SSH server answers on a .*start one"),
        (255, "ssh: connect to host a port 22: Connection timed out\r\n", "host a does not answer"),
        (255, "kex_exchange_identification: Connection closed by remote host\r\n", r"closes new .*\(kex_.*MaxStartups"),
        *[
            (255, f"{shell}\n{CLOSED_ON_THE_WAY}", rf"a is reached through another.*\({re.escape(shell)}")
            for shell in (
                "/bin/bash: line 1: /x: No such file or directory",
                "/bin/bash: line 1: /x: Permission denied",
                "/bin/sh: 1: exec: /x: not found",
                "zsh:1: no such file or directory: /x",
                "fish: Unknown command: /x",
                "/x: Command not found",
            )
        ],
        (127, "bash: line 1: /x/py: No such file or directory\n", "there is no Python at /x/py on host a.*--version"),
        (126, "bash: line 1: /x/py: Permission denied\n", "there is no Python at /x/py on host a"),
        (1, "\n[Errno 28] No space left on device\n", "no space left on host a"),
        (1, "\n[Errno 122] Disk quota exceeded: '/tmp/x'\n", r"no space left on host a .*\(Disk quota exceeded\)"),
        (2, "unknown option -I\nusage: ...\n", r"ended with status 2 .*\(usage"),
        (1, "/x/py: Command not found.\n", "there is no Python at /x/py on host a"),
        (None, "Welcome\n", r"no Python answered on host a in time \(Welcome\): try `ssh a /x/py --version`"),
        (None, f"you said {PROGRAM}(InteractiveConsole)\n", r"Python has started on host a, .* must not read or ask"),
        (2, f"bash: line 1: `{PROGRAM}'\n", "a shell on host a read what was meant for Python"),
        (255, "", "ssh did not reach host a: try `ssh a true`"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_one_sentence_with_a_command_to_try(status: int | None, said: str, told: str) -> None:
    sentence = SshPool(ssh="ssh", python="/x/py").failure("a", status, said)
    assert re.search(told, sentence), sentence
    assert "\n" not in sentence


def test_a_command_that_fails_is_quoted_with_its_last_words() -> None:
    said = "Error response from daemon: No such container: box\n"
    assert DOCKER.failure("box", 1, said) == (
        "`docker exec -i box /env/bin/python` ended with status 1 before a Python answered (Error response from daemon: "
        "No such container: box): try `docker exec -i box /env/bin/python --version`."
    )
