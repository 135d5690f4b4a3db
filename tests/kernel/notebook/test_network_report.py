"""What the doctor says of the network between the nodes of a pool."""

from __future__ import annotations

import re
import secrets
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.kernel.notebook import doctor
from jupyter_distrib.worker import network_check
from tests.notebook import Notebook
from tests.settings_files import write_trusted


def way(**found: object) -> doctor.Finding:
    return doctor._way("lab", {"node": 0, "to": 1, **found})


def test_a_fast_network_is_a_line() -> None:
    finding = way(latency_s=40e-6, bytes_per_s=1.25e9)
    assert (finding.text, finding.advice) == ("lab, node 0 to 1: 40 µs, 10.0 Gbit/s", "")


@pytest.mark.parametrize(("latency_s", "bytes_per_s", "seconds"), [(40e-6, 100e6, 8), (5e-3, 1.25e9, 1)])
def test_a_slow_network_is_warned_of(latency_s: float, bytes_per_s: float, seconds: int) -> None:
    finding = way(latency_s=latency_s, bytes_per_s=bytes_per_s)
    assert "too slow for training: averaging the gradients of 100 million parameters takes about" in finding.advice
    assert f"about {seconds} s in each step" in finding.advice


def test_a_node_that_cannot_be_reached_is_named() -> None:
    finding = way(error="10.0.0.7 cannot be reached (timed out)")
    assert finding.text == "lab, node 0 to 1: 10.0.0.7 cannot be reached (timed out)"
    assert finding.advice.startswith("let the nodes reach one another on all ports")


@pytest.mark.slow
def test_the_doctor_measures_between_the_nodes_of_a_pool(tmp_path: Path) -> None:
    """Two nodes that are both this machine, behind loopback."""
    write_trusted(
        tmp_path,
        f"""
[pools.lab]
kind = "command"
hosts = "a,b"
start = "env HOST={{host}} {{python}}"
python = "{sys.executable}"
interface = "lo"
nodes = 2
""",
    )
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_pool use lab")
        book.ok("%%distributed --ranks 4 --keep kept\nkept = rank")
        before = book.ok("from jupyter_distrib.kernel.session import session\nlen(session.current().history)").result
        report = book.ok("%distributed_status --doctor").result
        ways = re.findall(r"network +lab, node (\d) to (\d): (\d+) µs, ([\d.]+) Gbit/s", report)
        assert [(one, other) for one, other, _, _ in ways] == [("0", "1"), ("1", "0")], report
        assert all(float(speed) > 0 for *_, speed in ways)
        assert book.ok("kept[3]").result == "3"
        assert book.ok("len(session.current().history)").result == before
        began = dedent("""\
            %%distributed --ranks 4 --detach --out run
            import os
            while not os.path.exists('go'):
                pass""")
        book.ok(began)
        assert "of lab is not measured: its ranks are busy" in book.ok("%distributed_status --doctor").result
        (tmp_path / "go").touch()
        book.ok("run.result()")
        assert book.ok("%%distributed --ranks 4\nrank").result.endswith("rank 3: 3")


def test_a_node_answers_only_who_knows_its_token() -> None:
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=network_check._answer, args=(server, token))
        answering.start()
        for said in (b"", b"x" * 32, token[:-1].encode() + b"x"):
            # It may be closed before all is said.
            with suppress(OSError), socket.create_connection(server.getsockname(), 20) as stranger:
                stranger.sendall(said + b"p")
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        latency_s, per_s = network_check._measure(*server.getsockname(), token)
        assert min(latency_s, per_s) > 0
        answering.join(20)
