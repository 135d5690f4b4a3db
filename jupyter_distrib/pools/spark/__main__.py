"""`python -m jupyter_distrib.pools.spark SOCKET_FD DIRECTORY NAME`: the coordinator that `pools/spark/pool.py` starts.
The pool's options are JSON on standard input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from jupyter_distrib.pools.ray.serve import prepare, serve
from jupyter_distrib.pools.spark.reservation import Application, SparkCluster


def main(arguments: Sequence[str], options: Mapping[str, str]) -> None:
    prepare()
    application = Application(options, f"{arguments[1]}/{arguments[2]}.log")
    serve(arguments, options, partial(SparkCluster, application))
    application.end()
    os._exit(0)  # Ray's own threads take seconds to end, and hold nothing of this package


if __name__ == "__main__":
    main(sys.argv[1:], json.load(sys.stdin))
