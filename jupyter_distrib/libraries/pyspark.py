"""The facts about Spark's Python. What belongs to a session stays with it. An accumulator would take what ranks add to
it, and lose it without a word, since only tasks of Spark send it back. A distributor starts processes of its own, with
the variables of the rank that it runs on: as many trainings as ranks, into the same files."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries.library import Library

_LAUNCHED = (
    "{name}() on a rank of a distributed cell: the ranks are there already, as many as --ranks or --gpus says. "
    "Call the function directly, or use {name} in a cell without %%distributed."
)


def _broadcast(variable: Any) -> tuple[Any, ...]:
    return broadcast_of, (variable.value,)


def broadcast_of(value: object) -> Any:
    """Return what a rank has in place of a broadcast variable: its value is sent once per node anyway."""
    return types.SimpleNamespace(value=value)


def _refuse(name: str, module: Any) -> None:
    cls = getattr(module, name)
    init = cls.__init__

    @functools.wraps(init)
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        several = os.environ.get("WORLD_SIZE", "1") != "1"  # one rank starts one training
        if several and not _is_in_spark(sys._getframe(1)):  # noqa: SLF001 - no public way without a whole stack
            raise DistributedError(_LAUNCHED.format(name=name))
        init(self, *args, **kwargs)

    cls.__init__ = refuse


def _is_in_spark(frame: types.FrameType) -> bool:
    """Return whether Spark itself makes the object, as an estimator of `pyspark.ml.connect` does: with a session of
    its own, a rank fits it as any program does."""
    return str(frame.f_globals.get("__name__")).startswith("pyspark.")


_SESSION = "it is the connection to Spark: use it in an earlier cell, and let the cell use its result"
_DATA = (
    "its rows are in Spark: take `x.toPandas()` in an earlier cell, or write it to files, as `x.write.parquet(path)` "
    "does, and read those in the cell"
)
_LAUNCHER = (
    "it starts processes of its own: call the function directly in the cell, or use it in a cell without %%distributed"
)
_LAUNCHERS = {
    "pyspark.ml.torch.distributor": "TorchDistributor",
    "pyspark.ml.deepspeed.deepspeed_distributor": "DeepspeedTorchDistributor",
    "spark_tensorflow_distributor.mirrored_strategy_runner": "MirroredStrategyRunner",
}
PYSPARK = Library(
    modules=("pyspark",),
    sent={"pyspark:Broadcast": _broadcast},
    stays={
        "pyspark:SparkContext": _SESSION,
        "pyspark.sql:SparkSession": _SESSION,
        "pyspark.sql.connect.session:SparkSession": _SESSION,
        "pyspark.sql:DataFrame": _DATA,
        "pyspark.sql.connect.dataframe:DataFrame": _DATA,
        "pyspark:RDD": "its items are in Spark: take `x.collect()` in an earlier cell",
        "pyspark.sql:Column": "it is an expression that Spark evaluates: use it in an earlier cell",
        "pyspark:Accumulator": "what ranks add to it would not come back: return the numbers as the cell's value",
        **dict.fromkeys((f"{module}:{name}" for module, name in _LAUNCHERS.items()), _LAUNCHER),
    },
    mend={module: functools.partial(_refuse, name) for module, name in _LAUNCHERS.items()},
)
