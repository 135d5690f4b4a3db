"""The folders of agents that relays start on nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from jupyter_distrib.coordinator import node_agent
from tests.notebook import ROOT


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_a_stranger_has_put_beside_it_is_neither_removed_nor_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    mine, left, link = (Path(f"jupyter_distrib-x-{name}") for name in ("0", "1", "2"))
    for folder in (mine, left):
        folder.mkdir()
    (left / node_agent.SOCKET).symlink_to("gone")
    link.symlink_to(left)
    os.chown(left, 12345, 12345)
    node_agent.sweep(mine)
    assert sorted(Path().iterdir()) == [mine, left, link]


@pytest.mark.parametrize("owner", [12345, os.getuid()])
def test_a_socket_at_which_nobody_is_served_holds_nothing_up(tmp_path: Path, owner: int) -> None:
    if owner != os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    with tempfile.TemporaryDirectory(prefix="jd", dir="/tmp") as folder, ExitStack() as waiting:
        busy = Path(folder) / "jupyter_distrib-x-1"
        busy.mkdir()
        listener = waiting.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(busy / node_agent.SOCKET))
        listener.listen(0)
        for _ in range(2):  # the queue has room for one more than its length
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(str(busy / node_agent.SOCKET))
        os.chown(busy, owner, -1)
        code = "import sys; from pathlib import Path; from jupyter_distrib.coordinator import node_agent\n"
        code += "node_agent.sweep(Path(sys.argv[1]))"
        mine = f"{folder}/jupyter_distrib-x-0"
        subprocess.run([sys.executable, "-c", code, mine], cwd=ROOT, check=True, timeout=20)
        assert busy.exists()
