"""A run whose code uses MLflow is one MLflow run, without an option."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.trackers.local_store import Recorded, opened, runs

pytestmark = pytest.mark.slow
TRAIN = """@distributed(ranks=2)
def train(lr=0.1):
    import mlflow
    for step in range(3):
        mlflow.log_metric("m", step, step=step)
    mlflow.log_params({"lr": lr, "strategy": "mine"})
    return mlflow.active_run().info.run_id, os.environ["MLFLOW_RUN_ID"]
"""
NewRuns = Callable[[int], list[Recorded]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlflow", reason="needs mlflow: sh .ci/trackers")
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Notebook]:
    with opened(folder) as book:
        book.ok(TRAIN)
        yield book


@pytest.fixture
def book(shared: Notebook) -> Iterator[Notebook]:
    yield shared
    shared.ok(
        dedent("""\
            import mlflow, mlflow.tracking.fluent as fluent
            while mlflow.active_run(): mlflow.end_run()
            fluent._active_experiment_id = None
            for name in ('MLFLOW_EXPERIMENT_ID', 'MLFLOW_EXPERIMENT_NAME', 'MLFLOW_RUN_ID'): os.environ.pop(name, None)""")
    )


@pytest.fixture
def new(shared: Notebook, folder: Path) -> NewRuns:
    """The runs of this test, when there are as many."""
    known = {run.id for run in runs(folder)}
    return lambda count: runs(folder, count, known=known)


def test_on_a_new_store_a_function_that_logs_is_one_run_from_its_first_rank(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow: sh .ci/trackers")
    with opened(tmp_path) as book:
        book.ok("%%distributed --ranks 1\nrank")
        assert book.ok("'mlflow' in __import__('sys').modules").result == "False"
        outcome = book.ok(f"{TRAIN}\nprint(train.distributed(0.2))")
        (run,) = runs(tmp_path, 1)
    assert outcome.text.count(f"MLflow: run {run.id} of experiment 0 in sqlite:///ml.db") == 1
    assert outcome.stdout.count(run.id) == 2  # the same on all ranks
    assert (run.metrics["m"], run.status, run.params["strategy"]) == ([0.0, 1.0, 2.0], "FINISHED", "mine")


@pytest.mark.parametrize(
    "cell",
    [
        "%%distributed --ranks 2\nimport mlflow\nmlflow.log_metric('m', rank)",
        dedent("""\
            import mlflow as ml
            @distributed(ranks=2)
            def f():
                ml.log_metric('m', jupyter_distrib.rank())
            f.distributed()"""),
        "%%distributed --ranks 2\nfrom helper import log\nlog(rank)",
        dedent("""\
            from helper import log
            @distributed(ranks=2)
            def f():
                log(int(os.environ['RANK']))
            f.distributed()"""),
        dedent("""\
            import outer
            @distributed(ranks=2)
            def f():
                outer.log(int(os.environ['RANK']))
            f.distributed()"""),
        "class Tracker:\n    def log(self, value):\n        import mlflow\n        mlflow.log_metric('m', value)\n"  # noqa: ISC004
        "tracker = Tracker()\n@distributed(ranks=2)\ndef f():\n    tracker.log(int(os.environ['RANK']))\nf.distributed()",
    ],
    ids=["its import", "a module of the notebook", "a module that the cell imports", "a function of a module",
         "a module that imports another", "a class of the notebook"],
)  # fmt: skip
def test_whatever_the_code_reads_it_by(book: Notebook, new: NewRuns, folder: Path, cell: str) -> None:
    (folder / "helper.py").write_text(
        dedent("""\
            def log(value):
                import mlflow
                mlflow.log_metric('m', value)
        """)
    )
    (folder / "outer.py").write_text("from helper import log\n")
    book.ok(cell.replace("jupyter_distrib.rank()", "int(os.environ['RANK'])"))
    (run,) = new(1)
    assert run.metrics["m"] == [0.0]


@pytest.mark.parametrize(
    "cell",
    [
        "%%distributed --ranks 2\nprint('no mlflow here')  # mlflow",
        "def f():\n    '''Without mlflow.'''\n    return 1\ndistributed(ranks=2)(f).distributed()",
        "%%distributed --ranks 2\nrank",
        "%%distributed --ranks 2 --track none\nimport mlflow\nmlflow.active_run()",
    ],
)
def test_other_cells_are_not_tracked(book: Notebook, new: NewRuns, cell: str) -> None:
    assert "MLflow" not in book.ok(cell).text
    assert new(0) == []


def test_autologging_in_the_notebook_has_a_run_tracked(book: Notebook, new: NewRuns) -> None:
    book.ok("import mlflow\nmlflow.autolog(silent=True)")
    book.ok("%%distributed --ranks 2\nrank")
    new(1)
    book.ok("mlflow.autolog(disable=True, silent=True)")


def test_a_function_of_serverless_gpu_is_tracked_whatever_it_does(book: Notebook, new: NewRuns) -> None:
    book.ok("%distributed_compat databricks")
    book.ok(
        dedent("""\
            from serverless_gpu import distributed as theirs
            @theirs(gpus=2)
            def f():
                return 1
            f.distributed()""")
    )
    new(1)


# ---------------------------------------------------------------------------------------------------- experiments


@pytest.mark.parametrize(
    "choice",
    [
        "mlflow.set_experiment('/Users/me/train')",
        "mlflow.set_experiment(experiment_name=EXPERIMENT)",
        "mlflow.set_experiment('/Users/' + 'ME/train'.lower())",
        "mlflow.set_experiment(experiment_id=mlflow.get_experiment_by_name('/Users/me/train').experiment_id)",
    ],
    ids=["a literal", "a global", "only running code knows it", "an id"],
)
def test_the_experiment_that_the_function_sets_has_the_only_run(book: Notebook, new: NewRuns, choice: str) -> None:
    book.ok(
        dedent("""\
            import mlflow
            EXPERIMENT = '/Users/me/train'
            mlflow.set_experiment(EXPERIMENT)""")
    )
    book.ok("mlflow.tracking.fluent._active_experiment_id = None\nos.environ.pop('MLFLOW_EXPERIMENT_ID', None)")
    outcome = book.ok(
        dedent(f"""\
            @distributed(ranks=2)
            def f():
                import mlflow
                {choice}
                with mlflow.start_run(run_name='mine', tags={{'a': 'b'}}) as run:
                    jupyter_distrib.report(loss=1.0, step=0)
                    mlflow.log_metric('m', 1.0)
                return run.info.run_id
            f.distributed()""")
    )
    (run,) = new(1)
    assert (run.experiment, run.name, run.tags["a"], run.status) == ("/Users/me/train", "mine", "b", "FINISHED")
    assert (run.metrics["m"], run.metrics["loss"], run.params["run.world_size"]) == ([1.0], [1.0], "2")
    assert outcome.result == f"ranks 0-1: '{run.id}'"
    assert outcome.wall_s < 8, outcome.wall_s


def test_a_store_that_the_function_sets_has_the_run(book: Notebook, new: NewRuns, folder: Path) -> None:
    for number, address in enumerate(("'sqlite:///other.db'", "'sqlite:///' + 'other.db'"), 1):
        book.ok(
            f"@distributed(ranks=2)\ndef f():\n    import mlflow\n    mlflow.set_tracking_uri({address})\n"
            "    mlflow.log_metric('m', 1.0)\nf.distributed()"
        )
        assert [run.metrics["m"] for run in runs(folder, number, file="other.db")] == [[1.0]] * number
    assert new(0) == []


def test_a_function_that_changes_its_folder_logs_into_the_notebooks_store(
    book: Notebook, new: NewRuns, folder: Path
) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            os.makedirs('below', exist_ok=True)
            os.chdir('below')
            import mlflow
            mlflow.log_metric('m', 1)""")
    )
    (run,) = new(1)
    assert run.metrics["m"] == [1.0]
    assert not (folder / "below/ml.db").exists()


