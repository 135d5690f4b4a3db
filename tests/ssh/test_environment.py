"""What hosts lack of the packages of a notebook that has an environment of its own: `environment = check | sync`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.ssh.bed import Bed
from tests.ssh.conftest import name_it
from tests.wheels import environment, install, wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CELL = """\
%%distributed --environment {}
import socket, tinypkg
(socket.gethostname(), tinypkg.version)"""


def test_each_host_gets_what_it_lacks_or_its_ranks_are_refused_with_the_list(bed: Bed, tmp_path: Path) -> None:
    _, packages = environment(tmp_path / "env")
    install(wheel(tmp_path, "tinypkg", "1.2"), packages)
    there = bed.folder / "python"  # hosts share the home of this machine, so each has a cache of its own
    there.write_text(f'#!/bin/sh\nXDG_CACHE_HOME={bed.folder}/cache-$(hostname) exec {sys.executable} "$@"\n')
    there.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    name_it(bed, folder, python=str(there), ranks=2)
    with Notebook(folder, python=str(tmp_path / "env" / "bin" / "python")) as book:
        book.ok("%load_ext jupyter_distrib")
        refused = book.cell(CELL.format("check"), timeout_s=100).text
        assert "notebook has: tinypkg 1.2." in refused, refused
        outcome = book.ok(CELL.format("sync"))
        assert outcome.result == "rank 0: ('host1', '1.2')\nrank 1: ('host2', '1.2')", outcome.text
        assert "being installed: tinypkg 1.2" in outcome.text
    for host in bed.hosts:
        assert list(bed.folder.glob(f"cache-{host.name}/jupyter_distrib/packages/*/tinypkg.py"))
