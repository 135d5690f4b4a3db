"""The line magic `%distributed_pool`, which shows the pools or changes one. Runs in the kernel's main thread."""

from __future__ import annotations

from jupyter_distrib.kernel.notebook import magic_requests
from jupyter_distrib.kernel.notebook.status import PoolTable
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.settings import pool_definitions


def change(line: str) -> PoolTable:
    """Carry out a line of `%distributed_pool`, and return the pools as they are then."""
    current = session.current()
    settings, pools = current.settings, current.pools
    of_kinds = pool_definitions.of_kinds(settings.kinds, settings.strategies)
    request = magic_requests.parse_pool(line, pools=tuple(settings.pools), of_kinds=of_kinds)
    for text in current.choices.untold(settings) if request.action != "trust" else ():
        print(text)
    name = request.name or settings.pool
    match request.action:
        case "list":
            pass
        case "use":
            current.choices.use(request.name)
            current.changed()
        case "add":
            pools.add_pool(pool_definitions.add(settings, name, request.kind or "", request.values))
        case "remove":
            pools.remove_pool(name)
        case "start":
            pools.start_ranks(name, request.size)
        case "stop":
            pools.stop_ranks(name)
        case "restart":
            pools.restart_ranks(name)
        case "resize":
            pools.resize(name, request.size or request.count)
        case "trust":
            print(current.choices.trust(request.name))
    return PoolTable.of(current)
