"""Cells of a real notebook on two nodes of a Ray cluster: values, code, status, what is refused."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.coordinator.node_agent import KEPT_S
from tests.notebook import Notebook
from tests.processes import wait_until_gone
from tests.product.test_unchanged_values import WHERE
from tests.ray.conftest import Cluster, name_it
from tests.wheels import environment, install, wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def book(kernel: Notebook) -> Iterator[Notebook]:
    yield kernel
    kernel.forget()


def test_loading_the_extension_joins_the_default_pool(cluster: Cluster, tmp_path: Path) -> None:
    name_it(cluster, tmp_path)
    with Notebook(tmp_path) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import time
                from jupyter_distrib.kernel.session import session""")
        )
        book.ok("while not list(session.current().pools.connections): time.sleep(0.05)")
        book.ok("pool = next(iter(session.current().pools.connections))\nassert pool.facts.kind == 'ray'")
        joined = f"Ray at {cluster.address}"
        assert book.cell(f"while pool.ask().state != {joined!r}: time.sleep(0.05)", timeout_s=120).status == "ok"


def test_a_cell_meets_over_both_nodes(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --strategy ddp
            import os, torch, torch.distributed as dist
            t = torch.ones(1)
            dist.all_reduce(t)
            (rank, int(t), int(os.environ['NODE_RANK']), local_rank, os.environ['MASTER_ADDR'])""")
    )
    address = outcome.result.splitlines()[0].split("'")[1]  # of whichever node has rank 0
    assert address in ("127.0.0.2", "127.0.0.3")
    assert outcome.result.splitlines() == [
        f"rank 0: (0, 4, 0, 0, '{address}')",
        f"rank 1: (1, 4, 0, 1, '{address}')",
        f"rank 2: (2, 4, 1, 0, '{address}')",
        f"rank 3: (3, 4, 1, 1, '{address}')",
    ]


def test_the_status_shows_its_ranks(book: Notebook) -> None:
    book.ok("%%distributed\n1;")
    status = book.ok("%distributed_status").result
    assert ", Ray at 127.0.0.2" in status
    assert len(re.findall(r"^ *\d +idle +cpu +\d+ .* 127\.0\.0\.[23] +lab$", status, re.MULTILINE)) == 4
    for number, ranks in ((2, "[02]"), (3, "[02]")):
        row = rf"^127\.0\.0\.{number} +4, 2 free +\d.*B +none +{ranks}-\d +lab$"
        assert re.search(row, status, re.MULTILINE), status
    row = next(line for line in book.ok("%distributed_pool").result.splitlines() if line.startswith("lab"))
    assert re.split(r" {2,}", row) == ["lab", "ray", "yes", "4 CPU", "jupyter_distrib.toml"]


def test_ranks_that_take_cpus_use_as_many_threads(cluster: Cluster, tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        at = f"--pool ray --insecure --address {cluster.address} --ranks 1"
        cell = f"%%distributed {at} --cpus-per-rank 1\nimport os, torch\ntorch.get_num_threads(), os.environ['OMP_NUM_THREADS']"
        assert book.cell(cell, timeout_s=150).result == "rank 0: (1, '1')"


def test_values_stay_on_their_nodes(book: Notebook) -> None:
    book.ok("%%distributed --keep model\nmodel = [rank]")
    assert book.ok("%%distributed\nmodel[0] * 10").result == "rank 0: 0\nrank 1: 10\nrank 2: 20\nrank 3: 30"
    assert book.ok("model[3]").result == "[3]"
    assert book.ok("%%distributed --on 2-3\nmodel").result == "rank 2: [2]\nrank 3: [3]"


PIDS = "import os\n(os.getpid(), os.getppid())"


def pids(text: str) -> tuple[set[str], set[str]]:
    """Of the ranks, and of the agents."""
    ranks, agents = zip(*re.findall(r"\((\d+), (\d+)\)", text), strict=True)
    return set(ranks), set(agents)


def test_fresh_ranks_are_forked_by_the_agents_that_are_there(book: Notebook) -> None:
    book.ok("%%distributed --keep model\nmodel = rank")
    before = pids(book.ok(f"%%distributed\n{PIDS}").result)
    for _ in range(3):
        after = pids(book.ok(f"%%distributed --fresh\n{PIDS}").result)
        assert after[1] == before[1]
        assert len(after[0]) == 4
        assert not after[0] & before[0]
        before = after
    assert book.fails("%%distributed\nmodel").ename == "ValueLost"
    cell = dedent("""\
        import torch, torch.distributed as dist
        t = torch.ones(1)
        dist.all_reduce(t)
        int(t)""")
    assert book.ok(f"%%distributed --strategy ddp\n{cell}").result == "ranks 0-3: 4"


def test_another_number_of_ranks_is_forked_by_the_agents_that_are_there(book: Notebook) -> None:
    _, agents = pids(book.ok(f"%%distributed\n{PIDS}").result)
    for ranks in (2, 4, 8, 2):  # 8 have no room beside others: those leave first
        outcome = book.ok(f"%%distributed --ranks {ranks}\n{PIDS}")
        after = pids(outcome.result)
        assert after[1] == agents or outcome.wall_s > KEPT_S
        assert len(after[0]) == ranks
        agents = after[1]


def test_ranks_that_were_stopped_come_again_also_if_their_agents_are_killed_meanwhile(book: Notebook) -> None:
    _, agents = pids(book.ok(f"%%distributed\n{PIDS}").result)
    book.ok("%distributed_pool stop")
    for pid in agents:
        os.kill(int(pid), signal.SIGKILL)
    book.cell("%%distributed\npass")  # it may come before that is noticed
    assert len(pids(book.ok(f"%%distributed\n{PIDS}").result)[0]) == 4


def test_nodes_that_nobody_claims_are_given_back(book: Notebook) -> None:
    _, agents = pids(book.ok(f"%%distributed\n{PIDS}").result)
    book.ok("%distributed_pool stop")
    assert wait_until_gone([int(pid) for pid in agents], 30) == []


def test_a_restarted_kernel_has_its_ranks_from_the_agents_that_are_there(cluster: Cluster, tmp_path: Path) -> None:
    name_it(cluster, tmp_path)
    with Notebook(tmp_path, env={"JPY_SESSION_NAME": str(tmp_path / "train.ipynb")}) as book:
        book.ok("%load_ext jupyter_distrib")
        ranks, agents = pids(book.ok(f"%%distributed --keep x\nx = 1\n{PIDS}").result)
        book.start(
            dedent("""\
                %%distributed
                import time
                print('it is on')
                while True: time.sleep(1)""")
        )
        book.until("it is on")
        book.restart()
        assert wait_until_gone([int(pid) for pid in ranks], 5) == []
        book.ok("%load_ext jupyter_distrib")
        after = pids(book.ok(f"%%distributed --strategy ddp\nassert 'x' not in globals()\n{PIDS}").result)
        assert after[1] == agents
        assert not after[0] & ranks


def test_what_a_dead_kernel_has_left_is_for_who_needs_it(book: Notebook, cluster: Cluster, tmp_path: Path) -> None:
    """Without being asked to wait."""
    book.ok("%%distributed\n1;")  # two of four on each node
    name_it(cluster, tmp_path)
    with Notebook(tmp_path) as dead, Notebook(tmp_path) as other:
        for each in (dead, other):
            each.ok("%load_ext jupyter_distrib")
        _, agents = pids(dead.ok(f"%%distributed\n{PIDS}").result)
        os.kill(dead.pid, signal.SIGKILL)
        assert not pids(other.ok(f"%%distributed\n{PIDS}").result)[1] & agents


def test_large_values_travel_both_ways(book: Notebook) -> None:
    book.ok("import torch\nbig = torch.arange(5_000_000)")
    book.ok("%%distributed --out sums\n(int(big.sum()), big + rank)")
    seen = eval(book.ok("[(s, int(t[-1])) for s, t in sums]").result)
    assert seen == [(12499997500000, 4999999 + rank) for rank in range(4)]


def test_a_large_value_that_has_not_changed_goes_to_each_node_once(book: Notebook) -> None:
    book.ok(f"import numpy as np\nv, u = np.arange(5_000_000), np.ones(1_000_000)\n{WHERE}")

    def seen(code: str) -> list[tuple[int, int, int]]:
        book.ok(f"%%distributed --ranks 4 --out o\n{code}")
        return list(eval(book.ok("list(o)").result))

    cell = dedent("""\
        s = int(v.sum()), int(u.sum()), where(v)
        v += 1
        s""")
    first = seen(cell)
    for number in range(3):
        book.ok(f"u[0] = {number}")
        assert seen(cell) == [(12499997500000, 999_999 + number, where) for _, _, where in first]
    book.ok("v[7] = 0")
    changed = seen(cell)
    assert [each[:2] for each in changed] == [(12499997499993, 1_000_001)] * 4
    assert {each[2] for each in changed}.isdisjoint(each[2] for each in first)


def test_all_that_ranks_print_is_in_the_logs(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed
            for i in range(20_000):
                print('line', i)""")
    )
    assert "line 19999" in outcome.view
    for rank in (0, 3):
        lines = book.ok(f"%distributed_logs --rank {rank}").stdout.splitlines()
        assert lines == [f"line {i}" for i in range(20_000)]


