"""What a notebook has of Ray or Spark, in a cell: stand-ins for their classes. The real ones: tests/ray, tests/spark."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries import known
from jupyter_distrib.serialization import payload

Modules = dict[str, ModuleType]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Ray and Spark, with plain classes."""
    there: Modules = {}
    for library in known.LIBRARIES:
        if library.modules[0] not in ("ray", "pyspark"):
            continue
        for place in (*library.stays, *library.sent, *library.mend):
            module, _, name = place.partition(":")
            made = there.setdefault(module, ModuleType(module))
            if name:
                vars(made).setdefault(name, type(name, (), {"__module__": module}))
    for place, made in there.items():
        monkeypatch.setitem(sys.modules, place, made)
    return there


def reason(thing: object) -> str:
    problem = payload.problem({"thing": thing}, {"thing": thing})
    return problem.reason if problem else ""


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("ray", "ObjectRef", "take `ray.get(x)` in an earlier cell"),
        ("ray.data", "Dataset", "take `x.to_pandas()` in an earlier cell"),
        ("pyspark.sql", "DataFrame", "take `x.toPandas()` in an earlier cell"),
        ("pyspark.sql", "SparkSession", "use it in an earlier cell"),
        ("pyspark", "Accumulator", "would not come back"),
        ("pyspark.ml.torch.distributor", "TorchDistributor", "call the function directly"),
    ],
)
def test_what_belongs_to_the_notebooks_cluster_is_not_sent(modules: Modules, module: str, name: str, said: str) -> None:
    thing = vars(modules[module])[name]()
    assert said in reason(thing)
    assert said in reason([{"inside": thing}])


def test_the_value_of_a_broadcast_variable_is_sent(modules: Modules) -> None:
    broadcast = vars(modules["pyspark"])["Broadcast"]()
    broadcast.value = [1, 2]
    make, arguments = known.sent_forms()[type(broadcast)](broadcast)
    assert pickle.loads(pickle.dumps(make(*arguments))).value == [1, 2]


def test_the_handle_of_an_actor_is_for_ranks_that_are_connected(modules: Modules) -> None:
    class Handle(vars(modules["ray.actor"])["ActorHandle"]):  # type: ignore[misc]
        def __reduce__(self) -> tuple[Any, ...]:
            return str, (5,)

    make, arguments = known.sent_forms()[Handle.__mro__[1]](Handle())
    ray: Any = modules["ray"]
    ray.is_initialized = lambda: False
    with pytest.raises(DistributedError, match=r"`ray\.get_actor\(name\)`"):
        make(*arguments)
    ray.is_initialized = lambda: True
    assert make(*arguments) == "5"


def test_only_the_first_rank_may_start_ray_train(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = modules["ray.train.v2.api.data_parallel_trainer"]
    module.DataParallelTrainer = type("TorchTrainer", (), {"fit": lambda self: 5})
    known.mends()[module.__name__](module)
    trainer = module.DataParallelTrainer()
    monkeypatch.setenv("RANK", "0")
    assert trainer.fit() == 5
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        DistributedError, match=r"TorchTrainer\.fit\(\) on rank 1 .*Call the training function directly"
    ):
        trainer.fit()


def test_one_of_several_ranks_does_not_start_a_distributor(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = modules["pyspark.ml.torch.distributor"]
    known.mends()[module.__name__](module)
    monkeypatch.setenv("WORLD_SIZE", "1")
    module.TorchDistributor()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DistributedError, match=r"^TorchDistributor\(\) on a rank .*Call the function directly"):
        module.TorchDistributor(num_processes=2)
