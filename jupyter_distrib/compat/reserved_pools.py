"""The pool of a function with `remote=True`, as Databricks' two variables choose it at each call: the reserved one, one
with an id, or the one on demand. The settings say which pools these are. Kernel side.
"""

from __future__ import annotations

import os

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.notebook.decorator import remote_option
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.settings import find_files

USE_RESERVED = "DATABRICKS_USE_RESERVED_GPU_POOL"
POOL_ID = "DATABRICKS_REMOTE_GPU_POOL_ID"
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def remote_pool() -> str:
    """Return the pool of a call with `remote=True`.

    Raises:
        OptionsError: A variable asks for a pool that the settings do not name.
    """
    settings = session.current().settings
    use, pool_id = os.environ.get(USE_RESERVED, "").strip(), os.environ.get(POOL_ID, "").strip()
    if use and use.lower() not in _WORDS:
        raise OptionsError(f"{USE_RESERVED} must be True or False; it is {use!r}")
    wanted = _WORDS.get(use.lower())
    if wanted is False:
        return remote_option(settings)
    if pool_id:
        found = [name for name, pool in settings.pools.items() if pool_id in (pool.id, name)]
        if not found:
            raise OptionsError(
                f"{POOL_ID} is {pool_id!r}, and no pool has this id: add the line id = {pool_id!r} below the "
                f"[pools.NAME] of that pool in {find_files.user_file()}"
            )
        return found[0]
    if settings.reserved:
        return settings.reserved
    if wanted:
        raise OptionsError(
            f'{USE_RESERVED} is {use!r}, and the settings name no reserved pool: add the line reserved = "NAME" at the '
            f"top of {find_files.user_file()}, with the name of a pool"
        )
    return remote_option(settings)