def test_the_environment_of_the_kernels_machine_stays_there(cluster: Cluster, tmp_path: Path) -> None:
    """What the notebook sets travels; what its machine had, such as keys, does not."""
    with Notebook(tmp_path, env={"MY_API_KEY": "canary-4711"}) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(f"%distributed_pool add lab --kind ray --address {cluster.address} --insecure --ranks 2")
        book.ok(
            dedent("""\
                %distributed_pool use lab
                import os
                os.environ['MINE'] = 'yes'""")
        )
        outcome = book.ok(
            dedent("""\
                %%distributed --env MORE=1
                import os
                (os.environ.get('MY_API_KEY'), os.environ['MINE'], os.environ['MORE'], 'PATH' in os.environ)""")
        )
        assert outcome.result == "ranks 0-1: (None, 'yes', '1', True)"


def test_code_reaches_nodes_that_do_not_share_the_folder(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def f():\n    return 'first'\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    (tmp_path / "gone.txt").write_text("")
    cell = dedent("""\
        %%distributed
        import os, helper, package
        (helper.f(), package.x, open('config.yaml').read(), os.getcwd() == home, os.path.exists('gone.txt'))""")
    with Notebook(tmp_path) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import os
                home = os.getcwd()""")
        )
        book.ok(
            f"%distributed_pool add far --kind ray --address {cluster.address} --insecure --ranks 2 --nodes 2 --copy-files"
        )
        book.ok("%distributed_pool use far")
        assert book.ok(cell).result == "ranks 0-1: ('first', 1, 'lr: 1\\n', False, True)"
        (tmp_path / "helper.py").write_text("def f():\n    return 'second'\n")
        (tmp_path / "gone.txt").unlink()
        assert book.ok(cell).result == "ranks 0-1: ('second', 1, 'lr: 1\\n', False, False)"
        (tmp_path / "results").mkdir()
        for number in range(5000):
            (tmp_path / "results" / str(number)).touch()
        assert "has more than 5000 files or 100 MB: not all of it is on the nodes" in book.ok(cell).text
        assert "has more than" not in book.ok(cell).text, "said once"


def test_cells_run_in_a_shared_folder_also_if_the_notebook_is_saved_while_the_nodes_start(
    cluster: Cluster, tmp_path: Path
) -> None:
    over = threading.Event()

    def save() -> None:
        while not over.wait(0.001):
            (tmp_path / ".saved").write_text("")
            (tmp_path / ".saved").rename(tmp_path / "notebook.ipynb")

    saving = threading.Thread(target=save)
    saving.start()
    try:
        with Notebook(tmp_path) as book:
            book.ok("%load_ext jupyter_distrib")
            book.ok(f"%distributed_pool add lab --kind ray --address {cluster.address} --insecure --ranks 2 --nodes 2")
            book.ok("%distributed_pool use lab")
            book.ok("%%distributed\nopen(f'of rank {rank}', 'w').close()")
    finally:
        over.set()
        saving.join()
    assert {path.name for path in tmp_path.glob("of rank *")} == {"of rank 0", "of rank 1"}


def test_cells_do_not_run_in_an_empty_folder_that_is_not_to_be_shared(cluster: Cluster, tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import os
                home = os.getcwd()""")
        )
        book.ok(f"%distributed_pool add far --kind ray --address {cluster.address} --insecure --ranks 1 --copy-files")
        book.ok("%distributed_pool use far")
        cell = dedent("""\
            %%distributed
            import os
            os.getcwd() == home""")
        assert book.ok(cell).result == "rank 0: False"


