"""A store that cannot be used, or something in it that is missing, costs one sentence, and the training goes on."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook, Outcome
from tests.trackers.conftest import free_port
from tests.trackers.local_store import opened, runs

pytestmark = pytest.mark.slow
TRAIN = """@distributed(ranks=2)
def train():
    import mlflow
    mlflow.set_experiment("mine")
    named = os.environ["MLFLOW_RUN_ID"]
    with mlflow.start_run(run_name="x") as run:
        mlflow.log_params({"a": 1})
        with mlflow.start_run(nested=True):
            mlflow.log_metric("m", 1.0)
        mlflow.log_text("t", "t.txt")
    return run.info.run_id == named
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with tables, some experiments and a run."""
    pytest.importorskip("mlflow", reason="needs mlflow: sh .ci/trackers")
    folder = tmp_path_factory.mktemp("store")
    with opened(folder) as book:
        book.ok(
            dedent("""\
                import mlflow
                mlflow.set_experiment('deleted')
                mlflow.delete_experiment(mlflow.get_experiment_by_name('deleted').experiment_id)
                mlflow.set_experiment('other')
                with mlflow.start_run() as run: pass
                mlflow.delete_run(run.info.run_id)""")
        )
    return (folder / "ml.db").read_bytes()


@pytest.fixture
def folder(tmp_path: Path, store: bytes) -> Path:
    (tmp_path / "ml.db").write_bytes(store)
    return tmp_path


def sentences(outcome: Outcome) -> list[str]:
    return [line for line in outcome.text.splitlines() if re.search(r"MLflow|mlflow", line)]


def trains(book: Notebook, *parts: str, wall_s: float = 15) -> None:
    """The training ends well, and one line has all these parts."""
    book.ok("import mlflow")
    book.ok("%%distributed --ranks 2 --track none\nimport mlflow")  # which takes its time
    book.ok(TRAIN)
    outcome = book.ok("train.distributed()")
    assert outcome.result == "ranks 0-1: True"
    (line,) = sentences(outcome)
    assert all(part in line for part in parts), line
    assert outcome.wall_s < wall_s


def test_a_store_that_another_program_has_locked(folder: Path) -> None:
    with opened(folder) as book, closing(sqlite3.connect(folder / "ml.db")) as database:
        database.execute("begin exclusive")
        trains(book, "nothing is recorded", "ml.db cannot be used: database is locked")


def test_a_file_that_is_not_a_database(folder: Path) -> None:
    (folder / "ml.db").write_text("This is a text of some length and certainly not a database of any kind.\n" * 9)
    with opened(folder) as book:
        trains(book, "nothing is recorded", "file is not a database")


def test_a_store_of_another_version(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "ml.db")) as database:
        database.execute("update alembic_version set version_num = '000000000000'")
        database.commit()
    with opened(folder) as book:
        trains(book, "nothing is recorded", "out-of-date database schema")


def test_a_store_in_a_folder_that_is_missing(folder: Path) -> None:
    with opened(folder, MLFLOW_TRACKING_URI="sqlite:////etc/hostname/ml.db") as book:
        trains(book, "nothing is recorded")


def test_a_store_that_is_read_only(folder: Path) -> None:
    with opened(folder, MLFLOW_TRACKING_URI=f"sqlite:///file:{folder}/ml.db?mode=ro&uri=true") as book:
        trains(book, "nothing is recorded", "attempt to write a readonly database")


def test_a_server_that_is_away(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: sh .ci/trackers")
    port = free_port()
    with opened(tmp_path, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}") as book:
        trains(book, "nothing is recorded", f"the server http://127.0.0.1:{port} does not answer")


def test_a_store_that_is_lost_in_the_middle(folder: Path) -> None:
    with opened(folder) as book:
        book.ok(
            dedent("""\
                @distributed(ranks=2)
                def train():
                    import mlflow, sqlite3
                    mlflow.log_metric('m', 1.0)
                    if os.environ['RANK'] == '0':
                        database = sqlite3.connect('ml.db')
                        database.execute('alter table metrics rename to gone')
                        database.execute('alter table params rename to gone_too')
                        database.commit()
                    for step in range(5):
                        mlflow.log_metric('m', 1.0, step=step)
                    mlflow.log_param('a', 1)
                    return 'trained'""")
        )
        outcome = book.ok("train.distributed()")
    assert outcome.result == "ranks 0-1: 'trained'"
    (line,) = [line for line in sentences(outcome) if "The training goes on" in line]
    assert "log_metric could not be done: no such table: metrics" in line


@pytest.mark.parametrize("chooses", ["'deleted'", "'DELETED'.lower()"], ids=["a literal", "only running code knows it"])
def test_an_experiment_that_is_deleted(folder: Path, chooses: str) -> None:
    with opened(folder) as book:
        book.ok(
            dedent(f"""\
                @distributed(ranks=2)
                def train():
                    import mlflow
                    mlflow.set_experiment({chooses})
                    with mlflow.start_run():
                        mlflow.log_metric('m', 1.0)
                    return 'trained'""")
        )
        outcome = book.ok("train.distributed()")
    assert outcome.result == "ranks 0-1: 'trained'"
    assert sum("deleted" in line for line in sentences(outcome)) == 1


@pytest.mark.parametrize("which", ["of the environment", "of the call"])
def test_a_run_id_that_does_not_exist(folder: Path, which: str) -> None:
    with opened(folder) as book:
        given = ""
        if which == "of the environment":
            book.ok("os.environ['MLFLOW_RUN_ID'] = '0123456789abcdef0123456789abcdef'")
        else:
            given = "run_id='0123456789abcdef0123456789abcdef'"
        book.ok(
            dedent(f"""\
                @distributed(ranks=2)
                def train():
                    import mlflow
                    with mlflow.start_run({given}):
                        mlflow.log_metric('m', 1.0)
                    return 'trained'""")
        )
        outcome = book.ok("train.distributed()")
        assert outcome.result == "ranks 0-1: 'trained'"
        assert len([line for line in sentences(outcome) if "0123456789abcdef" in line]) == 1
        (run,) = runs(folder, 1)
    assert (run.metrics["m"], run.status) == ([1.0], "FINISHED")


def test_a_parameter_that_has_another_value_already(folder: Path) -> None:
    with opened(folder) as book:
        book.ok(
            dedent("""\
                @distributed(ranks=2)
                def train(lr=1):
                    import mlflow
                    mlflow.log_param('lr', 2)
                    mlflow.log_param('lr', 3)
                    mlflow.log_metric('m', 1.0)
                    return 'trained'""")
        )
        outcome = book.ok("train.distributed()")
        assert outcome.result == "ranks 0-1: 'trained'"
        (run,) = runs(folder, 1)
    assert run.metrics["m"] == [1.0]


def test_what_the_cell_gives_wrongly_to_mlflow_is_still_an_error(folder: Path) -> None:
    with opened(folder) as book:
        failed = book.fails(
            dedent("""\
                %%distributed --ranks 2
                import mlflow
                mlflow.log_metric('m', 'text')""")
        )
        assert failed.ename == "MlflowException"
        failed = book.fails(
            dedent("""\
                %%distributed --ranks 2
                import mlflow
                mlflow.log_artifact('missing.txt')""")
        )
        assert failed.ename in ("FileNotFoundError", "OSError")
