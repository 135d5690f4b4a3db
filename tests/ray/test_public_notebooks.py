"""A public notebook of serverless GPUs that works with Ray, which nobody here has written: its own lines, made smaller, from
top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Notebook

CELLS = (
    """\
import os
import ray
os.environ['RAY_TEMP_DIR'] = '/tmp/ray'
os.environ["RAY_DEDUP_LOGS"] = "1"
num_samples = 4
""",
    """\
def train_fn_per_worker(params):
    return {"mlogloss": (params["learning_rate"] - 0.1) ** 2, "config": params}

@ray.remote(num_cpus=1)
class TaskRunner:
    def run(self):
        resources = ray.cluster_resources()
        print(f"CPUs of the cluster: {resources['CPU']}", flush=True)
        trial = ray.remote(num_cpus=0)(train_fn_per_worker)
        trials = [trial.remote({"learning_rate": 0.05 * (1 + number)}) for number in range(num_samples)]
        results = ray.get(trials)
        return min(results, key=lambda result: result["mlogloss"])
""",
    """\
from serverless_gpu.ray import ray_launch

@ray_launch(gpus=2)
def my_ray_function():
    runner = TaskRunner.remote()
    return ray.get(runner.run.remote())

results = my_ray_function.distributed()
""",
    """\
results = results[0] if type(results) == list else results
best_params = results["config"]
print(f"Best learning rate: {best_params['learning_rate']}")
""",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_actor_of_the_notebook_drives_the_trials_on_the_cluster(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_compat databricks")
        for code in CELLS:
            outcome = book.cell(code, 250)
            assert outcome.status == "ok", outcome.text
    assert outcome.stdout == "Best learning rate: 0.1\n"
