"""A notebook on two hosts: what a user does there, and what is said when something of it stops or dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.pools.ssh.pool import SshPool
from jupyter_distrib.testing import PoolClient
from tests.notebook import Notebook
from tests.processes import wait_until
from tests.product import crash_cases, restart_cases
from tests.ssh.bed import Bed, Host
from tests.ssh.conftest import name_it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

GOOD = """\
%%distributed --strategy ddp
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
int(t)"""
HANGS = """\
%%distributed --strategy ddp
import time, torch.distributed as dist
print('in', rank, flush=True)
dist.barrier()
print('all in', flush=True)
time.sleep(100)"""


@pytest.fixture
def book(kernel: Notebook) -> Iterator[Notebook]:
    assert_good(kernel)
    yield kernel
    kernel.forget()


def assert_good(book: Notebook, ranks: str = "ranks 0-3: 4") -> None:
    outcome = book.cell(GOOD, timeout_s=60)
    assert outcome.result == ranks, outcome.text


def test_ranks_are_on_both_hosts_and_meet(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed
            import socket
            (rank, local_rank, socket.gethostname())""")
    )
    assert "rank 1: (1, 1, 'host1')" in outcome.result, outcome.result
    assert "rank 2: (2, 0, 'host2')" in outcome.result, outcome.result
    status = book.ok("%distributed_status").result
    assert "SSH to host1, host2" in status, status
    assert "next rank: at once, on the CPU" in status, status
    assert re.search(r"^host1 +\d+ +[\d.]+ GB +none +0-1 ", status, re.MULTILINE), status
    assert re.search(r"next rank +at once, on the CPU", book.ok("%distributed_status --doctor").result)


def test_a_host_is_reached_through_another_one_as_ssh_is_told(bed: Bed) -> None:
    client = PoolClient(SshPool(**{**bed.options, "hosts": "host1", "ssh": f"ssh -F {bed.config} -J host2"}))
    try:
        assert client.run(client.group(1), "import socket\nsocket.gethostname()").values == {0: "host1"}
        assert [words for words in _commands() if words[0].endswith("ssh") and "-W" in words and "host2" in words]
    finally:
        client.close()