def test_files_that_do_not_get_there_are_said(cluster: Cluster, tmp_path: Path) -> None:
    """For their size, or because a node cannot take them; those are brought by the next cell."""
    (tmp_path / "data.bin").write_bytes(bytes(3 << 20))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("")
    look = dedent("""\
        %%distributed
        import os
        os.path.isfile('folder')""")
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(f"%distributed_pool add far --kind ray --address {cluster.address} --insecure --ranks 1 --copy-files")
        book.ok("%distributed_pool use far")
        said = book.ok("%%distributed\nopen('folder/of_the_rank', 'w').close()").text
        assert f"{tmp_path}/data.bin (3 MB) is not on the nodes, nor is any other file over 1 MB" in said
        (tmp_path / "folder" / "file").unlink()
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").write_text("a file now")
        cell = dedent("""\
            %%distributed
            import os
            os.unlink('folder/of_the_rank')
            os.rmdir('folder')""")
        said = book.ok(cell).text
        assert re.search(r"folder could not be copied to node 127\.0\.0\.[23] \(Is a directory\)\.", said), said
        outcome = book.ok(look)
        assert outcome.result == "rank 0: True"
        assert "could not be brought" not in outcome.text
        (tmp_path / "folder").unlink()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_text("")
        assert book.ok(look).result == "rank 0: False", "a folder again"
        (tmp_path / "folder" / "file").unlink()
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").write_text("")
        assert book.ok(look).result == "rank 0: True"


