"""Keeps ranks from asking the DNS for the name of 127.0.0.1. In the forkserver, and in ranks that are not forked.

torch (2.9 to 2.15) looks up the name of the first address that a process connects to, and never again
(`formatSockAddr` in socket.cpp). It connects to `::ffff:127.0.0.1`, which /etc/hosts does not have. The query would
delay the first cell by 10 s where the DNS does not answer, and put a warning into it where there is no network.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from datetime import timedelta

from jupyter_distrib.system import network_interfaces
from jupyter_distrib.worker.pytorch import private

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=5)


def finish() -> None:
    """Let torch do its look-up now, without a query. Processes that are forked from this process do none."""
    thread = threading.Thread(target=_look_up)  # each thread has its own settings of the resolver
    thread.start()
    thread.join()


def _look_up() -> None:
    if not _ask_nobody():
        return
    with suppress(OSError, RuntimeError), network_interfaces.listen(_HOST) as listener, private.errors_only():
        private.TCPStore(
            _HOST,
            listener.getsockname()[1],
            1,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )


def _ask_nobody() -> bool:
    """Have the resolver give up in this thread before it asks a server. Return whether the C library can do that."""
    libc = ctypes.CDLL(None)
    try:
        state, initialize = libc["__res_state"], libc["__res_init"]
    except AttributeError:
        return False
    if initialize() != 0:
        return False
    state.restype = ctypes.POINTER(ctypes.c_int)
    state()[_ATTEMPTS] = 0
    return True


_ATTEMPTS = 1
"""Place of `retry` among the integers of `struct __res_state` (resolv.h of glibc)."""