# ---------------------------------------------------------------------------------------------------- between cells


def test_nothing_of_an_earlier_cell_stays_on_a_rank(book: Notebook, new: NewRuns) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow
            mlflow.set_tracking_uri('sqlite:///third.db')
            mlflow.set_registry_uri('sqlite:///third.db')
            mlflow.set_experiment('elsewhere')
            mlflow.autolog(silent=True)
            mlflow.log_metric('m', 1.0)
            mlflow.start_span('open').__enter__()""")
    )
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --track none
            import mlflow, os
            from mlflow.utils.autologging_utils import AUTOLOGGING_INTEGRATIONS as all
            variables = [name for name in os.environ if name.startswith('MLFLOW') and 'third' in os.environ[name]]
            (mlflow.get_tracking_uri(), mlflow.get_registry_uri(), mlflow.tracking.fluent._active_experiment_id,
             mlflow.get_current_active_span(), mlflow.last_active_run(), any(all.values()), variables)""")
    )
    assert outcome.result == "ranks 0-1: ('sqlite:///ml.db', 'sqlite:///ml.db', None, None, None, False, [])"
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow
            mlflow.log_metric('m', 2.0)""")
    )
    (run,) = new(1)
    assert (run.experiment, run.metrics["m"]) == ("Default", [2.0])


@pytest.mark.parametrize("track", ["", " --track none"])
def test_what_the_notebook_has_set_travels(book: Notebook, new: NewRuns, track: str) -> None:
    book.ok(
        dedent("""\
            import mlflow
            os.environ['MLFLOW_EXPERIMENT_NAME'] = 'not this'
            mlflow.set_experiment('of the notebook')""")
    )
    book.ok(
        dedent(f"""\
            %%distributed --ranks 1{track}
            import mlflow
            with mlflow.start_run():
                mlflow.log_metric('m', 1.0)""")
    )
    (run,) = new(1)
    assert run.experiment == "of the notebook"


# ---------------------------------------------------------------------------------------------------- runs by id


def test_a_run_that_the_notebook_names_goes_on(book: Notebook, new: NewRuns) -> None:
    book.ok("import mlflow\nwith mlflow.start_run(run_name='first') as run: pass")
    book.ok("os.environ['MLFLOW_RUN_ID'] = run.info.run_id")
    book.ok("train.distributed()")
    (run,) = new(1)
    assert (run.name, run.metrics["m"], run.status) == ("first", [0.0, 1.0, 2.0], "FINISHED")


def test_further_and_nested_runs_are_children_made_by_one_rank(book: Notebook, new: NewRuns) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow
            for lr in (1, 2):
                with mlflow.start_run(run_name=f'lr={lr}', nested=True):
                    mlflow.log_param('lr', lr)
                    mlflow.log_metric('m', lr)
            mlflow.log_metric('best', 2)""")
    )
    parent, *children = new(3)
    assert [(each.params["lr"], each.metrics["m"]) for each in children] == [("1", [1.0]), ("2", [2.0])]
    assert {each.tags["mlflow.parentRunId"] for each in children} == {parent.id}
    assert parent.metrics["best"] == [2.0]


