"""Resets the signals of a process to what a program has that is started at a terminal.

A shell starts `python script.py &` with SIGINT ignored, `nohup` ignores SIGHUP, and a service manager or a thread of a
library may ignore or block others. Programs inherit all that: ranks could not be interrupted, or not wait for their
children.
"""

from __future__ import annotations

import signal

_IGNORED_BY_PYTHON = {
    int(signal.SIGPIPE),
    *(int(getattr(signal, name)) for name in ("SIGXFSZ",) if hasattr(signal, name)),
}
_handler = getattr(signal, "_signal", signal).getsignal
"""The function behind `signal.getsignal`, without the conversion to an enumeration."""


def reset() -> None:
    """Ignore no signal, and block none. To be called before anything else has set a handler."""
    for number in signal.valid_signals():
        if int(number) not in _IGNORED_BY_PYTHON and _handler(number) == int(signal.SIG_IGN):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
