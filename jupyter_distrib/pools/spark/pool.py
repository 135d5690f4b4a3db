"""Ranks in a Spark application of their own, on Ray on Spark. Kernel side: finds or starts the coordinator. It works
like a Ray pool's, but starts and ends the cluster in Spark. The kernel loads neither Ray nor Spark."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
from typing import ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option, count, json_object, not_an_option
from jupyter_distrib.pools.base import Capabilities, Lost, Sink
from jupyter_distrib.pools.ray.pool import RayPool
from jupyter_distrib.pools.server_home import Home, fingerprint
from jupyter_distrib.pools.server_link import LocalNode, greeted
from jupyter_distrib.pools.spark import master
from jupyter_distrib.wire import messages as m

CONNECT_S = 10.0
"""Seconds to wait for a master."""
INSTALL = 'pip install "jupyter_distrib[spark]"'
OF_THE_CLUSTER = ("--address", "--insecure")
"""Options of the Ray pool about an existing cluster."""
PLACES = ("JAVA_HOME", "SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_PYTHON", "PYSPARK_SUBMIT_ARGS")
"""Variables that determine which Spark is started, and how."""


class SparkPool:
    """The pool of a Spark cluster."""

    kind = "spark"
    options: ClassVar = (
        Option(
            flag="--master",
            metavar="URL",
            meaning="the Spark master: spark://HOST:7077 or local-cluster[2,2,2048]",
            read=not_an_option,
            default="that of spark-defaults.conf",
            main=True,
        ),
        Option(
            flag="--executors",
            metavar="N",
            meaning="wait for N executors, each of which becomes a node",
            read=count,
            default="as many as come",
            main=True,
        ),
        Option(
            flag="--conf",
            metavar="JSON",
            meaning="further settings of Spark: '{\"spark.cores.max\": 8}'",
            read=json_object,
        ),
        *(option for option in RayPool.options if option.flag not in OF_THE_CLUSTER),
    )
    capabilities: ClassVar = Capabilities(streams_content=True)

    def __init__(self, **options: str) -> None:
        self._options = options

    def try_out(self) -> str:
        """Return a sentence on the master; no application is started. Raises `PoolError`."""
        given = self._options.get("master", "")
        check(given)
        match = re.fullmatch(r"spark://\[?([^\s/,]+?)\]?:(\d{1,5})", given)
        if match is None:
            return "Spark, Ray and Java are installed; the first cell starts an application."
        try:
            socket.create_connection((match[1], int(match[2])), timeout=CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise PoolError(
                f"no Spark master can be reached at {given} ({error}): start it, or correct master."
            ) from None
        return (
            f"A program listens at {given}, and Spark, Ray and Java are installed; "
            "the first cell starts an application."
        )

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        check(self._options.get("master", ""))
        given = json.dumps({**self._options, "name": "jupyter_distrib"}, sort_keys=True)
        places = [os.environ.get(name) for name in PLACES]
        home = Home(name=f"spark-{fingerprint(given, *places)}", module="jupyter_distrib.pools.spark", stdin_text=given)
        reason = "the process that holds the Spark application has ended"
        return greeted(home.reach(), hello, sink, lambda _: lost(reason))


def check(chosen: str) -> None:
    """Raise `PoolError` if a requirement is missing here, or if the master cannot provide ranks."""
    for module, name in (("pyspark", "pyspark"), ("ray", "Ray")):
        if importlib.util.find_spec(module) is None:
            raise PoolError(f"the spark pool needs {name}, which is not installed here: {INSTALL}.")
    if refusal := master.refusal(chosen or os.environ.get("SPARK_REMOTE", "")):
        raise PoolError(refusal)
    home = os.environ.get("JAVA_HOME", "")
    if shutil.which(f"{home}/bin/java" if home else "java") is None:
        where = f"JAVA_HOME = {home!r} has none" if home else "there is none on PATH"
        raise PoolError(
            f"Spark needs Java, and {where}: apt-get install openjdk-17-jre-headless, or conda install openjdk=17, or "
            "set JAVA_HOME."
        )