def test_what_is_logged_after_a_library_has_ended_the_run_is_in_it_too(book: Notebook, new: NewRuns) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow
            mlflow.start_run(run_name='trained')
            mlflow.log_metric('m', 1)
            mlflow.end_run()
            assert mlflow.active_run() is None
            mlflow.log_metric('after', 2)
            if rank == 0: mlflow.log_params({'late': 3})""")
    )
    (run,) = new(1)
    assert (run.name, run.metrics["after"], run.params["late"]) == ("trained", [2.0], "3")


@pytest.mark.parametrize("arguments", ["", "nested=True", "run_id=os.environ['MLFLOW_RUN_ID']"])
def test_once_a_run_has_begun_no_variable_names_it_as_in_mlflow(book: Notebook, new: NewRuns, arguments: str) -> None:
    """Transformers' Trainer begins the run that it finds there, which is an error if one is active."""
    outcome = book.ok(
        dedent(f"""\
            %%distributed --ranks 2
            import mlflow, os
            with mlflow.start_run({arguments}):
                is_named = 'MLFLOW_RUN_ID' in os.environ
            is_named""")
    )
    assert outcome.result == "ranks 0-1: False"
    new(2 if "nested" in arguments else 1)


def test_models_and_files_of_the_first_rank_arrive_and_those_of_others_do_not(
    book: Notebook, new: NewRuns, folder: Path
) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow, mlflow.pyfunc, torch
            class Model(mlflow.pyfunc.PythonModel):
                def predict(self, model_input: list[str]) -> list[str]:
                    return model_input
            open(f'file{rank}', 'w').write('x')
            mlflow.log_artifact(f'file{rank}')
            mlflow.log_text('t', f'text{rank}')
            info = mlflow.pyfunc.log_model(name='model', python_model=Model(), pip_requirements=[])
            type(info).__name__""")
    )
    (run,) = new(1)
    assert outcome.result == "ranks 0-1: 'ModelInfo'"
    assert sorted(each.name for each in folder.glob(f"mlruns/*/{run.id}/artifacts/*")) == ["file0", "text0"]
    with closing(sqlite3.connect(folder / "ml.db")) as database:
        assert database.execute("select count(*) from logged_models where source_run_id = ?", [run.id]).fetchone() == (
            1,
        )


def test_a_run_that_all_ranks_name_has_each_number_once(book: Notebook, new: NewRuns, folder: Path) -> None:
    book.ok("import mlflow\nwith mlflow.start_run(run_name='earlier') as earlier: mlflow.log_metric('before', 1)")
    (earlier,) = new(1)
    book.ok(
        dedent("""\
            earlier = earlier.info.run_id
            def log_all(run_id):
                import mlflow
                own = mlflow.active_run().info.run_id
                mlflow.log_metric('by_id', 1, run_id=run_id)
                mlflow.log_metric('own', 1, run_id=own)
                mlflow.log_text('x', f'text{os.environ["RANK"]}', run_id=run_id)
                mlflow.end_run()
                with mlflow.start_run(run_id=run_id) as run:
                    mlflow.log_metric('resumed', 2)
                    mlflow.log_params({'p': os.environ['RANK']})
                    return run.info.run_id == run_id
            results = distributed(ranks=2)(log_all).distributed(earlier)""")
    )
    resumed, own = new(2)
    assert book.ok("list(results)").result == "[True, True]"
    assert (resumed.metrics["by_id"], resumed.metrics["resumed"], resumed.params["p"]) == ([1.0], [2.0], "0")
    assert own.metrics["own"] == [1.0]
    assert [each.name for each in folder.glob(f"mlruns/*/{earlier.id}/artifacts/*")] == ["text0"]


def test_a_run_that_a_rank_makes_or_nests_itself_has_what_it_logs(book: Notebook, new: NewRuns) -> None:
    book.ok("import mlflow\nwith mlflow.start_run(run_name='shared') as run: shared = run.info.run_id")
    new(1)
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow
            client = mlflow.MlflowClient()
            mlflow.log_metric('cell', 1)
            made = client.create_run('0', run_name=f'of {rank}').info.run_id
            mlflow.log_metric('by_id', rank, run_id=made)
            mlflow.end_run()
            with mlflow.start_run(run_id=made): mlflow.log_metric('begun', rank)
            with mlflow.start_run(run_id=shared, nested=True): mlflow.log_metric(f'of_{rank}', rank)""")
    )
    found = {each.name: each.metrics for each in new(4)}
    for rank in (0, 1):
        assert (found[f"of {rank}"]["by_id"], found[f"of {rank}"]["begun"]) == ([float(rank)], [float(rank)])
    assert sorted(found["shared"]) == ["of_0", "of_1"]


