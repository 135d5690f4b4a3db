"""`python -m jupyter_distrib.pools.command SOCKET_FD DIRECTORY NAME`: the coordinator that `pools/command/pool.py`
starts. The pool's options are JSON on standard input, since command lines are visible to all."""

from __future__ import annotations

import json
import sys

from jupyter_distrib.pools.command.command import Template
from jupyter_distrib.pools.command.serve import serve

if __name__ == "__main__":
    options = json.load(sys.stdin)
    command = Template(start=options["start"], python=options["python"])
    serve(command, int(sys.argv[1]), sys.argv[2], sys.argv[3], options)