def test_a_cell_that_a_node_cannot_take_fails_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Here its folder for the notebook's files is gone; it could be a full disk."""
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(f"%distributed_pool add far --kind ray --address {cluster.address} --insecure --ranks 1 --copy-files")
        book.ok("%distributed_pool use far")
        gone = dedent("""\
            import os, shutil
            project = os.path.dirname(os.getcwd())
            os.chdir('/')
            shutil.rmtree(project)
        """)
        book.ok(f"%%distributed --out projects\n{gone}open(project, 'w').close()\nproject")
        outcome = book.fails("%%distributed\nrank")
        assert re.search(
            r"PoolError: node 127\.0\.0\.[23] could not receive this cell: the folder .* cannot be made \(Not a directory\)",
            outcome.traceback,
        )
        book.ok("import os\nos.unlink(projects[0])")
        assert book.ok("%%distributed\nrank").result == "rank 0: 0"


# ---------------------------------------------------------------------------------------------------- refusals


def refused(book: Notebook, line: str) -> str:
    outcome = book.cell(f"%%distributed {line}\nrank", timeout_s=60)
    assert outcome.status == "error", outcome.text
    assert outcome.wall_s < 30
    assert "\n" not in outcome.traceback.strip()
    return outcome.traceback


def test_what_cannot_be_had_is_one_sentence(book: Notebook, cluster: Cluster) -> None:
    book.ok("%distributed_pool stop")
    at = f"--pool ray --insecure --address {cluster.address}"
    assert "--ranks 100, but the Ray cluster has room for 8 on 2 nodes (4, 4), at 1 CPU for each" in refused(
        book, f"{at} --ranks 100"
    )
    assert "--ranks 6 on 1 nodes, but the Ray cluster has room for 8" in refused(book, f"{at} --ranks 6 --nodes 1")
    assert "--gpu-type A10, but the Ray cluster has no GPU at all" in refused(book, f"{at} --gpu-type A10")
    assert "asks for no token, so anyone who reaches it can run code on it" in refused(
        book, f"--pool ray --address {cluster.address}"
    )
    nowhere = refused(book, "--pool ray --insecure --address 127.0.0.2:9")
    assert "no Ray cluster can be reached at 127.0.0.2:9 (Connection refused)" in nowhere
    assert "is not an address of a Ray cluster" in refused(book, "--pool ray --address nonsense")
    assert book.ok("%%distributed\nrank").result.startswith("rank 0: 0"), "the next cell works"


