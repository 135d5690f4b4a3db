"""`pyspark.ml.connect` with a real session: in a plain cell, and in a cell on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.spark.conftest import ON_LOOPBACK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
spark = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
from pyspark.ml.connect import Pipeline, PipelineModel
from pyspark.ml.connect.classification import LogisticRegression
from pyspark.ml.connect.evaluation import BinaryClassificationEvaluator
from pyspark.ml.connect.feature import StandardScaler
rows = [(1.0, [0.1, 2.0]), (0.0, [2.0, 0.1]), (1.0, [0.2, 2.2]), (0.0, [2.1, 0.3])] * 4
frame = spark.createDataFrame(rows, ["label", "features"]).repartition(2)
scaler = StandardScaler(inputCol="features", outputCol="scaled")
regression = LogisticRegression(maxIter=20, numTrainWorkers=2, learningRate=0.1, featuresCol="scaled", seed=1)
"""
FIT = "model = Pipeline(stages=[scaler, regression]).fit(frame)\n"
ACCURACY = """
found = model.transform(frame.toPandas())
accuracy = float((found["prediction"] == found["label"]).mean())
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook"), env=ON_LOOPBACK) as one:
        one.ok("%load_ext jupyter_distrib")
        outcome = one.cell(PROGRAM, 200)
        assert outcome.status == "ok", outcome.text
        yield one


@pytest.fixture(scope="module")
def fitted(book: Notebook) -> Notebook:
    """The notebook, with a `model` that two workers have fitted."""
    outcome = book.cell(FIT + ACCURACY + "accuracy", 300)
    assert outcome.status == "ok", outcome.text
    assert float(outcome.result) > 0.9
    return book


def test_a_pipeline_that_two_workers_have_fitted_is_evaluated(fitted: Notebook) -> None:
    evaluator = (
        "BinaryClassificationEvaluator(metricName='areaUnderROC', labelCol='label', probabilityCol='probability')"
    )
    assert float(fitted.cell(f"float({evaluator}.evaluate(model.transform(frame)))", 200).result) == 1.0
    scaled = fitted.cell("import numpy as np\nnp.stack(found['scaled']).std(axis=0, ddof=1).round(6).tolist()", 60)
    assert scaled.result == "[1.0, 1.0]", scaled.text


def test_a_model_is_loaded_under_this_torch(fitted: Notebook) -> None:
    fitted.ok(
        dedent("""\
            import os
            path = os.path.abspath('saved')
            model.save(path)""")
    )
    refused = fitted.cell("PipelineModel.load(path)", 60)
    assert "weights_only" in refused.text.lower() or refused.status == "ok"
    outcome = fitted.cell(
        "from jupyter_distrib.compat.spark import load\nmodel = load(PipelineModel, path)" + ACCURACY + "accuracy", 60
    )
    assert outcome.status == "ok", outcome.text
    assert float(outcome.result) > 0.9


def test_it_also_runs_on_one_rank(book: Notebook) -> None:
    outcome = book.cell(f"%%distributed --ranks 1\n{PROGRAM}{FIT}{ACCURACY}spark.stop()\naccuracy > 0.9", 350)
    if outcome.status != "ok":  # the view leaves out the middle of a long output
        pytest.fail(book.ok("import jupyter_distrib\nprint(jupyter_distrib.runs()[-1].logs(0))").stdout)
    assert outcome.result == "rank 0: True", outcome.text
