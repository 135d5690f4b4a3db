"""`python -m jupyter_distrib.pools.spark.application`: the driver of the Spark application in whose executors Ray runs.

Started by the coordinator (`pools/spark/reservation.py`), which writes the pool's options as JSON in a line to its
standard input; the application ends when that input ends. Its answers are lines of JSON on standard output:
`{"said": TEXT}` while it starts, then `{"address": "HOST:PORT"}` or `{"refused": SENTENCE}`. Neither the kernel nor the
coordinator loads Spark.

Undocumented behaviour of Ray on Spark (measured with Ray 2.60 and pyspark 4.3): it looks for `ray` on PATH, in the
executors too; it makes no token by itself; the number of CPUs of a node and that of GPUs are given together or not
at all.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from jupyter_distrib.addresses import shown
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.spark import master

EXECUTORS_S = 120.0
"""Seconds to wait for the first executor."""
MORE_EXECUTORS_S = 5.0
"""Seconds to wait for further executors after the last one."""
LOOK_S = 0.2
_SECRET = r"(?i)secret|passw|token|credential|(access|account|private)[._-]?key"
"""A part of the names of settings that are secrets, as in Spark's own `spark.redaction.regex`."""
Say = Callable[[str], None]


def main(options: Mapping[str, str], answers: IO[str], until_end: Callable[[], object]) -> None:
    """Start Spark and Ray, answer, and end both when `until_end` returns."""

    def answer(**content: str) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        spark = _session(options)
    except Exception as error:  # noqa: BLE001 - Spark raises all kinds
        return answer(refused=_explained(error))
    try:
        address = _ray(spark, options, lambda text: answer(said=text))
    except PoolError as error:
        answer(refused=str(error))
    except Exception as error:  # noqa: BLE001 - Ray and Spark raise all kinds
        answer(refused=f"Ray cannot be started in the Spark application: {_last_line(error)}.")
    else:
        answer(address=address)
        until_end()
    _end(spark)


def _session(options: Mapping[str, str]) -> Any:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    settings = {"spark.app.name": options["name"], **_settings(options)}
    # Java is started with these on its command line, which every user of the machine sees.
    seen = {key: value for key, value in settings.items() if not re.search(_SECRET, key)}
    java = launch_gateway(SparkConf(loadDefaults=False).setAll(list(seen.items())))
    SparkContext(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())), gateway=java)
    return SparkSession.builder.getOrCreate()


def _settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the application: the settings that Ray on Spark needs, then the user's, which take
    precedence."""
    settings = {"spark.ui.showConsoleProgress": "false"}
    if chosen := options.get("master"):
        settings["spark.master"] = chosen
    if cores := master.local_cores(chosen or ""):
        settings["spark.task.cpus"] = str(cores)  # one node of Ray with all of them
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PATH"):
        settings[f"spark.executorEnv.{name}"] = os.environ[name]
    return {**settings, **{key: str(value) for key, value in json.loads(options.get("conf", "{}")).items()}}


def _ray(spark: Any, options: Mapping[str, str], say: Say) -> str:
    """Start Ray in the executors and return its address. Raises `PoolError`, and any exception of Ray and Spark."""
    from ray.util.spark import setup_ray_cluster

    chosen = spark.sparkContext.master
    if refusal := master.refusal(chosen):
        raise PoolError(refusal)
    say(f"Spark at {shown(chosen)} runs; Ray starts in its executors, which takes about half a minute.")
    size: dict[str, int] = {"max_worker_nodes": 1}
    if not master.local_cores(chosen):
        count, cpus = _executors(spark, options)
        gpus = int(spark.sparkContext.getConf().get("spark.executor.resource.gpu.amount", "0"))
        size = {"max_worker_nodes": count, "num_cpus_worker_node": cpus, "num_gpus_worker_node": gpus}
    return str(setup_ray_cluster(**size, head_node_options={"include_dashboard": False})[0])


def _executors(spark: Any, options: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of executors, and the cores that each has. Raises `PoolError` if there are none, or too
    few."""
    wanted = int(options.get("executors", "0")) or master.executors(spark.sparkContext.master)
    cores: list[int] = []
    until_s = time.monotonic() + EXECUTORS_S
    while time.monotonic() < until_s and not (wanted and len(cores) >= wanted):
        if len(found := _cores(spark)) > len(cores):
            cores, until_s = found, time.monotonic() + (EXECUTORS_S if wanted else MORE_EXECUTORS_S)
        time.sleep(LOOK_S)
    if len(cores) < max(wanted, 1):
        raise PoolError(
            f"Spark at {spark.sparkContext.master} has given {len(cores)} of {max(wanted, 1)} executors within "
            f"{EXECUTORS_S:g} s: end other applications there, or ask for less (spark.executor.cores, "
            "spark.executor.memory in conf)."
        )
    return wanted or len(cores), min(cores)


def _cores(spark: Any) -> list[int]:
    """Return the cores of each executor that there is."""
    found = spark.sparkContext._jsc.sc().statusStore().executorList(True)  # noqa: SLF001 - pyspark has no other way
    each = [found.apply(number) for number in range(found.size())]
    return [int(one.totalCores()) for one in each if one.id() != "driver"]


def _end(spark: Any) -> None:
    """End Ray, if it runs, then Spark."""
    from ray.util.spark import shutdown_ray_cluster

    try:
        shutdown_ray_cluster()
    except Exception as error:  # noqa: BLE001 - the end of Spark ends the rest of Ray with it
        print(f"Ray has not been shut down: {error}", file=sys.stderr)
    spark.stop()


def _explained(error: BaseException) -> str:
    text = _last_line(error)
    if "Java gateway" in text or "JAVA_GATEWAY" in str(error):
        return (
            f"Spark cannot start its Java ({text.rstrip('.')}): Spark 4 needs Java 17 or later, Spark 3.5 Java 8, 11 "
            "or 17; set JAVA_HOME to one."
        )
    return f"the Spark application cannot be started: {text.rstrip('.')}."


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:500]


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Spark and Ray print goes into the log
    main(json.loads(sys.stdin.readline()), replies, sys.stdin.read)
    os._exit(0)  # threads of Ray and Spark take seconds to leave
