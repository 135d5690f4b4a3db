"""`python -m jupyter_distrib.pools.slurm SOCKET_FD DIRECTORY NAME`: the coordinator that `pools/slurm/pool.py` starts.
The pool's options are JSON on standard input."""

from __future__ import annotations

import json
import sys
from functools import partial

from jupyter_distrib.pools.command.serve import serve
from jupyter_distrib.pools.slurm.reservation import SlurmCluster

if __name__ == "__main__":
    options = json.load(sys.stdin)
    title = f"Slurm job {options['job']}" if options["job"] else "Slurm"
    serve(partial(SlurmCluster, options), title, sys.argv[1:], options)