def test_an_experiment_that_all_ranks_make_is_made_once(book: Notebook, new: NewRuns) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow
            number = mlflow.create_experiment('made by the cell')
            with mlflow.start_run(experiment_id=number): mlflow.log_metric('m', 1)
            number == mlflow.get_experiment_by_name('made by the cell').experiment_id""")
    )
    (run,) = new(1)
    assert outcome.result == "ranks 0-1: True"
    assert (run.experiment, run.metrics["m"]) == ("made by the cell", [1.0])


def test_a_model_that_all_ranks_register_has_one_version(book: Notebook, new: NewRuns) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import mlflow, mlflow.pyfunc
            class Model(mlflow.pyfunc.PythonModel):
                def predict(self, model_input: list[str]) -> list[str]:
                    return model_input
            info = mlflow.pyfunc.log_model(name='model', python_model=Model(), pip_requirements=[])
            mlflow.register_model(info.model_uri, 'registered by the cell').name""")
    )
    new(1)
    versions = "[v.version for v in mlflow.MlflowClient().search_model_versions(\"name='registered by the cell'\")]"
    assert book.ok(f"import mlflow\n{versions}").result == "[1]"


# ---------------------------------------------------------------------------------------------------- what is said


def test_function_source_and_arguments_are_named_and_nothing_internal(book: Notebook, new: NewRuns) -> None:
    book.ok("train.distributed(lr=0.3)")
    (run,) = new(1)
    assert (run.name, run.params["lr"]) == ("train()", "0.3")
    assert run.tags["jupyter_distrib.cell"].startswith("@distributed(ranks=2)\ndef train(lr=0.1):\n    import mlflow")
    assert "__function__" not in str(run)


