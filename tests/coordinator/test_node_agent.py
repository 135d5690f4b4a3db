"""The folders of agents that relays start on nodes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jupyter_distrib.coordinator import node_agent


def test_what_a_killed_agent_left_on_a_node_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has 107 bytes
    mine, living, killed, starting = (Path(f"jupyter_distrib-x-{name}") for name in ("0", "1", "2", "3"))
    with_living, with_gone = Path("jupyter_distrib-x-5"), Path("jupyter_distrib-x-6")
    bound, stranger = Path("jupyter_distrib-x-4"), Path("else-killed")
    for folder in (mine, living, killed, starting, bound, stranger, with_living, with_gone):
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(living / node_agent.SOCKET))
        listener.listen()
        for folder in (killed, bound, stranger):
            with socket.socket(socket.AF_UNIX) as silent:
                silent.bind(str(folder / node_agent.SOCKET))
        for folder in (killed, stranger):
            os.utime(folder / node_agent.SOCKET, (0, 0))
        (with_living / node_agent.SOCKET).symlink_to((living / node_agent.SOCKET).absolute())
        (with_gone / node_agent.SOCKET).symlink_to("gone")
        node_agent.sweep(mine)
    assert sorted(Path().iterdir()) == sorted([mine, living, starting, bound, stranger, with_living])
