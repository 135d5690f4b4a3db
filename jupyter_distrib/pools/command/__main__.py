"""`python -m jupyter_distrib.pools.command SOCKET_FD DIRECTORY NAME`: the coordinator of any pool of hosts, which
`HostsPool.connect` starts. Standard input is JSON: the pool's class, the folder that has it, and its options, which
are not on the command line, since that is visible to all."""

from __future__ import annotations

import importlib
import json
import sys
from operator import attrgetter

from jupyter_distrib.pools.command.hosts_pool import HostsPool
from jupyter_distrib.pools.command.serve import serve


def main() -> None:
    told = json.load(sys.stdin)
    if told["folder"] not in sys.path:
        sys.path.append(told["folder"])  # where the kernel has found the class, which may have added the folder itself
    module, _, name = told["pool"].partition(":")
    cls: type[HostsPool] = attrgetter(name)(importlib.import_module(module))
    serve(cls(**told["options"]), sys.argv[1:])


if __name__ == "__main__":
    main()
