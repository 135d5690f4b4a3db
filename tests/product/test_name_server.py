"""Ranks begin as fast as ever where no name server answers (a VPN that is down, a closed compute node), and say so
where there is no network at all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

SILENT = """
set -e
ip link set lo up
ip link add net1 type veth peer name far1
ip link set net1 up
ip link set far1 up
ip addr add 10.71.0.2/24 dev net1
ip neigh add 10.71.0.9 lladdr 02:00:00:00:00:09 dev net1
mount --bind "$0" /etc/resolv.conf
exec "$@"
"""
"""A network in which what is sent to the name server arrives nowhere."""
NAMELESS = 'ip link set lo up && mount --bind "$0" /etc/resolv.conf && exec "$@"'
"""No network at all."""

ASKS = """%%distributed --ranks 2
import socket, threading
asking = threading.Thread(target=socket.getaddrinfo, args=("a-name.invalid", 80), daemon=True)
asking.start()
asking.join(0.5)
if asking.is_alive(): print("waits")
"""
"""A cell's own question goes to the name server as ever."""


@contextmanager
def notebook_below(below: tuple[str, ...], folder: Path) -> Iterator[Notebook]:
    """A kernel in a network of its own, with the extension loaded."""
    tried = subprocess.run((*below, "true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network can be made here: {tried.stderr}")
    with Notebook(folder, below=below, sockets=folder / "s") as book:
        book.ok("%load_ext jupyter_distrib")
        session = book.ok("from jupyter_distrib.kernel.session import session; print(session.current().identity.name)")
        yield book
    leftovers_after(session.stdout.strip())


@pytest.mark.parametrize("surroundings", [SILENT, NAMELESS], ids=["no answer", "no network"])
def test_the_first_cell_asks_no_name_server(surroundings: str, tmp_path: Path) -> None:
    """torch looks up the name of 127.0.0.1; without an answer that takes 10 s, and prints a warning."""
    servers = tmp_path / "resolv.conf"
    servers.write_text("nameserver 10.71.0.9\n")
    below = ("unshare", "--net", "--mount", "sh", "-c", surroundings, str(servers))
    with notebook_below(below, tmp_path) as book:
        book.ok("%%distributed --ranks 2\npass")  # torch is loaded
        first = book.ok(
            dedent("""\
                %%distributed --ranks 2 --strategy ddp
                import torch.distributed as dist
                import torch
                t = torch.ones(1)
                dist.all_reduce(t)
                print('sum', int(t))""")
        )
        assert "sum 2" in first.text
        assert "hostname of the client socket" not in first.text
        assert first.wall_s < 5
        if surroundings == SILENT:
            assert "waits" in book.ok(ASKS).text


def test_ranks_say_that_loopback_is_down(tmp_path: Path) -> None:
    """torch would try to connect for minutes."""
    with notebook_below(("unshare", "--net"), tmp_path) as book:
        assert (
            "the loopback interface of this machine or container is down"
            in book.fails("%%distributed --ranks 2 --strategy ddp\npass").evalue
        )
        book.ok("import subprocess; subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)")
        book.ok("%%distributed --ranks 2 --strategy ddp\npass")