def test_a_busy_cluster_says_by_whom_and_can_be_waited_for(book: Notebook, cluster: Cluster, tmp_path: Path) -> None:
    book.ok("%%distributed --ranks 4 --keep x\nx = 1")  # four of eight
    at = f"--pool ray --insecure --address {cluster.address} --ranks 8"
    with Notebook(tmp_path) as other:
        other.ok("%load_ext jupyter_distrib")
        busy = other.fails(f"%%distributed {at}\nrank").traceback
        assert "8 CPUs are asked for, and 4 of 8 are free in the Ray cluster. kernel" in busy
        other.start(f"%%distributed {at} --wait 100\nworld_size;")
        other.until("Waiting: 8 CPUs are asked for")
        book.ok("%distributed_pool stop")
        assert other.finish(100).status == "ok"
    assert os.path.isdir(tmp_path)


OF_RAY = """
%load_ext jupyter_distrib
import ray
ray.init({address!r}, log_to_driver=False)
@ray.remote(num_cpus=0)
class Counter:
    count = 0
    def add(self):
        self.count += 1
        return self.count
counter, reference = Counter.remote(), ray.put([1])
"""


def test_what_the_notebook_has_of_ray_is_refused_or_needs_a_connection(cluster: Cluster, tmp_path: Path) -> None:
    line = f"%%distributed --pool ray --insecure --address {cluster.address} --ranks 2 --cpus-per-rank 0\n"
    with Notebook(tmp_path, env={"RAY_AUTH_MODE": "disabled"}) as book:
        assert book.cell(OF_RAY.format(address=cluster.address), timeout_s=100).status == "ok"
        refused = book.fails(f"{line}ray.get(reference)").traceback
        assert "`reference` (used on line 2) is a ray.ObjectRef, which cannot be sent" in refused
        assert refused.endswith("take `ray.get(x)` in an earlier cell, and use that)."), refused
        assert "works only in a process that is connected" in book.cell(f"{line}counter.add.remote()", 150).traceback
        book.ok(f"{line}import ray\nray.init({cluster.address!r}, log_to_driver=False);")
        counts = book.ok(f"{line}ray.get(counter.add.remote())").result
        assert sorted(counts.splitlines()) in (["rank 0: 1", "rank 1: 2"], ["rank 0: 2", "rank 1: 1"])


def test_nodes_get_the_packages_that_they_lack(cluster: Cluster, tmp_path: Path) -> None:
    python, packages = environment(tmp_path / "env")
    install(wheel(tmp_path, "tinypkg", "1.2"), packages)
    (folder := tmp_path / "work").mkdir()
    name_it(cluster, folder)
    with Notebook(folder, python=str(python)) as book:
        book.ok("%load_ext jupyter_distrib")
        cell = dedent("""\
            %%distributed --ranks 2 --environment {}
            import tinypkg
            tinypkg.version""")
        assert "the notebook has: tinypkg 1.2" in book.cell(cell.format("check"), timeout_s=150).text
        outcome = book.cell(cell.format("sync"), timeout_s=150)
    assert outcome.result == "ranks 0-1: '1.2'", outcome.text