def _commands() -> list[list[str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace").split("\0"))
    return found


LISTENING = """
import os, pathlib, torch.distributed
torch.distributed.barrier()
links = [os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
own = [line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links]
os.environ["MASTER_ADDR"], bool(own), [address for address in own if not address.strip("0")]
"""


def test_the_store_listens_on_the_address_by_which_the_host_was_reached(book: Notebook) -> None:
    """And no rank on all addresses, for peers that are no ranks."""
    cell = f"%%distributed --strategy ddp\n{LISTENING}"
    assert book.ok(cell).result == "ranks 0-3: ('127.0.0.2', True, [])"


def test_the_notebooks_files_are_there(book: Notebook, folder: Path) -> None:
    """Hosts have a /tmp of their own, so this one's folder is not theirs."""
    (folder / "helper.py").write_text("ANSWER = 42\n")
    cell = dedent("""\
        %%distributed
        import helper
        helper.ANSWER""")
    assert book.ok(cell).result == "ranks 0-3: 42"
    (folder / "helper.py").write_text("ANSWER = 43  # another size, since Python goes by whole seconds\n")
    cell = dedent("""\
        %%distributed
        import helper
        helper.ANSWER""")
    assert book.ok(cell).result == "ranks 0-3: 43"


def test_what_a_rank_writes_into_the_copy_is_said_to_be_lost(book: Notebook, folder: Path) -> None:
    cell = dedent("""\
        %%distributed
        if rank == 0:
            open('model.pt', 'w').write('weights')""")
    said = book.ok(cell).view
    assert "model.pt was written on host1, into a copy of the notebook's folder that is removed with the ranks" in said
    assert not (folder / "model.pt").exists()
    assert "model.pt" not in book.ok("%%distributed\nrank").text


def test_a_folder_that_hosts_share_is_used(bed: Bed) -> None:
    folder = bed.folder / "shared"
    folder.mkdir()
    name_it(bed, folder)
    with Notebook(folder) as shared:
        shared.ok("%load_ext jupyter_distrib")
        cell = dedent("""\
            %%distributed
            import os
            os.getcwd()""")
        assert shared.ok(cell).result == f"ranks 0-3: {str(folder)!r}"
        before = sorted(os.listdir(folder))
        shared.ok("import numpy as np\nbig = np.arange(5_000_000)")
        assert shared.ok("%%distributed\nint(big.sum())").result == "ranks 0-3: 12499997500000"
        assert sorted(os.listdir(folder)) == before, "values went by it, and have left nothing"


def test_big_values_go_there_and_back(book: Notebook) -> None:
    book.ok("import numpy as np\nbig = np.arange(8_000_000)")
    assert book.ok("%%distributed\nint(big.sum())").result == "ranks 0-3: 31999996000000"
    book.ok("%%distributed --on 3 --out there\nbig * 2")
    assert book.ok("print(int(there[3].sum()))").stdout == "63999992000000\n"


@pytest.mark.parametrize(("where", "how"), [pytest.param(*case, id=" ".join(case)) for case in crash_cases.CASES])
def test_the_rank_at_fault_is_named_and_the_next_cell_is_good(book: Notebook, where: str, how: str) -> None:
    outcome = crash_cases.run(book, where, how, 3, line="%%distributed --strategy ddp")
    assert outcome.wall_s < 15
    assert_good(book)


@pytest.mark.parametrize("victim", restart_cases.VICTIMS)
def test_a_cell_that_loses_a_rank_or_a_node_is_started_again(book: Notebook, bed: Bed, victim: str) -> None:
    restart_cases.check(book, victim)
    assert_good(book)
    assert wait_until(lambda: not any(unused_folders(host) for host in bed.hosts), 15)


def test_an_interrupt_stops_ranks_of_all_hosts_in_a_collective(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --strategy ddp --keep mine
            import time, torch, torch.distributed as dist
            mine = rank
            dist.barrier()
            print('entered', flush=True)
            time.sleep(100) if rank == 2 else dist.all_reduce(torch.ones(1))""")
    )
    book.until("entered")
    book.interrupt()
    outcome = book.finish()
    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert_good(book)
    assert book.ok("[mine[rank] for rank in range(4)]").result == "[0, 1, 2, 3]"


def test_a_session_that_is_cut_ends_the_cell_with_the_hosts_name_and_leaves_nothing(book: Notebook, bed: Bed) -> None:
    before = set(bed.hosts[1].processes())
    book.start(HANGS)
    book.until("all in")
    for session in bed.hosts[1].sessions():
        os.kill(session, signal.SIGKILL)
    outcome = book.finish()
    assert outcome.ename == "RankLost", outcome.text
    assert "node host2 was lost: its connection has ended" in outcome.traceback, outcome.traceback
    assert wait_until(lambda: not before & set(bed.hosts[1].processes()), 15), "what ran there has ended"
    assert wait_until(lambda: not unused_folders(bed.hosts[1]), 15)
    assert_good(book)


def test_an_ssh_that_is_killed_here_is_reported_and_leaves_nothing_there(book: Notebook, bed: Bed) -> None:
    before = set(bed.hosts[0].processes())
    book.start(HANGS)
    book.until("all in")
    [client] = [pid for pid, line in commands("ssh").items() if f"-- {bed.hosts[0].name}" in line]
    os.kill(client, signal.SIGKILL)
    outcome = book.finish()
    assert "node host1 was lost: its connection has ended" in outcome.traceback, outcome.traceback
    assert wait_until(lambda: not before & set(bed.hosts[0].processes()), 15)
    assert_good(book)


def test_a_connection_that_hangs_is_reported_within_ten_seconds(book: Notebook, bed: Bed) -> None:
    """As when the network is cut: nobody says so."""
    book.start(HANGS)
    book.until("all in")
    [client] = [pid for pid, line in commands("ssh").items() if f"-- {bed.hosts[1].name}" in line]
    os.kill(client, signal.SIGSTOP)
    outcome = book.finish()
    assert "host2 was lost: nothing" in outcome.traceback, outcome.traceback
    assert wait_until(lambda: client not in commands("ssh"), 15), "it was stopped, and is ended all the same"
    assert_good(book)


def test_a_host_that_is_killed_ends_the_cell_and_the_next_is_on_what_is_left(bed: Bed, tmp_path: Path) -> None:
    third = Host(bed.folder, 3)
    bed.hosts.append(third)
    bed.write_config()
    try:
        name_it(bed, tmp_path, hosts="host3:2,host1", nodes=1, ranks=2)
        with Notebook(tmp_path) as book:
            book.ok("%load_ext jupyter_distrib")
            cell = dedent("""\
                %%distributed
                import socket
                socket.gethostname()""")
            assert book.ok(cell).result == "ranks 0-1: 'host3'"
            book.start(HANGS)
            book.until("all in")
            third.kill()
            outcome = book.finish()
            assert "node host3 was lost" in outcome.traceback, outcome.traceback
            outcome = book.ok(
                dedent("""\
                    %%distributed
                    import socket
                    socket.gethostname()""")
            )
            assert outcome.result == "ranks 0-1: 'host1'"
            assert "no SSH server answers on host3" in outcome.view, outcome.view
    finally:
        bed.hosts.remove(third)
        third.close()
        bed.write_config()


def test_when_the_kernel_ends_nothing_is_left_on_the_hosts(bed: Bed, tmp_path: Path) -> None:
    name_it(bed, tmp_path, hosts="host1:9,host2:9", ranks=2)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        cell = dedent("""\
            %%distributed
            import os
            os.getpid()""")
        pids = book.ok(cell).result
    ranks = [int(pid) for pid in re.findall(r": (\d+)", pids)]
    assert len(ranks) == 2
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 15)


def unused_folders(host: Host) -> list[str]:
    """Folders of ours on the host that belong to no process there."""
    lines = " ".join(host.processes().values())
    return [name for name in host.folders() if name.startswith("jupyter_distrib") and name not in lines]


def commands(name: str) -> dict[int, str]:
    """The command lines of running programs of this name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if os.path.basename(words[0]) == name:
            found[int(path.parent.name)] = " ".join(words)
    return found
