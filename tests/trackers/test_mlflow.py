from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebook import Notebook, Outcome
from tests.processes import wait_until
from tests.settings_files import write_trusted
from tests.trackers.conftest import QUIET, Server, free_port, named

pytestmark = pytest.mark.slow
LOAD = "%load_ext jupyter_distrib\nimport os, time, jupyter_distrib"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Notebook]:
    env = {**QUIET, "MLFLOW_TRACKING_URI": server.uri}
    with Notebook(tmp_path_factory.mktemp("notebook"), env=env) as book:
        book.ok(LOAD)
        yield book


@pytest.fixture
def book(shared: Notebook, request: pytest.FixtureRequest) -> Notebook:
    """The notebook, in an experiment of the test's name."""
    shared.ok(f"os.environ['MLFLOW_EXPERIMENT_NAME'] = {request.node.name!r}")
    return shared


def settled(book: Notebook, outcome: Outcome) -> dict[str, str]:
    """What is shown below the cell when its tracker has answered."""
    display, *_ = outcome.displays  # then the chart
    book.ok("pass")  # so that what came meanwhile is read
    return book._bundles[display]


def test_each_run_is_an_mlflow_run_whose_address_is_below_the_cell(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --track mlflow --timeout 50
            for step in range(3):
                jupyter_distrib.report(loss=3.0 - step + rank, step=step)""")
    )
    (run,) = server.runs(request.node.name)
    info, data = run["info"], run["data"]
    shown = settled(book, outcome)
    assert f"{server.uri}/#/experiments/{info['experiment_id']}/runs/{info['run_id']}" in shown["text/plain"]
    assert f'<a href="{server.uri}/#/experiments/' in shown["text/html"]
    assert shown["text/plain"].count(info["run_id"]) + outcome.stdout.count(info["run_id"]) == 1
    assert info["status"] == "FINISHED"
    assert re.fullmatch(r"Cell In\[\d+\]", info["run_name"])
    assert server.history(run, "loss") == [3.0, 2.0, 1.0]
    assert server.history(run, "rank_1/loss") == [4.0, 3.0, 2.0]
    parameters = named(data["params"])
    assert {
        "run.strategy": "none",
        "run.pool": "local",
        "run.ranks": "ranks 0-1",
        "option.timeout_s": "50.0",
    }.items() <= (parameters.items())
    assert {"version.python", "version.torch", "version.jupyter_distrib"} <= parameters.keys()
    assert named(data["tags"])["jupyter_distrib.cell"].startswith("for step in range(3):")


def test_a_run_is_a_child_of_the_one_that_is_active_in_the_notebook(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    book.ok("import mlflow\nparent = mlflow.start_run(run_name='parent')")
    book.ok("%%distributed --ranks 2\nrank")
    book.ok("mlflow.end_run()")
    book.ok("%%distributed --ranks 2\nrank")  # neither active nor asked for
    parent, child = server.runs(request.node.name, 2)
    assert named(child["data"]["tags"])["mlflow.parentRunId"] == parent["info"]["run_id"]


def test_submitted_runs_are_children_of_the_one_that_was_active_when_they_were_submitted(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    book.ok(
        dedent("""\
            import mlflow
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def train(lr):
                import mlflow
                mlflow.log_param('lr', lr)""")
    )
    book.ok("with mlflow.start_run(run_name='sweep'):\n    runs = [train.submit(lr) for lr in (1, 2, 3)]")
    book.ok("[run.result() for run in runs]")

    runs = server.runs(request.node.name, 4)
    (parent,) = [run["info"]["run_id"] for run in runs if run["info"]["run_name"] == "sweep"]
    children = [run["data"] for run in runs if named(run["data"]["tags"]).get("mlflow.parentRunId") == parent]
    assert sorted(named(child["params"])["lr"] for child in children) == ["1", "2", "3"]


def test_none_leaves_a_cell_out(book: Notebook, server: Server, request: pytest.FixtureRequest) -> None:
    book.ok("import mlflow\nparent = mlflow.start_run(run_name='parent')")
    outcome = book.ok("%%distributed --ranks 2 --track none\nrank")
    book.ok("mlflow.end_run()")
    assert len(server.runs(request.node.name)) == 1
    assert "MLflow" not in outcome.text


def test_what_a_cell_logs_lands_in_the_run_from_the_first_rank(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    code = dedent("""\
        import mlflow
        mlflow.log_metric('mine', 10.0 + rank)
        mlflow.log_param('rank', rank)""")
    assert book.ok(f"%%distributed --ranks 2 --track mlflow\n{code}\nmlflow.active_run() is None").result == (
        "ranks 0-1: False"
    )
    book.ok(f"%%distributed --ranks 2 --on 1 --track mlflow\n{code}")
    first, second = server.runs(request.node.name, 2)
    assert (server.history(first, "mine"), named(first["data"]["params"])["rank"]) == ([10.0], "0")
    assert (server.history(second, "mine"), named(second["data"]["params"])["rank"]) == ([11.0], "1")


def test_a_run_that_a_cell_leaves_open_is_closed_before_the_next_cell(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    for _ in range(2):
        book.ok(
            dedent("""\
                %%distributed --ranks 1 --track none
                import mlflow
                mlflow.start_run(run_name='own')
                mlflow.log_metric('own', 1.0)""")
        )
    first, second = server.runs(request.node.name, 2, going_on=1)
    assert first["info"]["status"] == "FINISHED"
    assert server.history(second, "own") == [1.0]


def test_the_state_tells_an_error_from_a_stop(book: Notebook, server: Server, request: pytest.FixtureRequest) -> None:
    book.fails("%%distributed --ranks 2 --track mlflow\n1 / rank")
    book.start(
        dedent("""\
            %%distributed --ranks 2 --track mlflow
            print('begun', flush=True)
            time.sleep(60)""")
    )
    book.until("begun")
    book.interrupt()
    assert book.finish(20).ename == "KeyboardInterrupt"
    book.fails("%%distributed --ranks 2 --track mlflow --timeout 0.2\ntime.sleep(60)")
    assert [run["info"]["status"] for run in server.runs(request.node.name, 3)] == ["FAILED", "KILLED", "KILLED"]


def test_memory_and_processor_of_each_rank_are_sampled(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    book.ok("%%distributed --ranks 2 --track mlflow\ntime.sleep(3.5)")
    (run,) = server.runs(request.node.name)
    for rank in (0, 1):
        samples = server.history(run, f"system/rank_{rank}/memory_mb")
        assert len(samples) >= 2
        assert all(value > 1 for value in samples)
        assert len(server.history(run, f"system/rank_{rank}/cpu_percent")) == len(samples)


def test_the_settings_may_ask_for_it_and_a_folder_under_git_is_named(tmp_path: Path, server: Server) -> None:
    import subprocess

    write_trusted(tmp_path, 'track = ["mlflow"]\n')
    for command in (["init", "-q", "-b", "work"], ["add", "."], ["commit", "-q", "-m", "x"]):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    env = {**QUIET, "MLFLOW_TRACKING_URI": server.uri, "MLFLOW_EXPERIMENT_NAME": "settings"}
    with Notebook(tmp_path, env=env) as book:
        book.ok(LOAD)
        book.ok("%%distributed --ranks 1\nrank")
        (run,) = server.runs("settings")
    tags = named(run["data"]["tags"])
    assert (tags["git.branch"], len(tags["git.commit"])) == ("work", 40)


def test_a_local_store_needs_no_server_and_mlflow_is_not_imported_before(tmp_path: Path, server: Server) -> None:
    with Notebook(tmp_path, env={**QUIET, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/own.db"}) as book:
        book.ok(LOAD)
        book.ok("%%distributed --ranks 1\nrank")
        assert book.ok("import sys\n'mlflow' in sys.modules").result == "False"
        outcome = book.ok(
            dedent("""\
                %%distributed --ranks 1 --track mlflow
                import mlflow
                jupyter_distrib.report(loss=2.0)
                mlflow.log_metric('mine', 1.0)""")
        )
        assert f"in sqlite:///{tmp_path}/own.db" in outcome.view
        book.ok("import mlflow\nfound = lambda: mlflow.MlflowClient().search_runs(['0'])[0]")
        book.ok("while (run := found()).info.status == 'RUNNING': time.sleep(0.02)")
        assert book.ok("run.data.metrics['loss'], run.data.metrics['mine'], run.info.status").result == (
            "(2.0, 1.0, 'FINISHED')"
        )


def test_a_server_that_is_missing_neither_fails_nor_delays_a_run(tmp_path: Path, server: Server) -> None:
    port = free_port()
    with Notebook(tmp_path, env={**QUIET, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}) as book:
        book.ok(LOAD + "\nimport mlflow")
        outcome = book.ok(
            dedent("""\
                %%distributed --ranks 2 --track mlflow
                time.sleep(0.5)
                rank""")
        )
        assert outcome.result == "rank 0: 0\nrank 1: 1"
        assert f"the server http://127.0.0.1:{port} does not answer" in outcome.view
        assert book.ok("%%distributed --ranks 2 --track mlflow\nrank").wall_s < 1.5


def test_a_server_that_hangs_delays_no_run(tmp_path: Path, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Notebook(tmp_path, env={**QUIET, "MLFLOW_TRACKING_URI": uri}) as book:
            book.ok(LOAD + "\nimport mlflow")
            book.ok("%%distributed --ranks 2\nrank")
            again = book.ok(
                dedent("""\
                    %%distributed --ranks 2 --track mlflow
                    time.sleep(1.5)
                    rank""")
            )
            assert again.result == "rank 0: 0\nrank 1: 1"
            assert "mlflow has not answered yet: it receives this run in the background" in again.view
            walls = [book.ok("%%distributed --ranks 2 --track mlflow\nrank").wall_s for _ in range(3)]
            assert min(walls) < 1.0


def test_a_run_that_ends_at_once_has_its_address_a_moment_later(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    outcome = book.ok("%%distributed --ranks 1 --track mlflow\n1")
    (run,) = server.runs(request.node.name)
    assert book.ok("%distributed_status --json").stdout.count(run["info"]["run_id"]) == 1
    assert run["info"]["run_id"] in settled(book, outcome)["text/plain"]


def test_a_notebook_that_ends_with_its_run_has_it_in_full(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**QUIET, "MLFLOW_TRACKING_URI": server.uri, "MLFLOW_EXPERIMENT_NAME": "executed"}.items():
        monkeypatch.setenv(name, value)
    code = ("%load_ext jupyter_distrib", "%%distributed --ranks 1 --track mlflow\nrank")
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in code])
    NotebookClient(
        document, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    (run,) = server.runs("executed")
    assert run["info"]["status"] == "FINISHED"


def test_a_detached_run_that_another_kernel_attaches_ends_there(tmp_path: Path, server: Server) -> None:
    env = {**QUIET, "MLFLOW_TRACKING_URI": server.uri, "MLFLOW_EXPERIMENT_NAME": "attached"}
    report = "jupyter_distrib.report(loss={}.0, step={})"
    with Notebook(tmp_path, env=env) as book:
        book.ok(LOAD)
        book.ok(
            f"%%distributed --ranks 2 --track mlflow --detach --out job\n{report.format(3, 0)}\n"
            f"while not os.path.exists('go'): time.sleep(0.01)\n{report.format(2, 1)}"
        )
        assert wait_until(lambda: server._found("attached"))
        (run,) = server._found("attached")
        assert wait_until(lambda: server.history(run, "rank_1/loss") == [3.0])
        book.restart()
        book.ok(LOAD)
        assert server._found("attached")[0]["info"]["status"] == "RUNNING"
        book.ok("job = get_ipython().run_line_magic('distributed_attach', '')")
        (tmp_path / "go").touch()
        book.ok("assert job.wait_ended(50)")
        (run,) = server.runs("attached")
        assert run["info"]["status"] == "FINISHED"
        assert server.history(run, "loss") == [3.0, 2.0]
        assert server.history(run, "rank_1/loss") == [3.0, 2.0]


def test_rays_metrics_come_into_the_run_of_the_cell_and_into_one_that_is_named(
    book: Notebook, server: Server, request: pytest.FixtureRequest
) -> None:
    """The page is a fake: a real one needs `ray[default]`."""
    book.ok(
        "import http.server, threading\n"
        "class Page(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(b'ray_node_mem_used 7\\n')\n"
        "    def log_message(self, *_): pass\n"
        "page = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Page)\n"
        "port = page.server_address[1]\n"
        "threading.Thread(target=page.serve_forever, daemon=True).start()\n"
        "import mlflow\n"
        "named = mlflow.MlflowClient().create_run(mlflow.set_experiment(os.environ['MLFLOW_EXPERIMENT_NAME']).experiment_id)"
        ".info.run_id"
    )
    try:
        book.ok(
            dedent("""\
                %%distributed --ranks 1 --track mlflow
                import time
                from jupyter_distrib.compat.ray_metrics import RayMetricsMonitor
                monitors = [RayMetricsMonitor(run, False, '127.0.0.1', 'n1', port, 0.05) for run in (None, named)]
                for each in monitors: each.start()
                while any(each._step < 3 for each in monitors): time.sleep(0.01)
                monitors[0].finish()
                import mlflow
                mlflow.MlflowClient().set_terminated(named)
                monitors[1]._thread.join()""")
        )
    finally:
        book.ok("page.shutdown(); page.server_close()")
    for run in server.runs(request.node.name, 2):
        assert set(server.history(run, "system/127.0.0.1/ray_node_n1/node_mem_used")) == {7.0}