def test_a_token_among_the_arguments_is_in_no_run(book: Notebook, new: NewRuns) -> None:
    """Notebooks that log to a server from TorchDistributor hand its token on in this way."""
    book.ok(
        dedent("""\
            @distributed(ranks=2, track='mlflow')
            def attached(run_id, db_host, db_token):
                pass
            run = attached.submit('7', 'host', 'hunter2')
            run.result()
            attached.distributed('7', db_host='h', db_token='hunter2')""")
    )
    for run in new(2):
        assert run.params["run_id"] == "7"
        assert "hunter2" not in f"{run.name} {run.params} {run.tags}"


def test_a_function_that_another_one_calls_has_its_own_arguments_in_the_run(book: Notebook, new: NewRuns) -> None:
    """`ray_launch` hands the cluster's token on to such a function."""
    book.ok(
        dedent("""\
            def member(function, args, keywords, ticket):
                return function(*args, **keywords)
            def user(lr, depth=2):
                return lr
            launched = distributed(ranks=2, track='mlflow')(member)
            launched.subject, launched.called_with = user, ((0.5,), {})
            launched.distributed(user, (0.5,), {}, 'hunter2')""")
    )
    (run,) = new(1)
    assert (run.params["lr"], run.params["depth"]) == ("0.5", "2")
    assert "ticket" not in run.params


def test_the_runs_of_a_sweep_have_its_values(book: Notebook, new: NewRuns) -> None:
    book.ok("lr = 0\nimport mlflow")
    with_parent = "with mlflow.start_run(run_name='sweep'):\n    runs = [train.submit(lr) for lr in (0.1, 0.2)]\n"
    book.ok(f"{with_parent}    [run.result() for run in runs]")
    parent, *children = new(3)
    assert sorted(each.params["lr"] for each in children) == ["0.1", "0.2"]
    assert {each.tags["mlflow.parentRunId"] for each in children} == {parent.id}


def test_each_run_of_an_option_sweep_has_its_values(book: Notebook, new: NewRuns) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 1 --sweep width=[3,4]
            import mlflow
            mlflow.log_metric('m', width)""")
    )
    assert sorted((each.params["width"], each.metrics["m"]) for each in new(2)) == [("3", [3.0]), ("4", [4.0])]
